"""Choosing among all runners and tactics of an in-tree op, on the step's own inputs.

FlashInfer's own profiler makes inputs up (its expert ids would be no experts), times eagerly and cannot measure on a
CPU. For an op of this tree the stage lends one of its own instead, which files the winner with the real AutoTuner:
lookup, buckets, files and metadata stay FlashInfer's. How a candidate is timed is up to the subclass.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.failures import describe
from sglang.srt.autotune.records.record import describe_tactic

INFINITY = float("inf")


@dataclass(frozen=True)
class Candidate:
    """One way to compute the op."""

    runner: Any
    tactic: Any

    @property
    def name(self) -> str:
        return f"{type(self.runner).__name__} {self.tactic}"


@dataclass(frozen=True)
class Measurement:
    """Times of one op at one bucket, in milliseconds by candidate, the default first."""

    op_name: str
    key: str
    times_ms: dict[str, float]
    winner: str


@dataclass
class Profiler(ABC):
    """Measures the candidates of an op on the forward's own inputs and files the fastest.

    A runner whose tactics are made of two independent parts says so by ``tactic_space(inputs)``, a list of objects with
    ``first``, ``second`` and ``tactic(i, j)``: then all first parts are timed with ``second[0]``, and all second parts
    with the fastest first one, instead of every pair.

    ``reduce_times`` averages a list of times over the ranks that must choose alike; all of them call it equally often,
    with the same number of entries, since what is measured next follows from reduced times alone. A candidate that
    raises has time infinity on that rank and therefore on all.
    """

    #: An earlier candidate is kept unless a later one is faster by this share: below it, a difference is noise.
    margin: ClassVar[float] = 0.03
    #: Candidates within this share of the fastest are measured again, in turns, before one is chosen.
    close: ClassVar[float] = 0.15
    #: At most so many of them.
    max_close: ClassVar[int] = 1 << 30

    skip_ops: frozenset[str] = frozenset()
    reduce_times: Callable[[list[float]], list[float]] = field(default=lambda times: times)
    measurements: list[Measurement] = field(default_factory=list)
    #: Candidates that could not be measured for want of memory.
    out_of_memory: int = 0
    #: By runner: how often one of its candidates could not be measured, and why the first of them could not.
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)

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
        extras = {runner.get_cache_key_extras(inputs) for runner in runners}
        assert len(extras) == 1, f"the runners of {op_name} disagree on what they are asked: {extras}"
        candidates = [Candidate(runners[0], -1)]
        spaces: list[tuple[Any, Any]] = []
        for runner in runners:
            if hasattr(runner, "tactic_space"):
                spaces += [(runner, space) for space in runner.tactic_space(inputs)]
            else:
                candidates += self._allowed(op_name, runner, runner.get_valid_tactics(inputs, None))
        firsts = [
            self._allowed(op_name, runner, [space.tactic(i, 0) for i in range(len(space.first))])
            for runner, space in spaces
        ]
        seconds_alone = [
            Candidate(runner, space.tactic(0, j))
            for runner, space in spaces
            for j in range(len(space.second))
        ]
        candidates += [candidate for group in firsts for candidate in group]
        self.prepare([*candidates, *seconds_alone], inputs, kwargs)

        times = self._times(candidates, inputs, kwargs)
        time_of = dict(zip(candidates, times, strict=True))
        more: list[Candidate] = []
        for (runner, space), group in zip(spaces, firsts, strict=True):
            best = min(group, key=lambda candidate: time_of[candidate], default=None)
            if best is None or time_of[best] == INFINITY:
                continue
            index = [space.tactic(i, 0) for i in range(len(space.first))].index(best.tactic)
            tactics = [space.tactic(index, j) for j in range(1, len(space.second))]
            more += self._allowed(op_name, runner, tactics)
        if more:
            times += self._times(more, inputs, kwargs)
            candidates += more
        times = self._settle_near_ties(candidates, times, inputs, kwargs)
        winner = candidates[choose(times, self.margin)]
        key = flashinfer_api.file_winner(op_name, winner.runner, config, inputs, winner.tactic)
        times_ms = {c.name: 1e3 * t for c, t in zip(candidates, times, strict=True)}
        self.measurements.append(Measurement(op_name, key, times_ms, winner.name))

    def prepare(
        self, candidates: Collection[Candidate], inputs: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        """What can be done for all candidates together before any is timed."""
        return

    @abstractmethod
    def time_s(
        self, candidate: Candidate, inputs: list[torch.Tensor], kwargs: dict[str, Any], best_s: float
    ) -> float:
        """Seconds of one run; a rough value will do where it is far above ``best_s``. May raise."""

    @abstractmethod
    def another_round(self, num_rounds: int, began_s: float) -> bool:
        """Whether candidates near the fastest are measured once more, after ``num_rounds`` rounds."""

    def now_s(self) -> float:
        """The clock of `another_round`."""
        return 0.0

    def recover(self, candidate: Candidate, error: Exception) -> None:
        """Called after a candidate raised; raises where nothing can be measured any more."""
        return

    def _allowed(self, op_name: str, runner: Any, tactics: list[Any]) -> list[Candidate]:
        """The tactics that the blocklist leaves, as candidates."""
        return [Candidate(runner, tactic) for tactic in flashinfer_api.not_blocked(op_name, runner, tactics)]

    def _times(
        self, candidates: Sequence[Candidate], inputs: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> list[float]:
        best, times = INFINITY, []
        for candidate in candidates:
            time_s = self._time_or_infinity(candidate, inputs, kwargs, best)
            best = min(best, time_s) if time_s > 0 else best
            times.append(time_s)
        return self.reduce_times(times)

    def _time_or_infinity(
        self, candidate: Candidate, inputs: list[torch.Tensor], kwargs: dict[str, Any], best_s: float
    ) -> float:
        """A candidate that cannot run here loses, as it does in FlashInfer's own sweep."""
        try:
            return self.time_s(candidate, inputs, kwargs, best_s)
        except Exception as error:
            self.out_of_memory += isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
            count, reason = self.failed.get(
                type(candidate.runner).__name__,
                (0, f"tactic {describe_tactic(candidate.tactic)}, {describe(error)}"),
            )
            self.failed[type(candidate.runner).__name__] = (count + 1, reason)
            self.recover(candidate, error)
            return INFINITY

    def _settle_near_ties(
        self,
        candidates: Sequence[Candidate],
        times: list[float],
        inputs: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> list[float]:
        """``times`` with those of the candidates near the fastest measured in several rounds.

        One look at each lets noise choose among them, another one at each start. Rounds go through all of them in
        turn, so that a slow moment of the machine meets each. Which are near follows from reduced times: all
        ranks measure the same.
        """
        fastest = min((t for t in times if t > 0), default=INFINITY)
        near = [i for i, t in enumerate(times) if 0 < t <= fastest * (1 + self.close) and t != INFINITY]
        near = sorted(sorted(near, key=lambda i: times[i])[: self.max_close])
        if len(near) < 2:
            return times
        rounds: list[list[float]] = []
        began = self.now_s()
        while self.another_round(len(rounds), began):
            rounds.append([self._time_or_infinity(candidates[i], inputs, kwargs, INFINITY) for i in near])
        settled = self.reduce_times([statistics.median(column) for column in zip(*rounds, strict=True)])
        return [dict(zip(near, settled, strict=True)).get(i, t) for i, t in enumerate(times)]


def choose(times: Sequence[float], margin: float = Profiler.margin) -> int:
    """Index of the winner: the fastest, ties within ``margin`` going to the earliest (the default first).

    A stable order among near-ties makes repeated cold starts choose alike.
    """
    usable = [t if t > 0 and t == t else INFINITY for t in times]
    fastest = min(usable)
    return next(i for i, t in enumerate(usable) if t <= fastest * (1 + margin))
