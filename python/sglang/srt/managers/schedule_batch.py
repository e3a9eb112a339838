"""A request while it runs, and the batch that one forward works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang.srt.managers.io_struct import FinishReason, TokenizedRequest, TokenOutput
from sglang.srt.managers.logprobs import RequestLogprobs
from sglang.srt.mem_cache.memory_pool import PADDING_ROW
from sglang.srt.mem_cache.radix_cache import Node
from sglang.srt.model_executor.forward_batch import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

NO_ROW = PADDING_ROW
"""The row that the pool never hands out."""


@dataclass(eq=False)
class Req:
    """One sequence: its tokens, how many of them are in the KV pool, and why it ended.

    `row` is its row of `ReqToTokenPool`, `NO_ROW` while it waits. The slots of its first `num_cached` tokens stand in
    that row. `num_sent` output tokens have been handed to the main process.

    `num_reused` is how many prompt tokens were found in the prefix cache when it first ran, None before.
    `RequestMemory` keeps the last three fields: the end of the cached prefix that it locks, its length, and its slots
    until they stand in the row.
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
    logprobs: RequestLogprobs | None = None
    num_reused: int | None = None
    cache_node: Node | None = None
    num_shared: int = 0
    prefix_slots: np.ndarray | None = None

    @classmethod
    def from_message(cls, message: TokenizedRequest, max_total_tokens: int) -> Req:
        req = cls(message.rid, message.input_ids, message.sampling, message.incremental, max_total_tokens)
        if message.logprobs is not None:
            req.logprobs = RequestLogprobs(message.logprobs, len(message.input_ids))
        return req

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_to_extend(self) -> int:
        """Tokens that must still enter the KV pool before the next one can be sampled."""
        return self.num_tokens - self.num_cached

    @property
    def num_reusable(self) -> int:
        """Tokens at its head whose keys and values may come from a cache.

        Those after them must be computed, for the next token and for log-probabilities still wanted of the prompt.
        """
        if self.logprobs is None or self.logprobs.next_prompt_index >= len(self.prompt_ids):
            return self.num_tokens - 1
        return self.logprobs.next_prompt_index - 1

    @property
    def num_pending(self) -> int:
        """Tokens that a forward under way is choosing: 1 while there is one that has all known tokens, else 0."""
        return max(0, self.num_cached + 1 - self.num_tokens)

    @property
    def is_at_end(self) -> bool:
        """Whether it can get no token after the pending one."""
        return self.max_new_tokens_left <= self.num_pending

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

    def first_tokens(self, num_tokens: int) -> list[int]:
        """The first `num_tokens` tokens, prompt and output together."""
        num_prompt = len(self.prompt_ids)
        if num_tokens <= num_prompt:
            return self.prompt_ids[:num_tokens]
        return self.prompt_ids + self.output_ids[: num_tokens - num_prompt]

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
        output = TokenOutput(
            self.rid, self.output_ids[self.num_sent :], self.finish_reason, self.matched_stop
        )
        output.num_cached_tokens = self.num_reused or 0
        if self.logprobs is not None:
            output.logprobs = self.logprobs.output.cut(self.num_sent, len(self.output_ids))
            if self.num_sent == 0 and self.logprobs.prompt.values:
                output.prompt_logprobs = self.logprobs.prompt
        self.num_sent += num_new
        return output


@dataclass
class Batch:
    """The requests of one forward. `num_new_tokens[i]` tokens of request i enter the KV pool (one each in DECODE)."""

    mode: ForwardMode
    reqs: list[Req]
    num_new_tokens: list[int]
