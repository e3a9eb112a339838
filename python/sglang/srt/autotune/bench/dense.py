"""Piece `dense`: the dense products of a decode step, cuBLAS through torch beside FlashInfer's backends.

Measured to decide whether they are worth tuning; the engine runs them through torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.bounds import measure_bounds
from sglang.srt.autotune.failures import describe
from sglang.srt.autotune.timer import OpTimer

logger = logging.getLogger(__name__)

#: What FlashInfer has for BF16 on Hopper, without cuDNN: building its plans takes minutes for each shape.
BACKENDS = ("cublaslt", "tinygemm")


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """`(inputs, outputs)` of the dense products of a decode step."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * dim),
        "o": (heads * dim, hidden),
        "router": (hidden, config["num_experts"]),
        "lm_head": (hidden, config["vocab_size"]),
    }


@torch.inference_mode()
def measure_dense(
    config: dict[str, Any], batch_sizes: list[int], device: torch.device, repeats: int = 30
) -> dict[str, Any]:
    """Microseconds by graph replay with a cold L2; a backend that cannot run a shape has its reason instead."""
    flashinfer_api.load_timing_module()
    bounds, timer = measure_bounds(device), OpTimer(device, repeats=repeats)
    rows = []
    for name, (num_inputs, num_outputs) in projections(config).items():
        weight = torch.randn((num_outputs, num_inputs), device=device).to(torch.bfloat16)
        for batch_size in batch_sizes:
            x = torch.randn((batch_size, num_inputs), device=device).to(torch.bfloat16)
            num_bytes = weight.numel() * 2 + x.numel() * 2 + batch_size * num_outputs * 2
            row: dict[str, Any] = {
                "projection": name,
                "tokens": batch_size,
                "bound_us": bounds.us(num_bytes, 2 * weight.numel() * batch_size),
                "torch_us": 1e3 * timer.measure_ms(partial(F.linear, x, weight)),
            }
            expected = F.linear(x, weight).float()
            for backend in BACKENDS:
                row |= _measure_backend(backend, x, weight, expected, timer)
            logger.info("%s at %d: %s", name, batch_size, _short(row))
            rows.append(row)
    return {"bounds": bounds.to_json(), "repeats": repeats, "rows": rows}


def _measure_backend(
    backend: str, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, timer: OpTimer
) -> dict[str, Any]:
    """`{backend}_us` with the default choice and `{backend}_tuned_us`, or `{backend}_note`."""
    from flashinfer import mm_bf16

    def run() -> torch.Tensor:
        return mm_bf16(x, weight.t(), backend=backend)

    try:
        # Tuned at exactly this size: the key of FlashInfer's cuBLASLt runner holds the raw token count, so that records
        # of a bucket answer no other count in it.
        with flashinfer_api.observed(), flashinfer_api.tuning(x.shape[0], ()):
            run()
        tuned_us = _us(run, timer)
        error = float((run().float() - expected).norm() / expected.norm())
        with flashinfer_api.observed(), flashinfer_api.only_defaults(("bf16_gemm",)):
            default_us = _us(run, timer)
    except Exception as failure:  # whatever a backend lacks: a module, a shape, a library
        return {f"{backend}_note": describe(failure)}
    return {f"{backend}_us": default_us, f"{backend}_tuned_us": tuned_us, f"{backend}_error": error}


def _us(run: Callable[[], torch.Tensor], timer: OpTimer) -> float:
    return 1e3 * timer.measure_ms(run)


def _short(row: dict[str, Any]) -> str:
    return ", ".join(f"{name[:-3]} {value:.1f}" for name, value in row.items() if name.endswith("_us"))
