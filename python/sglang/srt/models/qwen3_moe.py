"""Qwen3-MoE: grouped-query attention with normed queries and keys, and mixture-of-experts or dense MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_support import check_supported
from sglang.srt.distributed.parallel_state import Group, ParallelState
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.fused_kernels import DTYPES, fused_kernels
from sglang.srt.layers.fused_moe import FusedMoE
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.weights import NamedSlots
from sglang.srt.models.decoder import DecoderLayer, DecoderLM


class Qwen3Attention(nn.Module):
    """Attention of one layer, `[T, H]` -> `[T, H]`; each head of queries and keys is normed before it is rotated."""

    def __init__(
        self, config: ModelConfig, layer_id: int, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, dim, heads, kv_heads, group, bias, dtype, device
        )
        self.o_proj = RowParallelLinear(heads * dim, config.hidden_size, group, bias, dtype, device)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype, device)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype, device)
        local_heads, local_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.layer = AttentionLayer(layer_id, local_heads, local_kv_heads, dim, scaling=dim**-0.5)

    def forward(
        self, hidden_states: torch.Tensor, rotary: RotaryEmbedding, batch: ForwardBatch
    ) -> torch.Tensor:
        assert batch.attn_backend is not None, "the model runner sets the attention backend"
        q, k, v = self.qkv_proj.split(self.qkv_proj(hidden_states))
        q, k = rotary(batch.positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(batch.attn_backend.forward(q, k, v, self.layer, batch))

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield from self.qkv_proj.weight_slots(prefix)
        for name in ("o_proj", "q_norm", "k_norm"):
            yield from getattr(self, name).weight_slots(f"{prefix}.{name}")


class Qwen3MLP(nn.Module):
    """Dense SwiGLU, split over the attention's tensor-parallel ranks, which hold the same tokens."""

    def __init__(self, config: ModelConfig, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        names = ("gate_proj", "up_proj")
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, names, (inner, inner), group, False, dtype, device
        )
        self.down_proj = RowParallelLinear(inner, hidden, group, False, dtype, device)
        self._kernels = fused_kernels(device) if dtype in DTYPES else None

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        gate_up = self.gate_up_proj(hidden_states)
        if self._kernels is not None and gate_up.shape[0]:
            return self.down_proj(self._kernels.silu_and_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield from self.gate_up_proj.weight_slots(prefix)
        yield from self.down_proj.weight_slots(f"{prefix}.down_proj")


class Qwen3MoeForCausalLM(DecoderLM):
    """See `DecoderLM`. The experts are split over `ep` and `moe_tp`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        moe_runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_supported(config, moe_runner.load_quantizations)

        def make_layer(layer: int) -> DecoderLayer:
            attention = Qwen3Attention(config, layer, parallel.attn_tp, dtype, device)
            mlp: FusedMoE | Qwen3MLP
            if config.is_moe_layer(layer):
                mlp = FusedMoE(config, parallel, moe_runner, dtype, device)
            else:
                mlp = Qwen3MLP(config, parallel.attn_tp, dtype, device)
            return DecoderLayer(attention, mlp, config, dtype, device)

        super().__init__(config, parallel, make_layer, dtype, device)
