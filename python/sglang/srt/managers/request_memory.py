"""What running requests hold: a row each, and the slots of their tokens.

Requests with a common prefix share its slots through the radix cache. A request's first `num_shared` tokens stand in
slots of the cache, which it locks; those after them are its own, until they are handed over: after every forward of
its prompt, so that others find it, and when it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.managers.schedule_batch import NO_ROW, Batch, Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool, TokenAllocator
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode


class RequestMemory:
    """Rows and slots over the pools of the model runner. Without a `cache` every prompt is computed whole."""

    def __init__(
        self, req_to_token_pool: ReqToTokenPool, allocator: TokenAllocator, cache: RadixCache | None = None
    ) -> None:
        self._rows = req_to_token_pool
        self._allocator = allocator
        self._cache = cache

    @property
    def num_tokens(self) -> int:
        return self._allocator.num_tokens

    @property
    def num_available(self) -> int:
        """Slots that are free, or would be if the cache were asked for them."""
        return self._allocator.available() + (self._cache.num_evictable if self._cache else 0)

    @property
    def num_used(self) -> int:
        return self.num_tokens - self.num_available

    def claim(self, req: Req) -> int:
        """Give a request that waits the prefix of it that the cache has; what is left to compute shrinks accordingly.

        Returns by how much `num_available` shrinks. The last token is never taken from the cache: the forward needs
        one to predict from.
        """
        assert req.row == NO_ROW and req.num_cached == 0
        if self._cache is None:
            return 0
        before = self._cache.num_evictable
        req.cache_node, req.prefix_slots = self._cache.match(req.first_tokens(req.num_reusable))
        self._cache.lock(req.cache_node)
        req.num_cached = req.num_shared = len(req.prefix_slots)
        return before - self._cache.num_evictable

    def unclaim(self, req: Req) -> None:
        """Undo `claim`: the request goes on waiting."""
        self._let_go(req)
        req.num_cached = 0

    def forward_batch(self, batch: Batch, device: torch.device | str) -> ForwardBatch:
        """Give the new tokens of `batch` their slots (there must be enough) and describe its forward."""
        slots = self._alloc(sum(batch.num_new_tokens))
        if batch.mode is ForwardMode.DECODE:
            return self._decode_batch(batch.reqs, slots, device)
        return self._extend_batch(batch, slots, device)

    def release(self, req: Req) -> None:
        """Take back all that `req` holds. If it goes on, it starts again with what the cache still has of it then."""
        if req.row == NO_ROW:
            return
        if self._cache is None:
            self._free(self._rows.host[req.row, : req.num_cached])
        else:
            self._publish(req)
        self._rows.free([req.row])
        self._let_go(req)
        req.row, req.num_cached = NO_ROW, 0

    def flush(self) -> None:
        """Empty the cache; no request may hold anything."""
        if self._cache is not None:
            assert self._cache.num_evictable == self._cache.num_tokens, "a request still uses the cache"
            self._free(self._cache.evict(self._cache.num_tokens))

    def publish(self, reqs: Sequence[Req]) -> None:
        """Let others find what `reqs` have in the pool. To be called once the forward that computes it is launched:
        all that reads it comes after.
        """
        if self._cache is not None:
            for req in reqs:
                self._publish(req)

    def _alloc(self, num_tokens: int) -> torch.Tensor:
        missing = num_tokens - self._allocator.available()
        if missing > 0 and self._cache is not None:
            self._free(self._cache.evict(missing))
        slots = self._allocator.alloc(num_tokens)
        assert slots is not None, "the policy picked a batch that does not fit"
        return slots

    def _free(self, slots: np.ndarray) -> None:
        self._allocator.free(torch.from_numpy(slots))

    def _let_go(self, req: Req) -> None:
        if self._cache is not None and req.cache_node is not None:
            self._cache.unlock(req.cache_node)
        req.cache_node, req.prefix_slots, req.num_shared = None, None, 0

    def _publish(self, req: Req) -> None:
        """Hand the slots of `req` over to the cache; those of tokens that it has got meanwhile are freed."""
        cache, row = self._cache, self._rows.host[req.row]
        assert cache is not None and req.cache_node is not None
        assert req.num_cached <= req.num_tokens, "a token that is not known yet cannot be found again"
        node, num_present = cache.insert(
            req.first_tokens(req.num_cached), row[: req.num_cached].astype(np.int64)
        )
        self._free(row[req.num_shared : num_present])
        cache.lock(node)
        cache.unlock(req.cache_node)
        req.cache_node, num_shared = node, req.num_shared
        req.num_shared = req.num_cached
        if num_present > num_shared:
            # Read the others' slots from now on; forwards that are under way read its own before anybody reuses them.
            slots = cache.slots_of(node)[num_shared:num_present]
            self._rows.write(req.row, num_shared, torch.from_numpy(slots))

    def _decode_batch(
        self, reqs: Sequence[Req], slots: torch.Tensor, device: torch.device | str
    ) -> ForwardBatch:
        rows = [req.row for req in reqs]
        forward_batch = ForwardBatch.decode(
            # Where the latest token is not known yet, the executor has it on the device.
            input_ids=[req.output_ids[-1] if req.output_ids else 0 for req in reqs],
            seq_lens=[req.num_cached + 1 for req in reqs],
            req_pool_indices=rows,
            out_cache_loc=slots,
            device=device,
        )
        self._rows.write_one_each(rows, [req.num_cached for req in reqs], slots, forward_batch)
        for req in reqs:
            req.num_cached += 1
        return forward_batch

    def _extend_batch(self, batch: Batch, slots: torch.Tensor, device: torch.device | str) -> ForwardBatch:
        prefix_lens = [req.num_cached for req in batch.reqs]
        input_ids: list[int] = []
        for req, num_new in zip(batch.reqs, batch.num_new_tokens, strict=True):
            if req.row == NO_ROW:
                self._start(req)
            start = len(input_ids)
            input_ids += req.next_tokens(num_new)
            self._rows.write(req.row, req.num_cached, slots[start : len(input_ids)])
            req.num_cached += num_new
        return ForwardBatch.extend(
            input_ids=input_ids,
            extend_seq_lens=batch.num_new_tokens,
            extend_prefix_lens=prefix_lens,
            req_pool_indices=[req.row for req in batch.reqs],
            out_cache_loc=slots,
            device=device,
        )

    def _start(self, req: Req) -> None:
        rows = self._rows.alloc(1)
        assert rows is not None, "the policy picked more requests than there are rows"
        req.row = rows[0]
        if req.prefix_slots is not None and req.num_cached:
            self._rows.write(req.row, 0, torch.from_numpy(req.prefix_slots))
        req.prefix_slots = None
        if req.num_reused is None:
            req.num_reused = req.num_cached
