"""Which names the MoE backends ask FlashInfer's AutoTuner for, known without building a runner.

A runner says the same of itself (``MoERunner.op_names``); a test holds the two together. The plan command reads
this table, since it must not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: The name under which MegaMoE profiles are skipped; FlashInfer's AutoTuner is never asked for it.
MEGAMOE_OP = "flashinfer_megamoe"

TUNABLE_OPS: dict[str, tuple[str, ...]] = {
    "reference": ("sglang::moe",),
    "portfolio": ("sglang::moe", "trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"),
    "flashinfer_cutlass": ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"),
    "flashinfer_megamoe": (MEGAMOE_OP,),
    "reference_megamoe": (MEGAMOE_OP,),
    "triton_grouped": ("sglang::moe",),
    "torch_grouped": (),
}


def tunable_ops(moe_runner_backend: str) -> tuple[str, ...]:
    """The ops of a backend (already resolved from ``auto``); empty when nothing of it is tunable."""
    return TUNABLE_OPS.get(moe_runner_backend, ())


def unknown_ops(names: Iterable[str], moe_runner_backends: Iterable[str]) -> dict[str, str]:
    """Those of ``names`` that none of these backends asks for, each with words on what they do ask for."""
    asked = sorted({op for backend in moe_runner_backends for op in tunable_ops(backend)})
    words = {}
    for name in names:
        if name not in asked:
            near = difflib.get_close_matches(name, asked, n=1)
            ops = f"the ops are {', '.join(asked)}" if asked else "nothing can be tuned"
            words[name] = f"did you mean {near[0]}?" if near else ops
    return words


def asks_the_tuner(op_names: tuple[str, ...]) -> bool:
    """Whether any of these ops is tuned bucket by bucket; MegaMoE's profiles are tuned by capacity instead."""
    return any(name != MEGAMOE_OP for name in op_names)
