"""Log-probabilities of given tokens, and of the most likely ones, from rows of logits."""

from __future__ import annotations

import torch

ROWS_AT_A_TIME = 128
"""Prompt tokens whose logits are held at once while prompts are scored."""


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """`logits` `[N, V]` float32 and one token for each row `[N]` int64 -> `[N, 1 + 2 * num_top]` int64.

    A row holds the log-probability of its token, then the `num_top` most likely tokens, best first, then their
    log-probabilities. Log-probabilities are the bits of a float64, so that one integer tensor carries it all to the
    CPU and between ranks. They are natural, and float32 in precision.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    values = logprobs.gather(1, tokens[:, None])
    if num_top == 0:
        return _bits(values)
    top_values, top_ids = logprobs.topk(num_top, dim=-1)
    return torch.cat([_bits(values), top_ids, _bits(top_values)], dim=1)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).view(torch.int64)
