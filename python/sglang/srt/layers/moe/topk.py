"""Routing: from router logits to the experts of each token."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from sglang.srt.utils.errors import first_line

logger = logging.getLogger(__name__)

Selector = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]


def select_experts(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in float32, then the ``top_k`` largest, optionally renormalised to sum to 1.

    Renormalised, the weights are those of a softmax over the chosen logits alone, as gpt-oss takes it.

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


@functools.cache
def expert_selector(device: torch.device) -> Selector:
    """`select_experts` for tensors on `device`: one kernel on a GPU, or, with a warning, torch where that fails."""
    if device.type != "cuda":
        return select_experts
    try:
        from sglang.srt.layers.moe.router_kernel import route

        route(torch.zeros(2, 8, device=device), 2, True)
        torch.cuda.synchronize(device)
    except Exception as error:  # Triton is missing, or finds no compiler for its launcher
        reason = first_line(error)
        logger.warning("Routing runs in plain torch: the Triton kernel fails (%s)", reason)
        return select_experts
    return route


def typical_topk_ids(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Routing as a trained router gives it: all experts are as likely, and some get more tokens than others.

    Which kernel is the fastest depends on how uneven the experts' shares are, so a choice that is measured with equal
    shares is wrong at serving. Slot ``k`` of a token draws from the ``k``-th part of the experts: the ids of a token
    are distinct, and every rank of an expert-parallel group gets its part. The draw is a hash of the slot's number,
    the same on every device and at every start.

    Returns:
        ``[T, K]`` int32, ``K <= E``.
    """
    slots = torch.arange(num_tokens * top_k, device=device, dtype=torch.int64).view(num_tokens, top_k)
    choice = slots % top_k
    first = choice * num_experts // top_k
    size = (choice + 1) * num_experts // top_k - first
    return (first + _hashed(slots) % size).to(torch.int32)


def _hashed(values: torch.Tensor) -> torch.Tensor:
    """Non-negative int64 below `2^32` -> the same, scattered: shifts and products until each bit moves all others."""
    values = (values + 1) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x45D9F3B), (15, 0x45D9F3B)):
        values = ((values ^ (values >> shift)) * factor) & 0xFFFFFFFF
    return values ^ (values >> 16)
