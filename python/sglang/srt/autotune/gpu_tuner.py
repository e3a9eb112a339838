"""Candidates of an op timed as they will be deployed, on a GPU: replayed from a CUDA graph, with a cold L2.

Before any is timed, runners that tune ops of their own do so at this bucket, and kernels that are compiled on demand
are compiled in parallel.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.failures import describe
from sglang.srt.autotune.profiler import Candidate, Profiler
from sglang.srt.autotune.timer import OpTimer

logger = logging.getLogger(__name__)

#: Replays of one candidate; the median of so few is settled among those that come near the fastest.
REPLAYS = 5
#: A candidate is given up when its first replays take so many times the best so far.
HOPELESS = 1.5
#: Rounds among near-ties. A fixed number: what a rank measures must not follow from its own clock.
ROUNDS = 3
MAX_COMPILE_THREADS = 16


@dataclass
class GpuProfiler(Profiler):
    """See `Profiler`. ``num_threads`` compile at a time; `compile_threads` gives a rank's share."""

    margin: ClassVar[float] = 0.005
    close: ClassVar[float] = 0.05
    max_close: ClassVar[int] = 6

    timer: OpTimer | None = None
    num_threads: int = 1

    def prepare(
        self, candidates: Collection[Candidate], inputs: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        tactics: dict[Any, list[Any]] = {}
        for candidate in candidates:
            tactics.setdefault(candidate.runner, []).append(candidate.tactic)
        for runner, of_runner in tactics.items():
            if getattr(runner, "nested_ops", ()):
                self._tune_nested(runner, of_runner, inputs, kwargs)
        jobs: list[Callable[[], None]] = []
        for runner, of_runner in tactics.items():
            if hasattr(runner, "compile_jobs"):
                jobs += runner.compile_jobs(inputs, list(dict.fromkeys(of_runner)))
        compile_in_parallel(jobs, self.num_threads)

    def _tune_nested(
        self, runner: Any, tactics: list[Any], inputs: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        """One forward in FlashInfer's tuning mode: outside any capture, where a miss may not begin to measure."""
        try:
            runner(inputs, tactic=tactics[0], **kwargs)
        except Exception as error:  # it will raise again where it is timed, and lose there
            self.recover(Candidate(runner, tactics[0]), error)

    def time_s(
        self, candidate: Candidate, inputs: list[torch.Tensor], kwargs: dict[str, Any], best_s: float
    ) -> float:
        assert self.timer is not None
        # Lookups of nested ops hit here; with FlashInfer's group each of them would be a collective nonetheless, and a
        # candidate that fails on one rank would leave the others waiting.
        with flashinfer_api.timings_not_reduced():
            time_ms = self.timer.measure_ms(
                lambda: candidate.runner(inputs, tactic=candidate.tactic, **kwargs),
                repeats=REPLAYS,
                give_up_ms=1e3 * HOPELESS * best_s,
            )
        return time_ms / 1e3

    def another_round(self, num_rounds: int, began_s: float) -> bool:
        return num_rounds < ROUNDS

    def recover(self, candidate: Candidate, error: Exception) -> None:
        """Give memory back; an error that poisons the context ends the step, with the candidate's name."""
        logger.debug("%s cannot be measured: %s", candidate.name, describe(error))
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()
        try:
            torch.cuda.synchronize()
        except Exception as lost:
            raise RuntimeError(
                f"{candidate.name} broke the CUDA context ({describe(error)}); list it in the file of "
                f"{flashinfer_api.BLOCKLIST_VARIABLE} to leave it out"
            ) from lost


def compile_in_parallel(jobs: Iterable[Callable[[], None]], num_threads: int) -> int:
    """Run ``jobs``, each of which compiles a kernel; gives how many failed, which raise again at launch."""

    def succeeds(job: Callable[[], None]) -> bool:
        try:
            job()
        except Exception as error:  # compilers raise all kinds
            logger.debug("a kernel does not compile: %s", describe(error))
            return False
        return True

    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="compile") as pool:
        return sum(not done for done in pool.map(succeeds, jobs))


def compile_threads(num_ranks: int) -> int:
    """How many kernels a rank compiles at a time where ``num_ranks`` share this machine's cores."""
    with contextlib.suppress(AttributeError):
        return max(1, min(len(os.sched_getaffinity(0)) // num_ranks, MAX_COMPILE_THREADS))
    return max(1, min((os.cpu_count() or 1) // num_ranks, MAX_COMPILE_THREADS))
