"""Linear layers split over the ranks of a group. Weights are `[out, in]`; each layer declares which shard it loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.model_loader.weights import NamedSlots, columns, rows, whole


def divide(size: int, parts: int, what: str) -> int:
    """`size / parts`; raises `ValueError` that says what cannot be split over how many ranks."""
    if size % parts:
        raise ValueError(
            f"{what} ({size}) cannot be split over {parts} ranks: choose a parallel size that divides it"
        )
    return size // parts


class Linear(nn.Module):
    """`x @ weight.T + bias`, the base of all layers here and the layer that every rank holds in full."""

    def __init__(
        self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_size, in_size, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield whole(f"{prefix}.weight", self.weight)
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


class MergedColumnParallelLinear(Linear):
    """Several projections of one input in one matmul, the outputs of each split over the ranks.

    `names` are the checkpoint's names of the projections and `out_sizes` their full widths. The result `[T,
    sum / size]` holds this rank's shard of each, one after the other.
    """

    def __init__(
        self,
        in_size: int,
        names: Sequence[str],
        out_sizes: Sequence[int],
        group: Group,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.names, self.out_sizes, self.group = tuple(names), tuple(out_sizes), group
        shards = [
            divide(size, group.size, f"{name} outputs") for name, size in zip(names, out_sizes, strict=True)
        ]
        self.shard_sizes = shards
        super().__init__(in_size, sum(shards), bias, dtype, device)

    def weight_slots(self, prefix: str) -> NamedSlots:
        """`prefix` is the name of the module that owns the projections."""
        offset = 0
        for name, full, shard in zip(self.names, self.out_sizes, self.shard_sizes, strict=True):
            start = self.group.rank * shard
            yield rows(f"{prefix}.{name}.weight", self.weight[offset : offset + shard], full, start)
            if self.bias is not None:
                yield rows(f"{prefix}.{name}.bias", self.bias[offset : offset + shard], full, start)
            offset += shard


class QKVParallelLinear(Linear):
    """Query, key and value projections in one matmul, split over the ranks by heads.

    With more ranks than KV heads, neighbouring ranks hold copies of one KV head. `forward` returns
    `[T, (num_heads + 2 * num_kv_heads) * head_dim]` with this rank's head counts.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        group: Group,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head_dim, self.group = head_dim, group
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, total_num_kv_heads
        self.num_heads = divide(total_num_heads, group.size, "attention heads")
        self.num_kv_heads = local_kv_heads(total_num_kv_heads, group.size)
        super().__init__(
            hidden_size, (self.num_heads + 2 * self.num_kv_heads) * head_dim, bias, dtype, device
        )

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views `[T, num_heads, head_dim]`, `[T, num_kv_heads, head_dim]` twice, of what `forward` returned."""
        heads = qkv.unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v

    def weight_slots(self, prefix: str) -> NamedSlots:
        """`prefix` is the name of the attention module."""
        rank, dim = self.group.rank, self.head_dim
        first_kv_head = rank * self.total_num_kv_heads // self.group.size
        parts = [
            ("q_proj", self.num_heads, self.total_num_heads, rank * self.num_heads),
            ("k_proj", self.num_kv_heads, self.total_num_kv_heads, first_kv_head),
            ("v_proj", self.num_kv_heads, self.total_num_kv_heads, first_kv_head),
        ]
        offset = 0
        for name, num_heads, total, first in parts:
            end = offset + num_heads * dim
            yield rows(f"{prefix}.{name}.weight", self.weight[offset:end], total * dim, first * dim)
            if self.bias is not None:
                yield rows(f"{prefix}.{name}.bias", self.bias[offset:end], total * dim, first * dim)
            offset = end


class RowParallelLinear(Linear):
    """A projection whose inputs are split over the ranks; `forward` takes the shard and returns the sum over ranks."""

    def __init__(
        self, in_size: int, out_size: int, group: Group, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_size, self.group = in_size, group
        super().__init__(divide(in_size, group.size, "inputs of a projection"), out_size, bias, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One rank adds the bias, or the sum would hold it once for each rank.
        return self.group.all_reduce(F.linear(x, self.weight, self.bias if self.group.is_first else None))

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield columns(f"{prefix}.weight", self.weight, self.in_size, self.group.rank * self.weight.shape[1])
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


def local_kv_heads(total_num_kv_heads: int, num_ranks: int) -> int:
    """KV heads that one of `num_ranks` attention ranks holds: a share, or a copy of one where there are too few."""
    if num_ranks > total_num_kv_heads:
        divide(num_ranks, total_num_kv_heads, "attention ranks per KV head")
        return 1
    return divide(total_num_kv_heads, num_ranks, "key-value heads")
