"""Rotary position embedding, neox layout: the first and second half of a head are the pairs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sglang.srt.layers.fused_kernels import DTYPES, fused_kernels


class RotaryEmbedding(nn.Module):
    """Cosines and sines of all positions, computed once for all layers.

    `scaling` is the `rope_scaling` object of the checkpoint's config: None, or of type default, linear or
    yarn.
    """

    cos_sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: dict[str, Any] | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._kernels = fused_kernels(device)
        inv_freq, magnitude = _inverse_frequencies(head_dim, theta, scaling or {})
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        # [max_positions, head_dim] float32: cosines, then sines (the layout that FlashInfer's kernels read).
        cos_sin = torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], dim=-1)
        self.register_buffer("cos_sin", cos_sin.to(device), persistent=False)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate `q` `[T, Hq, D]` and `k` `[T, Hkv, D]` by `positions` `[T]`; returns tensors of their
        dtypes. Both inputs may be overwritten.
        """
        if self._kernels is not None and q.dtype in DTYPES and q.shape[0]:
            self._kernels.rope(positions, q, k, q.shape[-1], self.cos_sin)
            return q, k
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _inverse_frequencies(dim: int, theta: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """`[dim / 2]` float32 frequencies, and the factor on cosines and sines."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "yarn":
        return _yarn(frequencies, dim, theta, scaling)
    raise ValueError(
        f"config.json: rope_scaling of type {kind} is not supported: default, linear and yarn are"
    )


def _yarn(
    frequencies: torch.Tensor, dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): slow rotations are interpolated, fast ones kept, with a ramp between."""
    factor = float(scaling["factor"])
    original = scaling["original_max_position_embeddings"]

    def dim_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):  # gpt-oss keeps the fractions
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    magnitude = float(
        scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    )
    return frequencies * (1 - ramp) + frequencies / factor * ramp, magnitude
