"""FlashInfer's kernels for the small layers between the matmuls, where they can be had.

On CUDA each saves several launches and passes over memory. Which ones run is settled when a layer is
built; the torch code beside them says what they compute.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.utils.errors import first_line

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
"""Types that the kernels take. A kernel does not take an empty batch either: its grid would be empty."""


@dataclass(frozen=True)
class FusedKernels:
    """Kernels for tensors of `DTYPES`; rows need not be contiguous, their elements must be.

    - `rmsnorm(x, weight, eps)`: `[T, size]` or `[T, heads, size]` -> a new tensor;
    - `add_rmsnorm(x, residual, weight, eps)`: `residual += x`, then x becomes its norm; both `[T, size]`;
    - `rope(positions, q, k, head_dim, cos_sin)`: rotates `[T, heads, head_dim]` in place;
    - `silu_and_mul(x)`: `[T, 2 * size]`, gate before up -> `[T, size]`.
    """

    rmsnorm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rmsnorm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def fused_kernels(device: torch.device) -> FusedKernels | None:
    """The kernels for `device`, each of which ran once; None on the CPU, or, with a warning, where they do not load."""
    if device.type != "cuda":
        return None
    try:
        from flashinfer.activation import silu_and_mul
        from flashinfer.norm import fused_add_rmsnorm, rmsnorm
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        kernels = FusedKernels(
            rmsnorm, fused_add_rmsnorm, apply_rope_with_cos_sin_cache_inplace, silu_and_mul
        )
        _run_once(kernels, device)
    except Exception as error:  # missing libraries, modules that neither load nor build
        reason = first_line(error)
        logger.warning(
            "Norm, rotary and activation run in plain torch: FlashInfer's kernels fail (%s)", reason
        )
        return None
    return kernels


def _run_once(kernels: FusedKernels, device: torch.device) -> None:
    """A module is loaded or built by the first call into it, which must not happen inside a graph capture."""
    head_dim = 64
    x = torch.ones(1, 2 * head_dim, dtype=DTYPES[0], device=device)
    heads = torch.ones(1, 2, head_dim, dtype=DTYPES[0], device=device)
    weight = torch.ones(2 * head_dim, dtype=DTYPES[0], device=device)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    kernels.rmsnorm(x, weight, 1e-6)
    kernels.rmsnorm(heads, weight[:head_dim], 1e-6)
    kernels.add_rmsnorm(x, x.clone(), weight, 1e-6)
    kernels.rope(positions, heads, heads.clone(), head_dim, torch.ones(1, head_dim, device=device))
    kernels.silu_and_mul(x)
    torch.cuda.synchronize(device)
