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
    tunes: bool = True,
    may_fall_back: bool = False,
    ep_group: Group | None = None,
    quantization: str | None = None,
) -> MoERunner:
    """Build the runner that `--moe-runner-backend` names (already resolved from `auto`).

    Under `deterministic` inference, or where nothing `tunes`, a portfolio holds its default alone. `ep_group` and
    `quantization` (of the checkpoint, or asked for) matter to MegaMoE. With `may_fall_back`, which is
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
    if backend == "portfolio":
        return _create_portfolio(
            shape, device, tunes=tunes and not deterministic, may_fall_back=may_fall_back
        )
    if backend == "triton_grouped":
        from sglang.srt.layers.moe.portfolio import TritonGroupedMoERunner

        return TritonGroupedMoERunner.create(shape, device)
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
        f"--moe-runner-backend {backend}: no such MoE runner; this build has: reference, portfolio, "
        "flashinfer_cutlass, triton_grouped, torch_grouped, flashinfer_megamoe, reference_megamoe"
    )


def _create_portfolio(
    shape: MoEShape, device: torch.device, *, tunes: bool, may_fall_back: bool
) -> MoERunner:
    """Its choices are FlashInfer's tuner's: without FlashInfer there is none, and `torch_grouped` serves alone."""
    try:
        from sglang.srt.layers.moe.portfolio import PortfolioMoERunner
    except Exception as error:  # a broken FlashInfer raises all kinds: missing libraries, version checks
        problem = f"FlashInfer cannot be imported ({type(error).__name__}: {error})"
        if not may_fall_back:
            raise ValueError(
                f"--moe-runner-backend portfolio: {problem}; install flashinfer-python, or use "
                "--moe-runner-backend torch_grouped"
            ) from error
        fallback = create_moe_runner("torch_grouped", shape, device=device)
        logger.warning("MoE runs on torch_grouped, untuned: %s", problem)
        return fallback
    return PortfolioMoERunner.create(shape, device, tunes=tunes)
