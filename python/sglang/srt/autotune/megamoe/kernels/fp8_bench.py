"""What a worker process of the Hopper FP8 kernel's sweep runs: the kernel alone on its GPU, over random weights."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.autotune.megamoe.bench import KernelBench
from sglang.srt.autotune.megamoe.kernels.base import Geometry
from sglang.srt.autotune.megamoe.kernels.flashinfer import HopperFp8MegaMoE
from sglang.srt.autotune.megamoe.kernels.fp8_reference import FP8, WEIGHT_BLOCK
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions


def random_weights(geometry: Geometry, device: torch.device, seed: int = 0) -> Any:
    """Prepared weights of the right shapes and layout without preparing any: timing does not depend on values."""
    generator = torch.Generator(device=device).manual_seed(seed)
    experts, hidden, inner = geometry.num_local_experts, geometry.hidden_size, geometry.intermediate_size

    def leg(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        payload = torch.empty((experts, rows, columns), dtype=FP8, device=device)
        for expert in payload:
            # One at a time: a float copy of all of them would not fit beside other workers.
            expert.copy_(torch.randn((rows, columns), generator=generator, device=device) * 64)
        blocks = (experts, rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK)
        scales = torch.rand(blocks, generator=generator, device=device) + 0.5
        return payload.transpose(1, 2), scales * (columns**-0.5 / 64), None, None

    return leg(2 * inner, hidden), leg(hidden, inner)


def create_bench(*, in_kernel_fc2_reduce: bool, **sizes: int) -> Any:
    """The bench of a worker process: one rank with all its experts on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    geometry = Geometry(**sizes)
    kernel = HopperFp8MegaMoE(geometry, device, MegaMoEOptions(in_kernel_fc2_reduce=in_kernel_fc2_reduce))
    with torch.inference_mode():
        return KernelBench(kernel, random_weights(geometry, device), torch.bfloat16)
