"""Candidates of an op timed by the wall clock, on CPUs, where FlashInfer's profiler cannot measure at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.autotune.profiler import Candidate, Profiler

#: One run that takes so many times the best so far is enough to know.
HOPELESS = 4.0


@dataclass
class CpuProfiler(Profiler):
    """See `Profiler`. A candidate's time is the median of a few runs after one warm-up, within a budget."""

    clock: Callable[[], float] = time.perf_counter
    repeats: int = 5
    budget_s: float = 0.05
    rounds: int = 8
    rounds_budget_s: float = 0.15

    def time_s(
        self, candidate: Candidate, inputs: list[torch.Tensor], kwargs: dict[str, Any], best_s: float
    ) -> float:
        runner, tactic = candidate.runner, candidate.tactic
        runner(inputs, tactic=tactic, **kwargs)
        times: list[float] = []
        while len(times) < self.repeats and sum(times) < self.budget_s or not times:
            start = self.clock()
            runner(inputs, tactic=tactic, **kwargs)
            times.append(self.clock() - start)
            if times[0] > HOPELESS * best_s:
                break
        return statistics.median(times)

    def another_round(self, num_rounds: int, began_s: float) -> bool:
        """Ranks may stop after different numbers of rounds: the median of each is reduced once."""
        return not num_rounds or (num_rounds < self.rounds and self.clock() - began_s < self.rounds_budget_s)

    def now_s(self) -> float:
        return self.clock()
