"""The activation between the two projections of an expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(up_gate: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for rows laid out ``[..., up | gate]``."""
    up, gate = up_gate.chunk(2, dim=-1)
    return F.silu(gate) * up
