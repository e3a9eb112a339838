"""The activation between the two projections of an expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class MoEActivation:
    """``(up + beta) * gate * sigmoid(alpha * gate)``, after gate is cut to ``limit`` and up to ``+-limit``.

    The defaults are plain SwiGLU, ``silu(gate) * up``; gpt-oss has alpha 1.702, beta 1 and limit 7. The names
    are those of FlashInfer's arguments.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def kind(self) -> str:
        return "swiglu" if self == PLAIN_SWIGLU else "swiglu_oai"

    def __call__(self, up_gate: torch.Tensor) -> torch.Tensor:
        """Rows laid out ``[..., up | gate]`` -> ``[..., I]``; computed in their dtype."""
        up, gate = up_gate.chunk(2, dim=-1)
        if self.kind == "swiglu":
            return F.silu(gate) * up
        if self.limit is not None:
            up, gate = up.clamp(-self.limit, self.limit), gate.clamp(max=self.limit)
        return (up + self.beta) * (gate * torch.sigmoid(gate * self.alpha))

    def __str__(self) -> str:
        if self.kind == "swiglu":
            return "swiglu"
        return f"swiglu_oai(alpha={self.alpha:g}, beta={self.beta:g}, limit={self.limit})"


PLAIN_SWIGLU = MoEActivation()
