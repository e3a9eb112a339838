"""FlashInfer's fused MoE op as a CPU can have it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sglang.srt.layers.moe.activation import MoEActivation
from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.flashinfer_cutlass import CutlassKernels
from support.moe_reference import float32_moe


class FakeKernels:
    """Stands where FlashInfer's GPU op would: it records its arguments and computes the MoE as that op documents it.

    Its keywords are checked against the installed FlashInfer's signatures.
    """

    WORKSPACE_BYTES = 12345

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.calls: list[dict[str, Any]] = []
        self.sized_for: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def kernels(self, with_workspace: bool = True) -> CutlassKernels:
        return CutlassKernels(self.fused_moe, self.workspace_size if with_workspace else None)

    def workspace_size(self, *args: Any, **kwargs: Any) -> int:
        self.sized_for.append((args, kwargs))
        return self.WORKSPACE_BYTES

    def fused_moe(self, x, ids, scales, w31, w2, output_dtype, **kwargs) -> None:
        assert ids.dtype is torch.int32 and scales.dtype is torch.float32
        assert x.is_contiguous() and kwargs["output"].shape == x.shape
        self.calls.append(kwargs)
        assert "swiglu_alpha" not in kwargs or kwargs["swiglu_alpha"].shape == (w31.shape[0],)
        shape = dataclasses.replace(
            self.shape,
            num_local_experts=w31.shape[0],
            ep_size=kwargs["ep_size"],
            ep_rank=kwargs["ep_rank"],
            tp_rank=kwargs["tp_rank"],
            activation=MoEActivation(
                *(float(kwargs[name][0]) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"))
            )
            if "swiglu_alpha" in kwargs
            else MoEActivation(),
        )
        biases = kwargs["fc1_expert_biases"], kwargs["fc2_expert_biases"]
        kwargs["output"].copy_(float32_moe(shape, x, ids, scales, w31, w2, *biases))
