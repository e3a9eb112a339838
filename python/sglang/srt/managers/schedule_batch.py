"""A request while it runs, and the batch that one forward works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.managers.io_struct import FinishReason, TokenizedRequest, TokenOutput
from sglang.srt.mem_cache.memory_pool import PADDING_ROW, ReqToTokenPool, TokenAllocator
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

NO_ROW = PADDING_ROW
"""The row that the pool never hands out."""


@dataclass(eq=False)
class Req:
    """One sequence: its tokens, how many of them are in the KV pool, and why it ended.

    `row` is its row of `ReqToTokenPool`, `NO_ROW` while it waits. The slots of its first `num_cached` tokens stand in
    that row. `num_sent` output tokens have been handed to the main process.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    incremental: bool
    max_total_tokens: int
    output_ids: list[int] = field(default_factory=list)
    row: int = NO_ROW
    num_cached: int = 0
    num_sent: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None

    @classmethod
    def from_message(cls, message: TokenizedRequest, max_total_tokens: int) -> Req:
        return cls(message.rid, message.input_ids, message.sampling, message.incremental, max_total_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_to_extend(self) -> int:
        """Tokens that must still enter the KV pool before the next one can be sampled."""
        return self.num_tokens - self.num_cached

    @property
    def max_new_tokens_left(self) -> int:
        """Most tokens that it can still get."""
        num_output = len(self.output_ids)
        return min(self.sampling.max_new_tokens, self.max_total_tokens - len(self.prompt_ids)) - num_output

    def next_tokens(self, num_tokens: int) -> list[int]:
        """The first `num_tokens` tokens that are not in the KV pool yet."""
        start, stop = self.num_cached, self.num_cached + num_tokens
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_ids[start:stop] + self.output_ids[: max(0, stop - num_prompt)]

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Add a sampled token, and set `finish_reason` when it is the last one."""
        self.output_ids.append(token_id)
        ends = token_id in eos_token_ids and not self.sampling.ignore_eos
        if ends or token_id in self.sampling.stop_token_ids:
            self.finish_reason, self.matched_stop = "stop", token_id
        elif self.max_new_tokens_left <= 0:
            self.finish_reason = "length"

    def take_output(self, stream_interval: int) -> TokenOutput | None:
        """The tokens to send now: all new ones at the end or, when sent as they come, every `stream_interval`."""
        num_new = len(self.output_ids) - self.num_sent
        if self.finish_reason is None and not (
            self.incremental and (num_new >= stream_interval or self.num_sent == 0)
        ):
            return None
        new_ids = self.output_ids[self.num_sent :]
        self.num_sent += num_new
        return TokenOutput(self.rid, new_ids, self.finish_reason, self.matched_stop)


@dataclass
class Batch:
    """The requests of one forward. `num_new_tokens[i]` tokens of request i enter the KV pool (one each in DECODE)."""

    mode: ForwardMode
    reqs: list[Req]
    num_new_tokens: list[int]


class RequestMemory:
    """Rows and slots that running requests hold, over the pools of the model runner."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, allocator: TokenAllocator) -> None:
        self._rows = req_to_token_pool
        self._allocator = allocator

    @property
    def num_tokens(self) -> int:
        return self._allocator.num_tokens

    @property
    def num_available(self) -> int:
        return self._allocator.available()

    @property
    def num_used(self) -> int:
        return self.num_tokens - self.num_available

    @property
    def num_free_rows(self) -> int:
        return self._rows.available()

    def forward_batch(self, batch: Batch, device: torch.device | str) -> ForwardBatch:
        """Give the new tokens of `batch` their slots (there must be enough) and describe its forward."""
        slots = self._allocator.alloc(sum(batch.num_new_tokens))
        assert slots is not None, "the policy picked a batch that does not fit"
        if batch.mode is ForwardMode.DECODE:
            return self._decode_batch(batch.reqs, slots, device)
        return self._extend_batch(batch, slots, device)

    def release(self, req: Req) -> None:
        """Take back all that `req` holds; its tokens must be computed again if it goes on."""
        if req.row == NO_ROW:
            return
        self._allocator.free(self._rows.req_to_token[req.row, : req.num_cached])
        self._rows.free([req.row])
        req.row, req.num_cached = NO_ROW, 0

    def _decode_batch(
        self, reqs: Sequence[Req], slots: torch.Tensor, device: torch.device | str
    ) -> ForwardBatch:
        forward_batch = ForwardBatch.decode(
            input_ids=[req.output_ids[-1] for req in reqs],
            seq_lens=[req.num_tokens for req in reqs],
            req_pool_indices=[req.row for req in reqs],
            out_cache_loc=slots,
            device=device,
        )
        self._rows.req_to_token[forward_batch.req_pool_indices, forward_batch.positions] = (
            forward_batch.out_cache_loc.to(torch.int32)
        )
        for req in reqs:
            req.num_cached += 1
        return forward_batch

    def _extend_batch(self, batch: Batch, slots: torch.Tensor, device: torch.device | str) -> ForwardBatch:
        prefix_lens = [req.num_cached for req in batch.reqs]
        input_ids: list[int] = []
        for req, num_new in zip(batch.reqs, batch.num_new_tokens, strict=True):
            if req.row == NO_ROW:
                rows = self._rows.alloc(1)
                assert rows is not None, "the policy picked more requests than there are rows"
                req.row = rows[0]
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
