"""Times of one op as it will run: graph replay with a cold L2 on CUDA, the wall clock on CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from math import inf

import torch

#: Replays after which a hopeless callable is given up.
_FIRST_LOOK = 2


class OpTimer:
    """Median time of a callable in milliseconds.

    On CUDA the callable is captured once and replayed. Before each replay other memory is read until nothing of the
    callable's is left in the L2 cache, as a decode step finds it after the other layers' weights went through. Writing
    would do that too, but the callable would then wait for what was written to leave the cache.
    """

    def __init__(self, device: torch.device, *, repeats: int = 7, budget_s: float = 0.05) -> None:
        self.device, self.repeats, self.budget_s = device, repeats, budget_s
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.zeros(2 * l2_bytes // 4, dtype=torch.float32, device=device)
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
            #: The last graph, which keeps the pool alive for the next.
            self._graph: torch.cuda.CUDAGraph | None = None

    def measure_ms(
        self, run: Callable[[], object], *, repeats: int | None = None, give_up_ms: float = inf
    ) -> float:
        """`run` is called eagerly once first.

        `repeats` stands in for the timer's own on CUDA; the first times are enough where they exceed `give_up_ms`.
        """
        if self.device.type != "cuda":
            return self._cpu_ms(run)
        return self._cuda_ms(run, repeats or self.repeats, give_up_ms)

    def frozen(self, run: Callable[[], object]) -> Callable[[int], list[float]]:
        """Takes so many times of `run` whenever it is called, in milliseconds.

        On CUDA of `run` as it is chosen now; the memory pool of these graphs is one, so they may only run in turn.
        """
        if self.device.type == "cuda":
            return partial(self._replays_ms, self._capture(run))
        return partial(self._runs_ms, run)

    def _runs_ms(self, run: Callable[[], object], count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _cpu_ms(self, run: Callable[[], object]) -> float:
        run()
        times: list[float] = []
        while not times or (len(times) < self.repeats and sum(times) < self.budget_s):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def _cuda_ms(self, run: Callable[[], object], repeats: int, give_up_ms: float) -> float:
        graph = self._capture(run)
        times = self._replays_ms(graph, min(_FIRST_LOOK, repeats))
        if min(times) <= give_up_ms:
            times += self._replays_ms(graph, repeats - len(times))
        return statistics.median(times)

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of one `run`, without what `torch.cuda.graph` does before each: it empties the allocator's cache,
        and memory that is fetched anew for each of a hundred candidates takes longer than they do.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
            except BaseException:
                # What a broken capture leaves in the pool is not known: the next begins with one of its own.
                self._pool, self._graph = torch.cuda.graph_pool_handle(), None
                raise
        current.wait_stream(self._stream)
        self._graph = graph
        return graph

    def _replays_ms(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        assert self._flush is not None
        events = []
        for _ in range(count):
            self._flush.sum()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]
