"""What decoder-only models share: pre-norm layers between an embedding and a head, cut into pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.layers.vocab_parallel import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.weights import NamedSlots
from sglang.srt.models.registry import CausalLM

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


class Attention(Protocol):
    """`[T, H]`, the rotary embedding and the batch -> `[T, H]`, the same on all ranks of the attention's group."""

    def __call__(
        self, hidden_states: torch.Tensor, rotary: RotaryEmbedding, batch: ForwardBatch
    ) -> torch.Tensor: ...


class MLP(Protocol):
    """`[T, H]` and the batch -> `[T, H]`."""

    def __call__(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...


class DecoderLayer(nn.Module):
    """Attention, then an MLP or experts, each on the norm of the sum of all before it."""

    def __init__(
        self, self_attn: Attention, mlp: MLP, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
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


class DecoderLM(CausalLM):
    """See `CausalLM`. Embedding, attention and head are split over `attn_tp`; `make_layer` makes the layer of a
    global number. Checkpoint names are those of Llama and its many heirs.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        make_layer: Callable[[int], DecoderLayer],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        pp, attn_tp = parallel.pp, parallel.attn_tp
        self.first_layer, self.end_layer = stage_layers(config.num_hidden_layers, pp.rank, pp.size)
        vocab = (config.vocab_size, config.hidden_size, attn_tp, dtype, device)
        self.rotary = RotaryEmbedding(
            config.head_dim, config.context_length, config.rope_theta, config.rope_scaling, device
        )
        self.embed_tokens = VocabParallelEmbedding(*vocab) if pp.is_first else None
        self.layers = nn.ModuleDict(
            {str(layer): make_layer(layer) for layer in range(self.first_layer, self.end_layer)}
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
        for layer in islice(self.layers.values(), batch.num_layers):
            hidden_states, residual = layer(hidden_states, residual, self.rotary, batch)
        if self.norm is None:
            # One tensor to send; the next stage starts from it as its residual, with the same sums.
            return hidden_states if residual is None else hidden_states + residual
        return self.norm.add_and_norm(hidden_states, residual)[0]

    def num_distinct_layers(self) -> int:
        first_of_kind: dict[tuple[type, int | None], int] = {}
        for number, layer in enumerate(self.layers.values()):
            sliding_window = getattr(getattr(layer.self_attn, "layer", None), "sliding_window", None)
            first_of_kind.setdefault((type(layer.mlp), sliding_window), number)
        return max(first_of_kind.values()) + 1

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
