"""Which log-probabilities a batch has to come up with, and which request each of them belongs to.

What is wanted follows from the batch and its requests alone, so every rank knows how long the answer of the one that
computes it will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.managers.io_struct import LogprobParams, TokenLogprobs
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestLogprobs:
    """Of one request: `prompt` from `prompt_start` on, and `output`, one entry for each of its output tokens."""

    def __init__(self, params: LogprobParams, num_prompt_tokens: int) -> None:
        self.num_top = params.num_top
        self.prompt = TokenLogprobs()
        self.output = TokenLogprobs()
        # The prompt token that the next scored row belongs to. The first one of all follows nothing.
        self.next_prompt_index = num_prompt_tokens
        if params.prompt_start is not None:
            self.next_prompt_index = max(1, params.prompt_start)
            if params.prompt_start == 0:
                self.prompt.append(None, [])

    def note_output(self, index: int, value: float, top: list[tuple[int, float]]) -> None:
        """Of the output token `index`, which may be chosen again when its request was put back meanwhile."""
        del self.output.values[index:], self.output.top[index:]
        self.output.append(value, top)


class LogprobPlan:
    """The rows of one forward whose tokens are scored: those of prompts first, then those of the chosen tokens.

    `prompt_rows` are rows of the forward's hidden states and `prompt_targets` the prompt tokens that follow them;
    `output_rows` are rows of its last-token logits.
    """

    def __init__(self, batch: ForwardBatch, reqs: Sequence[Req]) -> None:
        """Made once for each forward, before the next one is planned."""
        self.num_top = 0
        self.prompt_rows: list[int] = []
        self.prompt_targets: list[int] = []
        self.output_rows: list[int] = []
        self._prompt_owners: list[RequestLogprobs] = []
        self._outputs: list[tuple[RequestLogprobs, int]] = []
        first_row = 0
        for i, req in enumerate(reqs):
            num_new = 1 if batch.mode is ForwardMode.DECODE else batch.extend_seq_lens_cpu[i]  # type: ignore[index]
            if req.logprobs is not None:
                self._add(i, req, req.logprobs, batch.seq_lens_cpu[i], num_new, first_row)
            first_row += num_new

    def _add(
        self, i: int, req: Req, wanted: RequestLogprobs, seq_len: int, num_new: int, first_row: int
    ) -> None:
        self.num_top = max(self.num_top, wanted.num_top)
        start = seq_len - num_new
        stop = min(seq_len + 1, len(req.prompt_ids))
        for index in range(max(start + 1, wanted.next_prompt_index), stop):
            self.prompt_rows.append(first_row + index - 1 - start)
            self.prompt_targets.append(req.prompt_ids[index])
            self._prompt_owners.append(wanted)
        wanted.next_prompt_index = max(wanted.next_prompt_index, stop)
        if seq_len >= req.num_tokens:  # else the prompt goes on in the next forward
            self.output_rows.append(i)
            self._outputs.append((wanted, seq_len - len(req.prompt_ids)))

    @property
    def is_empty(self) -> bool:
        return not self.prompt_rows and not self.output_rows

    @property
    def num_words(self) -> int:
        """Integers of `score_tokens` for all rows."""
        return (len(self.prompt_rows) + len(self.output_rows)) * (1 + 2 * self.num_top)

    def note(self, words: Sequence[int]) -> None:
        """Hand `num_words` integers to the requests that they belong to."""
        if self.is_empty:
            return
        rows = np.array(words, dtype=np.int64).reshape(-1, 1 + 2 * self.num_top)
        ids = rows[:, 1 : 1 + self.num_top].tolist()
        floats = rows.view(np.float64)
        values, top_values = floats[:, 0].tolist(), floats[:, 1 + self.num_top :].tolist()
        num_prompt = len(self._prompt_owners)
        for i, wanted in enumerate(self._prompt_owners):
            wanted.prompt.append(values[i], _pairs(ids[i], top_values[i], wanted.num_top))
        for i, (wanted, index) in enumerate(self._outputs, num_prompt):
            wanted.note_output(index, values[i], _pairs(ids[i], top_values[i], wanted.num_top))


def _pairs(ids: list[int], values: list[float], num_top: int) -> list[tuple[int, float]]:
    return list(zip(ids[:num_top], values[:num_top], strict=True))
