"""The MoE spelled out in float32, token by token, and inputs to try runners with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang.srt.layers.moe.base import MoEShape
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


def moe_weights(shape: MoEShape, device: torch.device, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """`(w13 [E_local, 2 * I, H], w2 [E_local, H, I])`, scaled so that outputs are of order one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    experts, inner, hidden = shape.num_local_experts, shape.intermediate_size, shape.hidden_size
    w13 = torch.randn((experts, 2 * inner, hidden), generator=generator, device=device) * hidden**-0.5
    w2 = torch.randn((experts, hidden, inner), generator=generator, device=device) * inner**-0.5
    return w13.to(shape.dtype), w2.to(shape.dtype)


def float32_moe(
    shape: MoEShape,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
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
                up, gate = (w13[expert].float() @ x).chunk(2)
                out[place] += topk_weights[row, slot] * (w2[expert].float() @ (F.silu(gate) * up))
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((actual.float() - expected).norm() / expected.norm())
