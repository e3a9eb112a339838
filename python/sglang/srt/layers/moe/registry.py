"""Which MoE runners exist, and what serves where the preferred one has no kernel."""

from __future__ import annotations

import logging

import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.layers.moe.base import MoERunner, MoEShape

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def create_moe_runner(
    backend: str,
    shape: MoEShape,
    *,
    device: torch.device = CPU,
    deterministic: bool = False,
    may_fall_back: bool = False,
    ep_group: Group | None = None,
    quantization: str | None = None,
) -> MoERunner:
    """Build the runner that `--moe-runner-backend` names (already resolved from `auto`).

    `ep_group` and `quantization` (of the checkpoint, or asked for) matter to MegaMoE. With `may_fall_back`, which is
    for `auto`, `torch_grouped` serves where FlashInfer has no kernel, and one log line says why.

    Raises:
        ValueError: no such backend, or it cannot run here.
    """
    if backend == "reference":
        from sglang.srt.layers.moe.reference import ReferenceMoERunner

        return ReferenceMoERunner(shape)
    if backend == "torch_grouped":
        from sglang.srt.layers.moe.torch_grouped import TorchGroupedMoERunner

        return TorchGroupedMoERunner(shape, device)
    if backend == "flashinfer_cutlass":
        from sglang.srt.layers.moe.flashinfer_cutlass import FlashInferCutlassMoERunner

        try:
            return FlashInferCutlassMoERunner.create(shape, device, deterministic=deterministic)
        except ValueError as error:
            if not may_fall_back:
                raise
            fallback = create_moe_runner("torch_grouped", shape, device=device)
            logger.warning("MoE runs on torch_grouped, untuned: %s", error)
            return fallback
    if backend in ("flashinfer_megamoe", "reference_megamoe"):
        from sglang.srt.layers.moe.megamoe import MegaMoERunner

        return MegaMoERunner.create(backend, shape, device, ep_group, quantization)
    raise ValueError(
        f"--moe-runner-backend {backend}: no such MoE runner; this build has: reference, flashinfer_cutlass, "
        "torch_grouped, flashinfer_megamoe, reference_megamoe"
    )
