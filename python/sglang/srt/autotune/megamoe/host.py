"""What the stage asks of an engine whose experts run on MegaMoE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.autotune.megamoe.kernels.base import MegaInputs
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles


@dataclass(frozen=True)
class MegaMoEHost:
    """`dtype` is that of the hidden states; `free_bytes` what sweep workers may take of the device (None: no limit);
    `startup` a batch of this rank after which tuning inputs are shaped, if there is one."""

    profiles: MegaMoEProfiles
    dtype: torch.dtype
    free_bytes: Callable[[], int | None] = lambda: None
    startup: MegaInputs | None = None
