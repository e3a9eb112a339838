"""What every way of tuning MegaMoE works with: the layer, the other ranks, inputs, and the result to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe.kernels.base import MegaInputs
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles


@dataclass
class TuningContext:
    """What a policy works with.

    `inputs(capacity)` gives representative inputs; `knob_cache` is the scratch file that the kernel reads;
    `free_bytes` what workers may take of the device (None: no limit).
    """

    profiles: MegaMoEProfiles
    agreement: Agreement
    inputs: Callable[[int], MegaInputs]
    knob_cache: Path
    free_bytes: Callable[[], int | None] = lambda: None
    problems: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)


def collective_reference(context: TuningContext, inputs: MegaInputs) -> torch.Tensor:
    """This rank's `[T, H]` float32 reference; over several ranks each computes its experts for all tokens."""
    profiles = context.profiles
    kernel, geometry, weights = profiles.kernel, profiles.kernel.geometry, profiles.weights[0]
    if geometry.world_size == 1:
        return kernel.float_reference(weights, inputs)
    group = getattr(kernel, "group", None)
    everyone = [_gathered(part, geometry.world_size, group) for part in _parts(inputs)]
    first = geometry.rank * geometry.num_local_experts
    partial = kernel.float_reference(weights, MegaInputs(*everyone), first).contiguous()
    dist.all_reduce(partial, group=group)
    return partial[geometry.rank * inputs.num_tokens :][: inputs.num_tokens]


def _parts(inputs: MegaInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.hidden_states, inputs.topk_ids, inputs.topk_weights


def _gathered(tensor: torch.Tensor, world_size: int, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
