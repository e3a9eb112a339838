"""Routing: from router logits to the experts of each token."""

from __future__ import annotations

import torch


def select_experts(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in float32, then the ``top_k`` largest, optionally renormalised to sum to 1.

    Args:
        router_logits: ``[T, E]``.

    Returns:
        ``(topk_weights [T, K] float32, topk_ids [T, K] int32)``.
    """
    probs = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    topk_weights, topk_ids = torch.topk(probs, top_k, dim=-1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights, topk_ids.to(torch.int32)


def balanced_topk_ids(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Routing that keeps every expert busy: consecutive slots visit the experts in turn.

    Returns:
        ``[T, K]`` int32; the ids of one token are distinct as long as ``K <= E``.
    """
    slots = torch.arange(num_tokens * top_k, device=device, dtype=torch.int64)
    return (slots % num_experts).view(num_tokens, top_k).to(torch.int32)
