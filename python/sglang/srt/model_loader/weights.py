"""Which part of which checkpoint tensor fills which part of which parameter.

Every layer declares its `WeightSlot`s, so sharding over ranks, fused parameters and transposed orders are
data. One loader then checks names and shapes and copies, whatever the model and the layout of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightSlot:
    """`dest` takes `tensor[index]` of a checkpoint tensor of the given full `shape`.

    `dest` is a view into a parameter, or None where other ranks alone hold the tensor. Where values are stored in
    another order or format, `store` takes `tensor[index]` instead and puts it in its place. `alternative` is the
    name under which other checkpoints store the same values; one of the two names must be there.
    """

    shape: tuple[int, ...]
    dest: torch.Tensor | None
    index: tuple[slice, ...] = (slice(None),)
    alternative: str | None = None
    store: Callable[[torch.Tensor], None] | None = None


NamedSlot = tuple[str, WeightSlot]
NamedSlots = Iterator[NamedSlot]


def whole(name: str, param: torch.Tensor) -> NamedSlot:
    """A parameter that every rank holds in full."""
    return name, WeightSlot(tuple(param.shape), param)


def rows(name: str, dest: torch.Tensor, full_rows: int, start: int) -> NamedSlot:
    """`dest` holds `dest.shape[0]` rows of the checkpoint tensor, from row `start` on."""
    return name, WeightSlot((full_rows, *dest.shape[1:]), dest, (slice(start, start + dest.shape[0]),))


def columns(name: str, dest: torch.Tensor, full_columns: int, start: int) -> NamedSlot:
    """`dest` `[n, c]` holds `c` columns of the checkpoint tensor `[n, full_columns]`, from column `start` on."""
    index = (slice(None), slice(start, start + dest.shape[1]))
    return name, WeightSlot((dest.shape[0], full_columns), dest, index)
