"""Inputs that look like serving, for tuning and warming a workspace of any capacity.

The rows are those of the start-up batch, repeated or sliced to the capacity. A rank that was idle in that batch
makes some up, since its experts work for the others all the same.
"""

from __future__ import annotations

import torch

from sglang.srt.autotune.megamoe.kernels.base import Geometry, MegaInputs

_SEED = 6


def representative_inputs(
    startup: MegaInputs | None, num_tokens: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> MegaInputs:
    """`num_tokens` rows: the start-up batch's, or synthetic ones where it has none."""
    if startup is None or startup.num_tokens == 0:
        return synthetic_inputs(num_tokens, geometry, dtype, device)
    rows = torch.arange(num_tokens, device=startup.hidden_states.device) % startup.num_tokens
    return MegaInputs(
        startup.hidden_states[rows].contiguous(),
        startup.topk_ids[rows].contiguous(),
        startup.topk_weights[rows].contiguous(),
    )


def synthetic_inputs(
    num_tokens: int, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> MegaInputs:
    """Normal hidden states; experts in turn over the whole EP range, each rank starting elsewhere; uniform weights."""
    generator = torch.Generator().manual_seed(_SEED + geometry.rank)
    hidden = torch.randn((num_tokens, geometry.hidden_size), generator=generator)
    slots = torch.arange(num_tokens * geometry.top_k) + geometry.rank * geometry.num_local_experts
    ids = (slots % geometry.num_experts).view(num_tokens, geometry.top_k)
    weights = torch.full((num_tokens, geometry.top_k), 1 / geometry.top_k)
    return MegaInputs(hidden.to(device, dtype), ids.to(device, torch.int32), weights.to(device))


def routed_inputs(
    num_tokens: int, geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> MegaInputs:
    """As `synthetic_inputs`, with experts drawn at random without repetition and uneven weights, as a router gives."""
    generator = torch.Generator().manual_seed(seed + geometry.rank)
    hidden = torch.randn((num_tokens, geometry.hidden_size), generator=generator)
    scores = torch.rand((num_tokens, geometry.num_experts), generator=generator)
    weights, ids = torch.topk(scores, geometry.top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return MegaInputs(hidden.to(device, dtype), ids.to(device, torch.int32), weights.float().to(device))
