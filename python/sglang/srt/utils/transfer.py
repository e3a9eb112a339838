"""Copies between the CPU and a device that let the CPU go on.

A plain copy to a GPU waits until the GPU has done everything before it, which would end the overlap of the scheduler's
work with the forward before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor` on `device`. One on the CPU may be changed as soon as this returns, unless `device` is the CPU too."""
    device = torch.device(device)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    # The allocator of pinned memory hands a block out again only after the copies from it.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor to the CPU, begun now and waited for when its values are needed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done = _recorded_event(tensor.device)

    def tolist(self) -> list[Any]:
        if self._done is not None:
            self._done.synchronize()
        values: list[Any] = self._copy.tolist()
        return values


class PlanFence:
    """Keeps the plan of one forward in its pinned buffers until the device has fetched it.

    FlashInfer's wrappers plan on the CPU and copy the plan to the device later, in the order of the stream. When the
    next forward is planned before this one has begun, the same buffers would be overwritten.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetched: torch.cuda.Event | None = None

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around the planning of one forward. Waits at most for the device to begin the forward planned before."""
        if self._fetched is not None:
            self._fetched.synchronize()
        yield
        self._fetched = _recorded_event(self._device)


def _recorded_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
