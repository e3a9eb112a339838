"""Times of one op as it will run: graph replay with a cold L2 on CUDA, the wall clock on CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class OpTimer:
    """Median time of a callable in milliseconds.

    On CUDA the callable is captured once and replayed, the L2 cache overwritten before each replay, as a
    decode step finds it after the other layers' weights went through.
    """

    def __init__(self, device: torch.device, *, repeats: int = 7, budget_s: float = 0.05) -> None:
        self.device, self.repeats, self.budget_s = device, repeats, budget_s
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)

    def measure_ms(self, run: Callable[[], object]) -> float:
        return self._cuda_ms(run) if self.device.type == "cuda" else self._cpu_ms(run)

    def _cpu_ms(self, run: Callable[[], object]) -> float:
        run()
        times: list[float] = []
        while not times or (len(times) < self.repeats and sum(times) < self.budget_s):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def _cuda_ms(self, run: Callable[[], object]) -> float:
        assert self._flush is not None
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        events = []
        for _ in range(self.repeats):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in events)
