"""The sweep where a launch spans several ranks: every rank tries the same candidates in the same order.

Worker processes cannot take part in the ranks' symmetric memory, so candidates are compiled one after the other in
the serving processes: about 5 s each on an H200 (two ranks, both compiling). To keep a ladder affordable the list is
short: where the kernel has a single-rank bench, its sweep decides which candidates are tried; else the first capacity
tries all of them and its neighbours only what did best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from sglang.srt.autotune.megamoe.bench import CPU_BUDGET_S, ReplayTimer, typical_us
from sglang.srt.autotune.megamoe.context import TuningContext, collective_reference
from sglang.srt.autotune.megamoe.kernels.base import Knobs, MegaInputs, Owner
from sglang.srt.autotune.megamoe.sweep_search import Choice, knobs_key

FIRST_REPEATS, MORE_REPEATS = 3, 12
#: A candidate this much slower than the best so far is not timed any longer.
HOPELESS = 1.3
NUM_INHERITED = 4


class LockstepSweep:
    """Tunes capacity by capacity; all ranks iterate together.

    Args:
        contenders: by capacity, what a single-rank sweep found worth trying, fastest first.
    """

    def __init__(
        self, context: TuningContext, contenders: Mapping[int, Sequence[Knobs]] | None = None
    ) -> None:
        self._context, self._kernel, self._agreement = context, context.profiles.kernel, context.agreement
        budget_s = CPU_BUDGET_S if context.agreement.is_alone else math.inf
        self._timer = ReplayTimer(self._kernel.device, cpu_budget_s=budget_s)
        self._contenders = contenders or {}

    def tune(self, capacities: Sequence[int]) -> Iterator[Choice]:
        inherited: list[Knobs] | None = None
        for capacity in capacities:
            timed, problems, default_us = self._sweep(capacity, self._candidates(capacity, inherited))
            inherited = [knobs for _, knobs in timed[:NUM_INHERITED]]
            best = timed[0] if timed else (None, None)
            yield Choice(
                capacity, best[1], best[0], default_us, None, len(timed) + len(problems), tuple(problems)
            )

    def _candidates(self, capacity: int, inherited: list[Knobs] | None) -> list[Knobs]:
        kernel, default = self._kernel, self._kernel.default_knobs(capacity)
        if contenders := self._contenders.get(capacity):  # empty where the single-rank sweep came to nothing
            rest = list(contenders)
        elif inherited:
            rest = inherited + kernel.variants(inherited[0])
        else:
            rest = kernel.candidates(capacity)
        unique = {knobs_key(knobs): knobs for knobs in [default, *rest]}
        return list(unique.values())

    def _sweep(
        self, capacity: int, candidates: list[Knobs]
    ) -> tuple[list[tuple[float, Knobs]], list[str], float | None]:
        """Right candidates with their times, fastest first; the others' problems; the default's time."""
        inputs = self._context.inputs(capacity)
        inputs.output = torch.empty_like(inputs.hidden_states)
        expected = collective_reference(self._context, inputs)
        timed: list[tuple[float, Knobs]] = []
        problems: list[str] = []
        default_us = None
        for index, knobs in enumerate(candidates):
            best = min((time for time, _ in timed), default=None)
            outcome = self._try(capacity, index, knobs, inputs, expected, best)
            if isinstance(outcome, str):
                problems.append(outcome)
            else:
                timed.append((outcome, knobs))
                default_us = outcome if index == 0 else default_us
        return sorted(timed, key=lambda pair: pair[0]), problems, default_us

    def _try(
        self,
        capacity: int,
        index: int,
        knobs: Knobs,
        inputs: MegaInputs,
        expected: torch.Tensor,
        best_us: float | None,
    ) -> float | str:
        """The slowest rank's time, or why there is none; the same answer on every rank."""
        name = f"candidate {index} at MegaMoE capacity {capacity}"
        owner: Owner | None = None
        problem = None
        try:
            owner = self._kernel.create_owner(self._context.profiles.weights[0], capacity, knobs)
        except Exception as error:  # the other ranks must not launch it without this one
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        try:
            if problem := self._first_problem(f"whether {name} exists", problem):
                return problem
            assert owner is not None
            owner.warmup(inputs)
            self._kernel.synchronize()
            off = self._error(inputs, expected)
            problem = f"its result is off by {off:.2e}" if off > self._kernel.tolerance else None
            if problem := self._first_problem(f"whether {name} is right", problem):
                return problem
            run = self._timer.capture(lambda: owner.forward(inputs))
            times = self._times(name, run, FIRST_REPEATS)
            if best_us is None or typical_us(times) <= HOPELESS * best_us:
                times += self._times(name, run, MORE_REPEATS)
            return typical_us(times)
        finally:
            if owner is not None:
                owner.destroy()

    def _error(self, inputs: MegaInputs, expected: torch.Tensor) -> float:
        assert inputs.output is not None
        difference = (inputs.output.float() - expected).norm() / expected.norm().clamp_min(1e-20)
        return float(torch.nan_to_num(difference, nan=float("inf")))

    def _times(self, name: str, run: object, repeats: int) -> list[float]:
        """Times of every replay, of the rank that was slowest at it."""
        self._agreement.gather(f"start of timing {name}", None)
        mine = self._timer.times_us(run, repeats)
        answers = self._agreement.gather(f"times of {name}", mine)
        return [max(column) for column in zip(*answers.values(), strict=False)]

    def _first_problem(self, question: str, mine: str | None) -> str | None:
        answers = self._agreement.gather(question, mine)
        return next((f"rank {rank}: {text}" for rank, text in answers.items() if text is not None), None)
