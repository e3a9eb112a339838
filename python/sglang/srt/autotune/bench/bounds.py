"""What the GPU can do at best: the rates that bound every time of this benchmark.

Measured, not read from a data sheet: a copy of memory for bandwidth, a large matrix product for arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sglang.srt.layers.moe.base import MoEShape


@dataclass(frozen=True)
class Bounds:
    """Bytes per second of a copy, read and written counted; BF16 operations per second, two for each product."""

    bytes_per_s: float
    flops_per_s: float

    def us(self, num_bytes: float, flops: float = 0.0) -> float:
        """Microseconds that work of this size takes at the least."""
        return 1e6 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_bounds(device: torch.device) -> Bounds:
    """The medians of many repetitions, in about a second on a GPU."""
    return Bounds(_copied_bytes_per_s(device), _product_flops_per_s(device))


def _copied_bytes_per_s(device: torch.device) -> float:
    size = (2 << 30) if device.type == "cuda" else (8 << 20)
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), device, repeats=30)


def _product_flops_per_s(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a = torch.randn((size, size), device=device).to(dtype)
    b = torch.randn((size, size), device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / median_s(lambda: torch.mm(a, b, out=out), device, repeats=30)


def median_s(run: Callable[[], Any], device: torch.device, *, repeats: int, warmups: int = 3) -> float:
    """Median seconds of ``run``, each between two events of its own (wall clock on a CPU)."""
    for _ in range(warmups):
        run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = []
    for _ in range(repeats):
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        run()
        end_event.record()
        events.append((start_event, end_event))
    torch.cuda.synchronize(device)
    return 1e-3 * statistics.median(start.elapsed_time(end) for start, end in events)


def moe_work(shape: MoEShape, topk_ids: torch.Tensor) -> tuple[int, int, int]:
    """`(experts touched, bytes of their weights, operations)` of one call routed by `topk_ids` `[T, K]`."""
    touched = int(torch.unique(topk_ids).numel())
    weights = 3 * shape.intermediate_size * shape.hidden_size
    return touched, touched * weights * shape.dtype.itemsize, 2 * weights * topk_ids.numel()
