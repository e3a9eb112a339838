"""One candidate at one capacity: made ready, checked against a float reference, and timed as it will be served.

On CUDA a candidate is captured once and its graph replayed, the L2 cache overwritten before each replay: in eager
mode host work hides the differences between candidates, and a warm cache would still hold the weights.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels.base import Knobs, MegaInputs, MegaMoEKernel, Owner

#: Launches of one timing round on CPU take at most about this long, where one rank launches alone.
CPU_BUDGET_S = 0.2


class ReplayTimer:
    """Times a callable: graph replay with a cold L2 on CUDA, the wall clock on CPU.

    `cpu_budget_s` cuts a round on the CPU short. Not where a launch spans several ranks: each would stop by its own
    clock, and one that went on would wait for the others in vain.
    """

    def __init__(self, device: torch.device, *, cpu_budget_s: float = math.inf) -> None:
        self.device, self._cpu_budget_us = device, 1e6 * cpu_budget_s
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)

    def capture(self, launch: Any) -> Any:
        """What `times_us` runs: a graph of `launch` on CUDA, `launch` itself on CPU. The launch was warmed before."""
        if self._flush is None:
            return launch
        # Not `torch.cuda.graph`: it collects garbage first, which takes longer here than the timing.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.capture_begin()
            launch()
            graph.capture_end()
        torch.cuda.synchronize(self.device)
        return graph.replay

    def times_us(self, run: Any, repeats: int) -> list[float]:
        """`repeats` times in microseconds, fewer when the budget is spent, after one run that does not count."""
        run()
        return self._cpu_times(run, repeats) if self._flush is None else self._cuda_times(run, repeats)

    def _cpu_times(self, run: Any, repeats: int) -> list[float]:
        times: list[float] = []
        while not times or (len(times) < repeats and sum(times) < self._cpu_budget_us):
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
        return times

    def _cuda_times(self, run: Any, repeats: int) -> list[float]:
        assert self._flush is not None
        events = []
        for _ in range(repeats):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [1e3 * start.elapsed_time(end) for start, end in events]


@dataclass
class Prepared:
    """A candidate that is compiled and warm."""

    owner: Owner
    inputs: MegaInputs
    output: torch.Tensor
    run: Any
    times_us: list[float] = field(default_factory=list)


class KernelBench:
    """Times candidates of one kernel on one rank; `prepare` may overlap with other benches, the rest may not."""

    def __init__(self, kernel: MegaMoEKernel, weights: Any, dtype: torch.dtype) -> None:
        self.kernel, self._weights, self._dtype = kernel, weights, dtype
        self._timer = ReplayTimer(kernel.device, cpu_budget_s=CPU_BUDGET_S)
        self._expected: dict[int, torch.Tensor] = {}  # by capacity; the inputs of one are always the same

    def prepare(self, capacity: int, knobs: Knobs) -> Prepared:
        """Compile the candidate, run it once and capture it."""
        kernel = self.kernel
        owner = kernel.create_owner(self._weights, capacity, knobs)
        try:
            inputs = routed_inputs(capacity, kernel.geometry, self._dtype, kernel.device)
            inputs.output = torch.empty_like(inputs.hidden_states)
            owner.warmup(inputs)
            run = self._timer.capture(lambda: owner.forward(inputs))
            if capacity not in self._expected:
                self._expected[capacity] = kernel.float_reference(self._weights, inputs)
            return Prepared(owner, inputs, inputs.output, run)
        except BaseException:
            owner.destroy()
            raise

    def error(self, prepared: Prepared) -> float:
        """Relative error (norm over norm) against the float reference; infinite when it is not finite."""
        prepared.output.zero_()
        prepared.owner.forward(prepared.inputs)
        self.kernel.synchronize()
        expected = self._expected[prepared.inputs.num_tokens]
        difference = (prepared.output.float() - expected).norm() / expected.norm().clamp_min(1e-20)
        error = float(difference)
        return error if math.isfinite(error) else math.inf

    def time_us(self, prepared: Prepared, repeats: int) -> float:
        """The typical time of all runs so far, with `repeats` new ones."""
        prepared.times_us += self._timer.times_us(prepared.run, repeats)
        return typical_us(prepared.times_us)

    def release(self, prepared: Prepared) -> None:
        prepared.run = None
        self.kernel.synchronize()
        prepared.owner.destroy()


def typical_us(times: list[float]) -> float:
    """Median of the faster half: whatever else ran on the device meanwhile can only have slowed a run down."""
    return statistics.median(sorted(times)[: (len(times) + 1) // 2])
