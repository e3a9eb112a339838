"""What the Hopper FP8 kernel computes, in float32 from the same quantised weights.

A candidate must be compared with this and not with the BF16 model: quantisation alone moves the result by 6-7%,
while two right candidates differ by 0.3-0.7%.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sglang.srt.autotune.megamoe.kernels.base import MegaInputs

WEIGHT_BLOCK, INPUT_BLOCK, MIDDLE_BLOCK = 128, 128, 64
#: Rows of gate and up projections alternate in runs of this length in the prepared weights.
INTERLEAVE = 8
FP8 = torch.float8_e4m3fn


def blockwise_fp8_moe(weights: Any, inputs: MegaInputs, first_expert: int = 0) -> torch.Tensor:
    """`[T, H]` float32: the weighted sum of the experts whose prepared weights are given.

    `weights` is what FlashInfer's preparation returns. Routing weights are applied before the second product's input
    is quantised, as in the kernel.
    """
    (w1, s1, *_), (w2, s2, *_) = weights
    x = quantised(inputs.hidden_states.float(), INPUT_BLOCK)
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        rows, slots = (inputs.topk_ids == first_expert + expert).nonzero(as_tuple=True)
        if not rows.numel():
            continue
        gate_up = x[rows] @ dequantised(w1[expert].t(), s1[expert]).t()
        paired = gate_up.view(rows.shape[0], -1, 2, INTERLEAVE)
        middle = (F.silu(paired[:, :, 0]) * paired[:, :, 1]).reshape(rows.shape[0], -1)
        middle = quantised(middle * inputs.topk_weights[rows, slots].unsqueeze(1), MIDDLE_BLOCK)
        out.index_add_(0, rows, middle @ dequantised(w2[expert].t(), s2[expert]).t())
    return out


def quantised(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x` after a trip through FP8 with one scale for each `block` columns of a row."""
    blocks = x.reshape(x.shape[0], -1, block)
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / torch.finfo(FP8).max).clamp_min(1e-12)
    return ((blocks / scale).to(FP8).float() * scale).view_as(x)


def dequantised(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`payload` `[N, K]` FP8 times one scale for each 128x128 block."""
    full = scales.repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return payload.float() * full
