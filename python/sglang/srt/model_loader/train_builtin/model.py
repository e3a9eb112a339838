"""The Qwen3-MoE forward as training needs it: whole sequences, few parameters, fast on a CPU.

The mathematics is that of transformers' ``Qwen3MoeForCausalLM``; the weights of a projection are stacked
over the experts here and are written under the published per-expert names by ``checkpoint.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.srt.model_loader.train_builtin.tokenizer import VOCAB_SIZE


@dataclass(frozen=True)
class TinyGeometry:
    """Chosen so that TP, PP and EP of 4, FP8 MegaMoE and FlashInfer attention can all serve the model."""

    num_layers: int = 4
    hidden_size: int = 128
    moe_intermediate_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [B, heads, T, dim]`` with half-split pairs, ``cos`` and ``sin`` ``[T, dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with RMS-normalised queries and keys."""

    def __init__(self, geometry: TinyGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, dim = geometry.hidden_size, geometry.head_dim
        self.q_proj = nn.Linear(hidden, geometry.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, geometry.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, geometry.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(geometry.num_heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=geometry.norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=geometry.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [B, T, H]`` to ``[B, T, H]``."""
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.geometry.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class SparseMLP(nn.Module):
    """Top-k routed SwiGLU experts; only the chosen experts of a token are computed."""

    def __init__(self, geometry: TinyGeometry) -> None:
        super().__init__()
        self.num_experts, self.top_k = geometry.num_experts, geometry.num_experts_per_tok
        hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
        self.gate = nn.Linear(hidden, self.num_experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [N, H]`` to the output ``[N, H]`` and the load-balancing loss (1 when perfectly even)."""
        probs = self.gate(x).softmax(dim=-1)
        weights, experts = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        order = experts.flatten().argsort(stable=True)
        rows = order // self.top_k
        counts = experts.flatten().bincount(minlength=self.num_experts)
        outputs = []
        for expert, part in enumerate(x[rows].split(counts.tolist())):
            gate, up = F.linear(part, self.gate_up_proj[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        mixed = torch.cat(outputs) * weights.flatten()[order, None]
        out = torch.zeros_like(x).index_add(0, rows, mixed)

        load = counts / counts.sum()
        return out, self.num_experts * (load * probs.mean(dim=0)).sum()


class Block(nn.Module):
    def __init__(self, geometry: TinyGeometry) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(geometry.hidden_size, eps=geometry.norm_eps)
        self.self_attn = Attention(geometry)
        self.post_attention_layernorm = nn.RMSNorm(geometry.hidden_size, eps=geometry.norm_eps)
        self.mlp = SparseMLP(geometry)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        mixed, balance = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class TinyMoE(nn.Module):
    """The trainable model; parameter names are the published ones apart from the stacked experts."""

    def __init__(self, geometry: TinyGeometry | None = None) -> None:
        super().__init__()
        self.geometry = geometry = geometry or TinyGeometry()
        self.embed_tokens = nn.Embedding(geometry.vocab_size, geometry.hidden_size)
        self.layers = nn.ModuleList(Block(geometry) for _ in range(geometry.num_layers))
        self.norm = nn.RMSNorm(geometry.hidden_size, eps=geometry.norm_eps)
        self.lm_head = nn.Linear(geometry.hidden_size, geometry.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``input_ids [B, T]`` to logits ``[B, T, vocab]`` and the mean load-balancing loss of the layers."""
        geometry = self.geometry
        device = input_ids.device
        exponents = torch.arange(0, geometry.head_dim, 2, device=device) / geometry.head_dim
        positions = torch.arange(input_ids.shape[1], device=device)
        angles = torch.outer(positions, geometry.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(input_ids)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, layer_balance = layer(x, cos, sin)
            balance = balance + layer_balance
        return self.lm_head(self.norm(x)), balance / geometry.num_layers
