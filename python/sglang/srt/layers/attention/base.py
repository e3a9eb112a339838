"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.model_executor.forward_batch import ForwardBatch


@dataclass(frozen=True)
class AttentionLayer:
    """What a backend must know about one layer. `layer_id` is global; head counts are this rank's.

    With `sliding_window` a token sees that many tokens, itself included, and none before them. `sinks` `[num_heads]`
    float32 are learned logits of one more key, whose value is zero: they take weight away from the other keys.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)


class AttentionBackend(ABC):
    """Causal attention over the paged KV pool.

    For each forward the model runner calls `init_forward_metadata` once, then every layer calls `forward`.
    """

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Work out, once for all layers, what each sequence of `batch` reads.

        The slots of all `seq_lens` tokens must already stand in the rows of `ReqToTokenPool`.
        """

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store the new keys and values, then attend.

        Args:
            q: `[T, num_heads, head_dim]`.
            k, v: `[T, num_kv_heads, head_dim]`.

        Returns:
            `[T, num_heads * head_dim]`.
        """

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Whether the buffers of this backend hold what `init_forward_metadata` works out for `batch`."""
        return True

    def for_graphs(self, sizes: Sequence[int]) -> AttentionBackend | None:
        """The backend for decode forwards that are captured at batches of exactly `sizes`; None where there is none.

        Its `init_forward_metadata` runs before each replay, outside of the graph.
        """
        return None
