"""Which architectures can be served, by the name in config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_support import check_architecture
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.layers.vocab_parallel import ParallelLMHead
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.weights import NamedSlots

_MODELS = {
    "Qwen3MoeForCausalLM": "sglang.srt.models.qwen3_moe",
    "GptOssForCausalLM": "sglang.srt.models.gpt_oss",
}


class CausalLM(nn.Module, ABC):
    """One pipeline stage of a language model, `layers` `first_layer .. end_layer` of it."""

    first_layer: int
    end_layer: int
    lm_head: ParallelLMHead | None
    """On the last stage only."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """`[T, H]`: what the next stage takes as `hidden_states`, or, on the last stage, the normed hidden
        states.

        The first stage starts from `batch.input_ids` and takes no `hidden_states`.
        """

    @abstractmethod
    def num_distinct_layers(self) -> int:
        """How many of this stage's leading layers show every kind of layer that it has."""

    def attention_layers(self) -> list[AttentionLayer]:
        """What the attention backend must know about the layers of this stage."""
        layers = (getattr(module, "layer", None) for module in self.modules())
        return [layer for layer in layers if isinstance(layer, AttentionLayer)]

    @abstractmethod
    def weight_slots(self) -> NamedSlots:
        """The checkpoint tensors that fill this rank's parameters."""

    @abstractmethod
    def belongs_elsewhere(self, name: str) -> bool:
        """Whether checkpoint tensor `name` is known but not of this stage, or not needed at all."""


ModelClass = Callable[[ModelConfig, ParallelState, MoERunner, torch.dtype, torch.device], CausalLM]


def model_class(config: ModelConfig) -> ModelClass:
    """The class of `config.architecture`; raises `ValueError` when it cannot be served."""
    check_architecture(config)
    found: ModelClass = getattr(import_module(_MODELS[config.architecture]), config.architecture)
    return found
