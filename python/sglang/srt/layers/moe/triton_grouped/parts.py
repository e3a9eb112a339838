"""What the kernels share: the activation, which experts are held, and how one launch overlaps the next.

Imported where Triton is installed only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def activate(up, gate, alpha: tl.constexpr, beta: tl.constexpr, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """`MoEActivation` in float32; `limit` may be None."""
    if limit is not None:
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gate = tl.minimum(gate, limit)
    return (up + beta) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def held_here(expert, num_experts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether this rank holds an expert. Whatever else an id says, no weight is read for it."""
    return (expert >= 0) & (expert < num_experts)


@triton.jit
def start_launch(waits: tl.constexpr, overlaps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Open a kernel whose launch overlaps its neighbours': wait for the former one to end, then let the next one start.

    In this order: a kernel that has waited saw all its forerunners end, so the next one may read before its own wait
    whatever was written before this kernel.
    """
    if waits:
        gdc_wait()
    if overlaps:
        gdc_launch_dependents()
