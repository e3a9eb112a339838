"""Qwen3-MoE: grouped-query attention with normed queries and keys, and mixture-of-experts or dense MLPs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import Group, ParallelState
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.fused_kernels import DTYPES, fused_kernels
from sglang.srt.layers.fused_moe import FusedMoE
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.layers.vocab_parallel import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.weights import NamedSlots
from sglang.srt.models.registry import CausalLM

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


class Qwen3Attention(nn.Module):
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


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        parallel: ParallelState,
        moe_runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, layer_id, parallel.attn_tp, dtype, device)
        self.mlp: FusedMoE | Qwen3MLP
        if config.is_moe_layer(layer_id):
            self.mlp = FusedMoE(config, parallel, moe_runner, dtype, device)
        else:
            self.mlp = Qwen3MLP(config, parallel.attn_tp, dtype, device)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: RotaryEmbedding,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer's output and the residual that is still to be added to it."""
        hidden_states, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotary, batch)
        hidden_states, residual = self.post_attention_layernorm.add_and_norm(hidden_states, residual)
        return self.mlp(hidden_states, batch), residual

    def weight_slots(self, prefix: str) -> NamedSlots:
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            yield from getattr(self, name).weight_slots(f"{prefix}.{name}")


class Qwen3MoeForCausalLM(CausalLM):
    """See `CausalLM`. Embedding, attention and head are split over `attn_tp`, the experts over `ep` and `moe_tp`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        moe_runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        _check_supported(config)
        self.config = config
        pp, attn_tp = parallel.pp, parallel.attn_tp
        self.first_layer, self.end_layer = stage_layers(config.num_hidden_layers, pp.rank, pp.size)
        vocab = (config.vocab_size, config.hidden_size, attn_tp, dtype, device)
        self.rotary = RotaryEmbedding(
            config.head_dim, config.context_length, config.rope_theta, config.rope_scaling, device
        )
        self.embed_tokens = VocabParallelEmbedding(*vocab) if pp.is_first else None
        self.layers = nn.ModuleDict(
            {
                str(layer): Qwen3MoeDecoderLayer(config, layer, parallel, moe_runner, dtype, device)
                for layer in range(self.first_layer, self.end_layer)
            }
        )
        self.norm: RMSNorm | None = None
        self.lm_head: ParallelLMHead | None = None
        if pp.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
            self.lm_head = ParallelLMHead(*vocab)
            if config.tie_word_embeddings and self.embed_tokens is not None:
                self.lm_head.weight = self.embed_tokens.weight

    def forward(self, batch: ForwardBatch, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        if self.embed_tokens is not None:
            hidden_states = self.embed_tokens(batch.input_ids)
        assert hidden_states is not None, (
            "a later pipeline stage starts from the hidden states of the one before"
        )
        residual: torch.Tensor | None = None
        for layer in self.layers.values():
            hidden_states, residual = layer(hidden_states, residual, self.rotary, batch)
        if self.norm is None:
            # One tensor to send; the next stage starts from it as its residual, with the same sums.
            return hidden_states if residual is None else hidden_states + residual
        return self.norm.add_and_norm(hidden_states, residual)[0]

    def weight_slots(self) -> NamedSlots:
        for name, module in self._checkpoint_modules():
            yield from module.weight_slots(name)  # type: ignore[operator]

    def _checkpoint_modules(self) -> Iterator[tuple[str, nn.Module]]:
        tied = self.config.tie_word_embeddings
        if self.embed_tokens is not None:
            yield "model.embed_tokens", self.embed_tokens
        for layer, module in self.layers.items():
            yield f"model.layers.{layer}", module
        if self.norm is not None:
            yield "model.norm", self.norm
        if self.lm_head is not None and not (tied and self.embed_tokens is not None):
            yield ("model.embed_tokens" if tied else "lm_head"), self.lm_head

    def belongs_elsewhere(self, name: str) -> bool:
        layer = _LAYER_NAME.match(name)
        if layer is not None:
            number = int(layer[1])
            here = self.first_layer <= number < self.end_layer
            return name.endswith(".rotary_emb.inv_freq") or (
                not here and number < self.config.num_hidden_layers
            )
        if name == "lm_head.weight":
            return self.lm_head is None or self.config.tie_word_embeddings
        return (name == "model.norm.weight" and self.norm is None) or (
            name == "model.embed_tokens.weight" and self.embed_tokens is None
        )


def stage_layers(num_layers: int, stage: int, num_stages: int) -> tuple[int, int]:
    """First and end layer of a pipeline stage; stages differ by one layer at most, the later ones holding
    more.

    Raises `ValueError` when a stage would be empty.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"--pp-size {num_stages} exceeds the model's {num_layers} layers: each stage needs one"
        )
    return num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages


def _check_supported(config: ModelConfig) -> None:
    """Refuse what the config asks for and this model does not do, rather than answer wrongly."""
    where = f"{config.model_path}/config.json"
    if config.hidden_act != "silu":
        raise ValueError(f"{where}: hidden_act {config.hidden_act} is not supported (silu is)")
    if config.hf_config.get("use_sliding_window"):
        raise ValueError(f"{where}: use_sliding_window is not supported; set it to false")
    if config.quantization is not None:
        raise ValueError(f"--quantization {config.quantization} is not supported for {config.architecture}")
