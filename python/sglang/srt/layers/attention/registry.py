"""Which attention backends exist."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool


def create_attention_backend(
    name: str,
    req_to_token_pool: ReqToTokenPool,
    kv_pool: KVPool,
    num_heads: int,
    dtype: torch.dtype,
    *,
    layers: Sequence[AttentionLayer] = (),
    deterministic: bool = False,
) -> AttentionBackend:
    """Build the backend that `--attention-backend` names (already resolved from auto).

    `num_heads` are this rank's query heads, `dtype` that of the activations; `layers` tells which sliding windows and
    sinks there are. Raises `ValueError` when there is no such backend, or it cannot run here.
    """
    if name == "torch_native":
        from sglang.srt.layers.attention.torch_native import TorchNativeAttention

        return TorchNativeAttention(req_to_token_pool, kv_pool)
    if name == "flashinfer":
        device = kv_pool.k(0).device
        if device.type != "cuda":
            raise ValueError(f"--attention-backend flashinfer needs a GPU: leave it out on {device.type}")
        from sglang.srt.layers.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(
            req_to_token_pool, kv_pool, num_heads, dtype, layers=layers, deterministic=deterministic
        )
    raise ValueError(f"--attention-backend {name}: no such backend; this build has: torch_native, flashinfer")
