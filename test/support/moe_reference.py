"""The MoE spelled out in float32, token by token, and inputs to try runners with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.moe.base import ExpertWeights, MoEShape
from sglang.srt.layers.moe.topk import select_experts


def moe_inputs(
    shape: MoEShape, num_tokens: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(hidden_states, topk_ids, topk_weights)`: normal rows, routed by random logits over all experts."""
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden = torch.randn((num_tokens, shape.hidden_size), generator=generator, device=device)
    logits = torch.randn((num_tokens, shape.num_experts), generator=generator, device=device)
    weights, ids = select_experts(logits, shape.top_k, renormalize=True)
    return hidden.to(shape.dtype), ids, weights


def moe_weights(shape: MoEShape, device: torch.device, seed: int = 1) -> ExpertWeights:
    """Weights, and biases where the shape has them, scaled so that outputs are of order one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    experts, inner, hidden = shape.num_local_experts, shape.intermediate_size, shape.hidden_size

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    w13, w2 = normal(experts, 2 * inner, hidden) * hidden**-0.5, normal(experts, hidden, inner) * inner**-0.5
    weights = ExpertWeights(w13.to(shape.dtype), w2.to(shape.dtype))
    if shape.has_bias:
        b13, b2 = normal(experts, 2 * inner), normal(experts, hidden)
        weights = weights._replace(b13=b13.to(shape.dtype), b2=b2.to(shape.dtype))
    return weights


def float32_moe(
    shape: MoEShape,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """What the local experts contribute to tokens `rows` (all by default), `[len(rows), H]` float32."""
    rows = range(hidden_states.shape[0]) if rows is None else rows
    out = torch.zeros(len(rows), shape.hidden_size, device=hidden_states.device)
    for place, row in enumerate(rows):
        x = hidden_states[row].float()
        for slot in range(shape.top_k):
            expert = int(topk_ids[row, slot]) - shape.first_local_expert
            if 0 <= expert < shape.num_local_experts:
                up_gate = w13[expert].float() @ x + (0 if b13 is None else b13[expert].float())
                of_expert = w2[expert].float() @ _activated(shape, up_gate)
                if b2 is not None and shape.tp_rank == 0:
                    of_expert += b2[expert].float()
                out[place] += topk_weights[row, slot] * of_expert
    return out


def _activated(shape: MoEShape, up_gate: torch.Tensor) -> torch.Tensor:
    (up, gate), activation = up_gate.chunk(2), shape.activation
    if activation.limit is not None:
        up, gate = up.clamp(-activation.limit, activation.limit), gate.clamp(max=activation.limit)
    return (up + activation.beta) * gate * torch.sigmoid(activation.alpha * gate)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((actual.float() - expected).norm() / expected.norm())
