"""Routing in one Triton launch instead of seven: at decode sizes the launches cost more than the work.

Imported on GPUs only: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits,
    weights,
    ids,
    row_stride,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    renormalize: tl.constexpr,
    expert_block: tl.constexpr,
    slot_block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, expert_block)
    slots = tl.arange(0, slot_block)
    nothing = float("-inf")
    left = tl.load(logits + row * row_stride + experts, mask=experts < num_experts, other=nothing)
    left = left.to(tl.float32)
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    chosen = tl.zeros([slot_block], dtype=tl.int32)
    shares = tl.zeros([slot_block], dtype=tl.float32)
    for slot in tl.static_range(top_k):
        best = tl.max(left, axis=0)
        # The lowest of equals; with NaN in the row none is equal, and the id must still be that of an expert.
        expert = tl.min(tl.where(left == best, experts, num_experts - 1), axis=0)
        chosen = tl.where(slots == slot, expert, chosen)
        shares = tl.where(slots == slot, tl.exp(best - largest), shares)
        left = tl.where(experts == expert, nothing, left)
    if renormalize:
        total = tl.sum(shares, axis=0)
    places = row * top_k + slots
    tl.store(weights + places, shares / total, mask=slots < top_k)
    tl.store(ids + places, chosen, mask=slots < top_k)


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What `topk.select_experts` returns for `router_logits` `[T, E]`, `T` above 0, of any floating type."""
    num_tokens, num_experts = router_logits.shape
    device = router_logits.device
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    _route[(num_tokens,)](
        router_logits,
        weights,
        ids,
        router_logits.stride(0),
        num_experts,
        top_k,
        renormalize,
        triton.next_power_of_2(num_experts),
        triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, ids
