"""Which attention backends exist."""

from __future__ import annotations

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool


def create_attention_backend(
    name: str, req_to_token_pool: ReqToTokenPool, kv_pool: KVPool
) -> AttentionBackend:
    """Build the backend that `--attention-backend` names (already resolved from auto); `ValueError` if there
    is none.
    """
    if name == "torch_native":
        from sglang.srt.layers.attention.torch_native import TorchNativeAttention

        return TorchNativeAttention(req_to_token_pool, kv_pool)
    raise ValueError(f"--attention-backend {name}: no such backend; this build has: torch_native")
