"""RMSNorm."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.fused_kernels import DTYPES, fused_kernels
from sglang.srt.model_loader.weights import NamedSlots, whole


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._kernels = fused_kernels(device) if dtype in DTYPES else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., size]`; returns a new tensor of the same shape and dtype."""
        if self._kernels is not None and x.shape[0]:
            return self._kernels.rmsnorm(x, self.weight.data, self.eps)
        x32 = x.to(torch.float32)
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum, which is the next residual. Both inputs may be overwritten."""
        if residual is not None and self._kernels is not None and x.shape[0]:
            self._kernels.add_rmsnorm(x, residual, self.weight.data, self.eps)
            return x, residual
        residual = x if residual is None else x + residual
        return self.forward(residual), residual

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield whole(f"{prefix}.weight", self.weight)
