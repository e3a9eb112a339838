"""Tuning where FlashInfer's profiler cannot measure.

FlashInfer times tactics with CUDA events, so on CPU a tuning lookup that misses raises. Here the in-tree
timer measures the candidates on the step's real inputs and files the winner with the real AutoTuner, which
then serves it like any other: lookup, buckets, files and metadata stay FlashInfer's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.autotune import flashinfer_api

#: The default is kept unless a candidate is faster by this share: below it, a difference is noise on CPU.
MARGIN = 0.03
#: Candidates within this share of the fastest are measured again, in turns, before one is chosen.
CLOSE = 0.15


@dataclass(frozen=True)
class Measurement:
    """Times of one op at one bucket, in milliseconds, the default (-1) first."""

    op_name: str
    key: str
    times_ms: dict[Any, float]
    winner: Any


@dataclass
class CpuProfiler:
    """Measures each candidate of an op on the forward's own inputs.

    ``reduce_times`` averages a list of times over the ranks that must choose alike; all of them call it equally often,
    with the same number of entries. A candidate that raises has time infinity on that rank and therefore on all.
    """

    skip_ops: frozenset[str] = frozenset()
    reduce_times: Callable[[list[float]], list[float]] = field(default=lambda times: times)
    clock: Callable[[], float] = time.perf_counter
    repeats: int = 5
    budget_s: float = 0.05
    rounds: int = 8
    rounds_budget_s: float = 0.15
    measurements: list[Measurement] = field(default_factory=list)

    def ensure_tuned(
        self,
        op_name: str,
        runners: Sequence[Any],
        config: Any,
        inputs: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> None:
        """Measure and file a winner unless the op is skipped or a record answers already."""
        if op_name in self.skip_ops or flashinfer_api.lookup(op_name, runners, config, inputs):
            return
        candidates = [(runners[0], -1)]
        for runner in runners:
            tactics = flashinfer_api.not_blocked(op_name, runner, runner.get_valid_tactics(inputs, None))
            candidates += [(runner, tactic) for tactic in tactics]
        times = self.reduce_times(
            [self._time_s(runner, tactic, inputs, kwargs) for runner, tactic in candidates]
        )
        times = self._settle_near_ties(candidates, times, inputs, kwargs)
        best = choose(times)
        runner, tactic = candidates[best]
        key = flashinfer_api.file_winner(op_name, runner, config, inputs, tactic)
        times_ms = {tactic: 1e3 * t for (_, tactic), t in zip(candidates, times, strict=True)}
        self.measurements.append(Measurement(op_name, key, times_ms, tactic))

    def _settle_near_ties(
        self,
        candidates: list[tuple[Any, Any]],
        times: list[float],
        inputs: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> list[float]:
        """``times`` with those of the candidates near the fastest measured in several rounds.

        One look at each lets noise choose among them, another one at each start. Rounds go through all of them in
        turn, so that a slow moment of the machine meets each. Which are near follows from reduced times: all
        ranks measure the same.
        """
        fastest = min((t for t in times if t > 0), default=float("inf"))
        near = [i for i, t in enumerate(times) if 0 < t <= fastest * (1 + CLOSE) and t != float("inf")]
        if len(near) < 2:
            return times
        rounds: list[list[float]] = []
        began = self.clock()
        while len(rounds) < self.rounds and (not rounds or self.clock() - began < self.rounds_budget_s):
            rounds.append([self._time_s(candidates[i][0], candidates[i][1], inputs, kwargs) for i in near])
        settled = self.reduce_times([statistics.median(column) for column in zip(*rounds, strict=True)])
        return [dict(zip(near, settled, strict=True)).get(i, t) for i, t in enumerate(times)]

    def _time_s(self, runner: Any, tactic: Any, inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> float:
        """Median of a few runs after one warm-up; stops early when the budget for one candidate is spent."""
        try:
            runner(inputs, tactic=tactic, **kwargs)
            times: list[float] = []
            while len(times) < self.repeats and sum(times) < self.budget_s or not times:
                start = self.clock()
                runner(inputs, tactic=tactic, **kwargs)
                times.append(self.clock() - start)
        except Exception:  # a candidate that cannot run here loses, as it does in FlashInfer's own sweep
            return float("inf")
        return statistics.median(times)


def choose(times: Sequence[float], margin: float = MARGIN) -> int:
    """Index of the winner: the fastest, ties within ``margin`` going to the earliest (the default first).

    A stable order among near-ties makes repeated cold starts choose alike.
    """
    usable = [t if t > 0 and t == t else float("inf") for t in times]
    fastest = min(usable)
    return next(i for i, t in enumerate(usable) if t <= fastest * (1 + margin))
