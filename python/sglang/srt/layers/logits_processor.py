"""From hidden states to the logits of the tokens that will be sampled."""

from __future__ import annotations

import torch

from sglang.srt.layers.vocab_parallel import ParallelLMHead
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode


def last_token_rows(hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """`[T, H]` -> `[B, H]`, the last token of each sequence."""
    if batch.mode is not ForwardMode.EXTEND:
        return hidden_states
    assert batch.extend_seq_lens is not None
    return hidden_states[torch.cumsum(batch.extend_seq_lens, 0) - 1]


class LogitsProcessor:
    """Turns rows of hidden states into float32 logits over the whole vocabulary."""

    def __init__(self, lm_head: ParallelLMHead) -> None:
        self.lm_head = lm_head

    def __call__(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, H]` -> `[B, vocab_size]` float32, the same on all ranks of the head's group; in `out` if given."""
        logits = self.lm_head.gather(self.lm_head(hidden_states))
        return logits.to(torch.float32) if out is None else out.copy_(logits)
