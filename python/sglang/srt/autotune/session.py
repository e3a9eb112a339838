"""The context in which dummy forwards tune.

One session per start: the forward stream and grad mode of serving, the skip list, and timings reduced over
the ranks that must choose alike. For the length of a step a profiler is lent to the in-tree ops; on CUDA FlashInfer's
ops tune themselves inside the forward, those that an in-tree op's runner calls among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.flashinfer_api import Lookups
from sglang.srt.autotune.gpu_tuner import GpuProfiler, compile_threads
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Step
from sglang.srt.autotune.profiler import Profiler
from sglang.srt.autotune.timer import OpTimer


class Session:
    """Tunes one step at a time; use as a context manager around each of them.

    Args:
        reduce_times: averages candidate times over the ranks that must choose alike, for the in-tree ops.
        timer: measures candidates on a GPU; its memory pool serves the verification too.
    """

    def __init__(
        self,
        host: Host,
        skip_ops: tuple[str, ...],
        reduce_times: Callable[[list[float]], list[float]],
        timer: OpTimer,
    ) -> None:
        self._host, self._skip_ops = host, skip_ops
        self._on_cpu = host.device.type == "cpu"
        self._profiler = self._create_profiler(reduce_times, timer)
        self._stack = contextlib.ExitStack()

    def _create_profiler(
        self, reduce_times: Callable[[list[float]], list[float]], timer: OpTimer
    ) -> Profiler:
        host, skip_ops = self._host, frozenset(self._skip_ops)
        if self._on_cpu:
            return CpuProfiler(skip_ops, reduce_times)
        threads = compile_threads(host.topology.world_size)
        return GpuProfiler(skip_ops, reduce_times, timer=timer, num_threads=threads)

    def __enter__(self) -> Session:
        self._stack.enter_context(self._host.forward_context())
        # FlashInfer raises on CPU when a group is set: there the profiler reduces instead.
        group = None if self._on_cpu else self._host.timing_group
        self._stack.enter_context(flashinfer_api.timings_reduced_over(group))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def tune(self, step: Step) -> Lookups:
        """Run the step's forward so that whatever its bucket lacks is measured and filed with the tuner."""
        profiler = self._profiler
        before = profiler.out_of_memory
        with flashinfer_api.observed() as lookups, self._tuning(step):
            self._host.dummy_forward(step.shape)
        lookups.out_of_memory += profiler.out_of_memory - before
        return lookups

    def failed_candidates(self) -> list[str]:
        """A line for each runner of an in-tree op some of whose candidates could not be measured."""
        return [
            f"{runner}: {count} candidates could not be measured; the first: {reason}"
            for runner, (count, reason) in self._profiler.failed.items()
        ]

    @contextlib.contextmanager
    def _tuning(self, step: Step) -> Iterator[None]:
        if self._on_cpu:
            tuning = flashinfer_api.only_defaults(self._skip_ops)
        else:
            tuning = flashinfer_api.tuning(step.bucket, self._skip_ops)
        with tuning, lent(self._profiler, self._host.tuned_ops):
            yield


@contextlib.contextmanager
def lent(profiler: Any, ops: Sequence[Any]) -> Iterator[None]:
    """Have ``ops`` measure by ``profiler`` what no record answers."""
    for op in ops:
        op.profiler = profiler
    try:
        yield
    finally:
        for op in ops:
            op.profiler = None
