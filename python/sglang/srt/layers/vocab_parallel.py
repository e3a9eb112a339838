"""The two ends of the model, split over ranks by rows of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.model_loader.weights import NamedSlots, WeightSlot

VOCAB_ALIGNMENT = 8
"""Rows of a rank's vocabulary shard are a multiple of this, so that GEMM kernels accept them."""


class VocabShard(nn.Module):
    """Rows `start .. start + num_valid` of a `[vocab_size, hidden]` table; the rest of `weight` is zero padding."""

    def __init__(
        self, vocab_size: int, hidden_size: int, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        share = -(-vocab_size // group.size)
        self.num_rows = share if group.size == 1 else -(-share // VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT
        self.start = group.rank * self.num_rows
        self.num_valid = max(0, min(self.num_rows, vocab_size - self.start))
        table = torch.zeros(self.num_rows, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(table, requires_grad=False)

    def weight_slots(self, prefix: str) -> NamedSlots:
        shape = (self.vocab_size, self.weight.shape[1])
        dest = self.weight[: self.num_valid] if self.num_valid else None
        yield f"{prefix}.weight", WeightSlot(shape, dest, (slice(self.start, self.start + self.num_valid),))


class VocabParallelEmbedding(VocabShard):
    """Token embedding."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[T]` -> `[T, hidden]`, the same on all ranks."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.start
        elsewhere = (local_ids < 0) | (local_ids >= self.num_rows)
        embedded = F.embedding(local_ids.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(embedded.masked_fill(elsewhere[:, None], 0))


class ParallelLMHead(VocabShard):
    """Projection to the vocabulary. The matmul and the gather are apart, since tuning runs the first alone."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, hidden]` -> this rank's columns of the logits, `[B, num_rows]`."""
        return F.linear(hidden_states, self.weight)

    def gather(self, local_logits: torch.Tensor) -> torch.Tensor:
        """`[B, num_rows]` of each rank -> `[B, vocab_size]`."""
        return self.group.all_gather(local_logits, dim=-1)[:, : self.vocab_size]
