"""Which names the MoE backends ask FlashInfer's AutoTuner for, known without building a runner.

A runner says the same of itself (``MoERunner.op_names``); a test holds the two together. The plan command reads
this table, since it must not import torch.
"""

from __future__ import annotations

TUNABLE_OPS: dict[str, tuple[str, ...]] = {
    "reference": ("sglang::reference_moe",),
    "flashinfer_cutlass": ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"),
    "flashinfer_megamoe": ("flashinfer_megamoe",),
    "torch_grouped": (),
}


def tunable_ops(moe_runner_backend: str) -> tuple[str, ...]:
    """The ops of a backend (already resolved from ``auto``); empty when nothing of it is tunable."""
    return TUNABLE_OPS.get(moe_runner_backend, ())
