"""The context in which dummy forwards tune.

One session per start: the forward stream and grad mode of serving, the skip list, and timings reduced over
the ranks that must choose alike. On CUDA FlashInfer tunes inside the forward; on CPU a profiler is lent to
the in-tree ops for the length of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.flashinfer_api import Lookups
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Step


class Session:
    """Tunes one step at a time; use as a context manager around each of them.

    Args:
        reduce_times: averages candidate times over the ranks that must choose alike, for the CPU profiler.
    """

    def __init__(
        self,
        host: Host,
        skip_ops: tuple[str, ...],
        reduce_times: Callable[[list[float]], list[float]],
    ) -> None:
        self._host, self._skip_ops = host, skip_ops
        self._cpu_profiler = (
            CpuProfiler(frozenset(skip_ops), reduce_times) if host.device.type == "cpu" else None
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(self._host.forward_context())
        # FlashInfer raises on CPU when a group is set: there the profiler reduces instead.
        group = self._host.timing_group if self._cpu_profiler is None else None
        self._stack.enter_context(flashinfer_api.timings_reduced_over(group))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def tune(self, step: Step) -> Lookups:
        """Run the step's forward so that whatever its bucket lacks is measured and filed with the tuner."""
        with flashinfer_api.observed() as lookups, self._tuning(step):
            self._host.dummy_forward(step.shape)
        return lookups

    @contextlib.contextmanager
    def _tuning(self, step: Step) -> Iterator[None]:
        if self._cpu_profiler is None:
            with flashinfer_api.tuning(step.bucket, self._skip_ops):
                yield
            return
        with flashinfer_api.only_defaults(self._skip_ops):
            for op in self._host.tuned_ops:
                op.profiler = self._cpu_profiler
            try:
                yield
            finally:
                for op in self._host.tuned_ops:
                    op.profiler = None
