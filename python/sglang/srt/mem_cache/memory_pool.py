"""Where keys and values live, and who holds which part of them.

Three small tables: a request owns a row of `ReqToTokenPool`, the row lists the slots of its tokens, and a
slot is a place in `KVPool`. `TokenAllocator` hands out slots. Row 0 and slot 0 are never handed out: padded
and dummy tokens point there, so that a forward needs no special case for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.utils.transfer import to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch import ForwardBatch

PADDING_ROW = 0
PADDING_SLOT = 0


class ReqToTokenPool:
    """Rows of token slots, one row for each running request.

    `req_to_token` is `[size + 1, max_context_len]` int32; row 0 stays zero, and rows 1..size are handed out. `host` is
    the same table where the CPU can read it without waiting for the device.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)
        self._is_on_cpu = self.req_to_token.device.type == "cpu"
        # Not touched beyond the tokens that a request has, so most of it takes no memory.
        self.host: np.ndarray = (
            self.req_to_token.numpy()
            if self._is_on_cpu
            else np.zeros((size + 1, max_context_len), dtype=np.int32)
        )
        self._free = list(range(size, 0, -1))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, num_reqs: int) -> list[int] | None:
        """Rows for `num_reqs` requests, or None when fewer are free."""
        if num_reqs > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_reqs)]

    def free(self, rows: list[int]) -> None:
        assert PADDING_ROW not in rows, "row 0 is not handed out"
        self._free.extend(reversed(rows))
        assert len(self._free) <= self.size, "a row was freed twice"

    def write(self, row: int, start: int, slots: torch.Tensor) -> None:
        """Record `slots` `[n]` as the places of the tokens `start .. start + n` of the request in `row`."""
        end = start + slots.numel()
        slots = slots.to("cpu", torch.int32)
        self.host[row, start:end] = slots.numpy()
        if not self._is_on_cpu:
            self.req_to_token[row, start:end] = to_device(slots, self.req_to_token.device)

    def write_one_each(
        self, rows: Sequence[int], places: Sequence[int], slots: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """Record one slot of `slots` `[B]` for each of `rows`, at `places`. `batch` is the decode batch that has all of
        them on the device.
        """
        self.host[rows, places] = slots.numpy()
        if not self._is_on_cpu:
            self.req_to_token[batch.req_pool_indices, batch.positions] = batch.out_cache_loc.to(torch.int32)


class TokenAllocator:
    """Hands out the slots 1..num_tokens, one for each token.

    The free list lives on the CPU: which slots a batch gets must not depend on a device's timing, and all
    ranks that hold the same requests must choose the same slots.
    """

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        if page_size != 1:
            raise ValueError(f"page_size {page_size} is not supported: slots are handed out one by one")
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Take all slots back."""
        self._free = torch.arange(1, self.num_tokens + 1, dtype=torch.int64)
        self._num_free = self.num_tokens

    def available(self) -> int:
        return self._num_free

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """`[num_tokens]` int64 slots on the CPU, or None when fewer are free."""
        if num_tokens > self._num_free:
            return None
        slots = self._free[self._num_free - num_tokens : self._num_free].clone()
        self._num_free -= num_tokens
        return slots

    def free(self, slots: torch.Tensor) -> None:
        """Give `slots` back, on any device."""
        count = slots.numel()
        assert self._num_free + count <= self.num_tokens, "a slot was freed twice"
        self._free[self._num_free : self._num_free + count] = slots.to("cpu", torch.int64)
        self._num_free += count


class KVPool:
    """Keys and values of `num_layers` layers, `[num_tokens + 1, num_kv_heads, head_dim]` each; slot 0 is the
    sink.

    `first_layer` is the global index of the first layer held here, so that a pipeline stage asks by global
    index.
    """

    def __init__(
        self,
        num_tokens: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        first_layer: int = 0,
    ) -> None:
        if page_size != 1:
            raise ValueError(f"page_size {page_size} is not supported: slots are handed out one by one")
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.dtype = dtype
        self.first_layer = first_layer
        shape = (num_tokens + 1, num_kv_heads, head_dim)
        # Zeros, not empty: attention multiplies masked values by a weight of zero, and zero times NaN is NaN.
        self._k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer - self.first_layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer - self.first_layer]

    def set_kv(self, layer: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k` and `v` `[T, num_kv_heads, head_dim]` at the slots `loc` `[T]` int64."""
        _store(self.k(layer), loc, k)
        _store(self.v(layer), loc, v)


def _store(pool: torch.Tensor, loc: torch.Tensor, rows: torch.Tensor) -> None:
    rows = rows.to(pool.dtype)
    if pool.dtype.itemsize == 1:  # torch does not index float8 tensors
        pool, rows = pool.view(torch.uint8), rows.contiguous().view(torch.uint8)
    pool.index_copy_(0, loc, rows)


def read_slots(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `slots` `[n]` of `KVPool.k(layer)` or `.v(layer)`, as `[n, num_kv_heads, head_dim]` of `dtype`."""
    # Whole rows at once: on the CPU several times quicker than indexing a tensor of three dimensions.
    flat = pool.view(pool.shape[0], -1)
    if pool.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)
    return flat.index_select(0, slots).view(pool.dtype).view(-1, *pool.shape[1:]).to(dtype)
