"""The MoE in plain torch, four honest ways, offered to the AutoTuner as two runners of one op with two tactics each.

Which way is fastest depends on the token count: gathering each token's expert weights suits a few
tokens, batching the experts suits a few dozen, sorting tokens by expert suits many. All compute the same
sums up to rounding. Matrices are padded to two rows, since one-row products round differently from
taller ones and a token's result must not depend on the company it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer.autotuner import OptimizationProfile, TunableRunner

from sglang.srt.layers.moe.activation import PLAIN_SWIGLU, MoEActivation
from sglang.srt.layers.moe.base import MoEShape, tuning_key
from sglang.srt.layers.moe.portfolio import TunedMoERunner


@dataclass(frozen=True)
class _Experts:
    """The local experts: weights as `MoERunner.run` takes them, ``b2`` None where this rank does not add it."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    activation: MoEActivation

    @property
    def count(self) -> int:
        return self.w13.shape[0]

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert on ``x [N, H]``, padded to two rows."""
        num_rows = x.shape[0]
        if num_rows == 1:
            x = x.expand(2, -1)
        up_gate = x @ self.w13[expert].t()
        if self.b13 is not None:
            up_gate = up_gate + self.b13[expert]
        out = self.activation(up_gate) @ self.w2[expert].t()
        if self.b2 is not None:
            out = out + self.b2[expert]
        return out[:num_rows]

    def batched(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """All experts, or those that ``experts [N]`` names, each on rows of its own: ``[N, R, H] -> [N, R, H]``."""
        w13, w2, b13, b2 = self.w13, self.w2, self.b13, self.b2
        if experts is not None:
            w13, w2 = w13[experts], w2[experts]
            b13, b2 = None if b13 is None else b13[experts], None if b2 is None else b2[experts]
        up_gate = torch.bmm(x, w13.transpose(1, 2))
        if b13 is not None:
            up_gate = up_gate + b13.unsqueeze(1)
        out = torch.bmm(self.activation(up_gate), w2.transpose(1, 2))
        return out if b2 is None else out + b2.unsqueeze(1)


def _by_expert(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: _Experts) -> torch.Tensor:
    """Sort the token slots by expert and run each expert once over its rows."""
    num_experts, top_k = experts.count, ids.shape[1]
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    slots = torch.zeros(flat.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = order[start : start + count]
            slots[rows] = experts.one(expert, x[rows // top_k])
            start += count
    return _combine(slots.view(-1, top_k, x.shape[1]), weights)


def _gathered_weights(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: _Experts
) -> torch.Tensor:
    """Give each token slot a copy of its expert's weights; reads least when tokens are few."""
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(top_k, dim=0).unsqueeze(1).expand(-1, 2, -1)
    out = experts.batched(rows, flat.clamp(max=experts.count - 1))[:, 0]
    out = out.masked_fill((flat >= experts.count).unsqueeze(1), 0)
    return _combine(out.view(num_tokens, top_k, -1), weights)


def _all_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: _Experts
) -> torch.Tensor:
    """Run every expert over every token in two batched products and pick the routed results."""
    num_tokens, num_experts = x.shape[0], experts.count
    rows = x.expand(2, -1) if num_tokens == 1 else x
    out = experts.batched(rows.unsqueeze(0).expand(num_experts, -1, -1))[:, :num_tokens]
    local = ids.clamp(max=num_experts - 1).long()
    picked = out[local, torch.arange(num_tokens, device=x.device).unsqueeze(1)]
    picked = picked.masked_fill((ids >= num_experts).unsqueeze(2), 0)
    return _combine(picked, weights)


def _padded_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: _Experts
) -> torch.Tensor:
    """Batch the experts over their own tokens only, padded to the busiest expert's count."""
    num_experts, (num_tokens, top_k) = experts.count, ids.shape
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    capacity = max(2, int(counts.max()))
    starts = torch.cumsum(counts, 0) - counts
    held = int(counts.sum())
    routed = order[:held]
    expert = flat[routed]
    position = torch.arange(held, device=x.device) - starts[expert]
    grid = x.new_zeros(num_experts, capacity, x.shape[1])
    grid[expert, position] = x[routed // top_k]
    slots = x.new_zeros(flat.shape[0], x.shape[1])
    slots[routed] = experts.batched(grid)[expert, position]
    return _combine(slots.view(num_tokens, top_k, -1), weights)


def _combine(slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over ``slots [T, K, H]`` in float32."""
    return (slots.float() * weights.unsqueeze(2)).sum(dim=1).to(slots.dtype)


Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, _Experts], torch.Tensor]

#: Every way by name.
IMPLEMENTATIONS: tuple[tuple[str, Implementation], ...] = (
    ("by_expert", _by_expert),
    ("gathered_weights", _gathered_weights),
    ("all_experts", _all_experts),
    ("padded_experts", _padded_experts),
)

#: Above this many gathered weight elements a tactic is not offered (it would copy gigabytes).
_MAX_GATHERED_ELEMENTS = 1 << 26


class ReferenceMoE(TunableRunner):
    """Some of the implementations above as one FlashInfer runner; tactic -1 is the first of them.

    Inputs are those of the op of `portfolio.TunedMoERunner`: five tensors, or seven with biases.
    """

    #: The tactics by number. A stored tactic is its position here: append, never reorder.
    implementations = IMPLEMENTATIONS

    def __init__(self, activation: MoEActivation = PLAIN_SWIGLU, *, adds_output_bias: bool = False) -> None:
        self._activation, self._adds_output_bias = activation, adds_output_bias

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return tuning_key(inputs, self._activation)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: OptimizationProfile) -> list[Any]:
        x, ids, _, w13, w2 = inputs[:5]
        weights_per_slot = w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]
        names = {name for name, _ in self.implementations}
        if ids.numel() * weights_per_slot > _MAX_GATHERED_ELEMENTS:
            names.discard("gathered_weights")
        if x.shape[0] * w13.shape[0] * w13.shape[1] > _MAX_GATHERED_ELEMENTS:
            names.discard("all_experts")
        return [number for number, (name, _) in enumerate(self.implementations) if name in names]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a stored tactic exists here; FlashInfer asks before it uses one and counts a no as a miss."""
        return type(tactic) is int and -1 <= tactic < len(self.implementations)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        _, implementation = self.implementations[max(int(tactic), 0)]
        x, ids, weights, w13, w2 = inputs[:5]
        b13, b2 = inputs[5:] or (None, None)
        experts = _Experts(w13, w2, b13, b2 if self._adds_output_bias else None, self._activation)
        return implementation(x, ids, weights, experts)


class SortedMoE(ReferenceMoE):
    """Sorts the tokens by expert, so that each expert sees its own tokens only."""

    implementations = (("by_expert", _by_expert), ("padded_experts", _padded_experts))


class DenseMoE(ReferenceMoE):
    """Does without sorting: reads weights, or computes products, that it would not need to."""

    implementations = (("gathered_weights", _gathered_weights), ("all_experts", _all_experts))


class ReferenceMoERunner(TunedMoERunner):
    """MoE without a GPU library: the reference implementations, tuned like any other op. Untuned it is `by_expert`."""

    name = "reference"

    def __init__(self, shape: MoEShape) -> None:
        runners = [
            kind(shape.activation, adds_output_bias=shape.adds_output_bias) for kind in (SortedMoE, DenseMoE)
        ]
        super().__init__(shape, runners)
