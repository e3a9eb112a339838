"""Tokens of attention-DP ranks, brought together for the experts and taken apart afterwards.

Every attention-DP rank works on requests of its own; the experts are spread over all of them. So the MoE
layer sees the tokens of all ranks, in rank order, and each rank keeps its own rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.distributed.parallel_state import Group


def gather_tokens(hidden_states: torch.Tensor, num_tokens: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's `[num_tokens[rank], H]` -> `[sum(num_tokens), H]` on every rank. Ranks with 0 tokens take part."""
    assert hidden_states.shape[0] == num_tokens[group.rank], (
        "global_num_tokens does not match this rank's batch"
    )
    longest = max(num_tokens)
    if longest == 0:
        return hidden_states
    padded = hidden_states.new_zeros(longest, hidden_states.shape[1])
    padded[: hidden_states.shape[0]] = hidden_states
    gathered = group.all_gather(padded).view(group.size, longest, -1)
    return torch.cat([gathered[rank, :count] for rank, count in enumerate(num_tokens)])


def local_tokens(hidden_states: torch.Tensor, num_tokens: Sequence[int], group: Group) -> torch.Tensor:
    """The rows of `[sum(num_tokens), H]` that belong to this rank."""
    start = sum(num_tokens[: group.rank])
    return hidden_states[start : start + num_tokens[group.rank]]
