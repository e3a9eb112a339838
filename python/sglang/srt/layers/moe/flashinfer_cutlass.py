"""The MoE as FlashInfer's fused CUTLASS op: the kernel that the autotune stage exists for.

Its two grouped GEMMs have dozens of tactics each and a default that is several times slower than the best
one, so an untuned start of this runner is a slow one. Scratch memory is allocated once and shared by all
layers; the op then allocates nothing, which is also what makes it safe to capture.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.layers.moe.activation import PLAIN_SWIGLU, MoEActivation
from sglang.srt.layers.moe.base import MoERunner, MoEShape
from sglang.srt.utils.errors import first_line

logger = logging.getLogger(__name__)

FLAG = "--moe-runner-backend flashinfer_cutlass"
MIN_CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 8
"""TMA loads 16 bytes, 8 elements of 2 bytes (the op's own check of hidden and intermediate sizes)."""


@dataclass(frozen=True)
class CutlassKernels:
    """FlashInfer's entry points. `workspace_size` is None in releases that allocate scratch in every call."""

    fused_moe: Callable[..., Any]
    workspace_size: Callable[..., int] | None

    @classmethod
    def load(cls) -> CutlassKernels:
        """Raises `ValueError` when FlashInfer cannot be imported."""
        try:
            from flashinfer import fused_moe
        except Exception as error:  # a broken install raises all kinds: missing libraries, version checks
            raise ValueError(
                f"{FLAG}: FlashInfer cannot be imported ({type(error).__name__}: {error}); install "
                "flashinfer-python, or use --moe-runner-backend torch_grouped"
            ) from error
        takes_workspace = "workspace_buffer" in inspect.signature(fused_moe.cutlass_fused_moe).parameters
        workspace_size = getattr(fused_moe, "cutlass_fused_moe_workspace_size", None)
        return cls(fused_moe.cutlass_fused_moe, workspace_size if takes_workspace else None)


def check_supported(shape: MoEShape, device: torch.device) -> None:
    """Raise `ValueError` with the remedy where FlashInfer has no kernel for `shape` on `device`."""
    instead = "use --moe-runner-backend torch_grouped"
    if device.type != "cuda":
        raise ValueError(f"{FLAG} needs a GPU: leave it out on {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        raise ValueError(
            f"{FLAG} needs compute capability 9.0 or later and this GPU has {have}: use "
            "--moe-runner-backend reference --disable-cuda-graph"
        )
    if shape.dtype not in DTYPES:
        raise ValueError(f"{FLAG} computes in bfloat16 or float16, not {shape.dtype}: set --dtype bfloat16")
    for name, size in (("hidden size", shape.hidden_size), ("expert width", shape.intermediate_size)):
        if size % ALIGNMENT:
            raise ValueError(
                f"{FLAG} needs a {name} per rank that is a multiple of {ALIGNMENT} (got {size}): {instead}"
            )


def activation_arguments(
    activation: MoEActivation, num_local_experts: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The op's keywords for `activation`: one float32 number for each local expert; none for plain SwiGLU."""
    if activation == PLAIN_SWIGLU:
        return {}
    limit = float("inf") if activation.limit is None else activation.limit
    values = {
        "swiglu_alpha": activation.alpha,
        "swiglu_beta": activation.beta,
        "swiglu_limit": limit,
    }
    return {
        name: torch.full((num_local_experts,), value, dtype=torch.float32, device=device)
        for name, value in values.items()
    }


class FlashInferCutlassMoERunner(MoERunner):
    """`flashinfer.fused_moe.cutlass_fused_moe` in BF16 or FP16, with SwiGLU, or that of gpt-oss, and biases.

    FlashInfer keeps the grid of tuned buckets in a class of its own, so one process must tune with one largest
    token count: that of the shape. Under deterministic inference the sum over the experts of a token is a
    pass of its own; the fused one adds with atomics, in whatever order they arrive.
    """

    name = "flashinfer_cutlass"
    op_names = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")

    def __init__(
        self,
        shape: MoEShape,
        device: torch.device,
        kernels: CutlassKernels,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(shape)
        self._fused_moe = kernels.fused_moe
        self._options: dict[str, Any] = {
            "quant_scales": None,
            "tp_size": shape.tp_size,
            "tp_rank": shape.tp_rank,
            "ep_size": shape.ep_size,
            "ep_rank": shape.ep_rank,
            "tune_max_num_tokens": shape.max_num_tokens,
            "use_fused_finalize": not deterministic,
            **activation_arguments(shape.activation, shape.num_local_experts, device),
        }
        if kernels.workspace_size is not None:
            num_bytes = self._workspace_bytes(kernels.workspace_size, device)
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._options["workspace_buffer"] = workspace
            logger.info(
                "FlashInfer MoE workspace: %.2f GiB, shared by all layers, for up to %d tokens",
                num_bytes / 2**30,
                shape.max_num_tokens,
            )

    @classmethod
    def create(
        cls, shape: MoEShape, device: torch.device, *, deterministic: bool = False
    ) -> FlashInferCutlassMoERunner:
        """Load the kernels and build the runner.

        Raises:
            ValueError: FlashInfer is missing, or has no kernel for this shape and GPU; or its module neither
                loads nor builds.
        """
        check_supported(shape, device)
        kernels = CutlassKernels.load()
        try:
            return cls(shape, device, kernels, deterministic=deterministic)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # the module is loaded or built by the first call into it
            reason = first_line(error)
            raise ValueError(
                f"{FLAG}: FlashInfer's fused MoE module neither loads nor builds ({reason}); install the matching "
                "flashinfer-jit-cache wheel, or use --moe-runner-backend torch_grouped"
            ) from error

    def _workspace_bytes(self, workspace_size: Callable[..., int], device: torch.device) -> int:
        shape = self.shape
        logger.info(
            "Loading FlashInfer's fused MoE kernels (without the flashinfer-jit-cache wheel they are compiled now, "
            "which can take an hour)"
        )
        return int(
            workspace_size(
                shape.max_num_tokens,
                shape.hidden_size,
                shape.intermediate_size,
                shape.num_local_experts * shape.ep_size,
                shape.top_k,
                x_dtype=shape.dtype,
                weight_dtype=shape.dtype,
                output_dtype=shape.dtype,
                tp_size=shape.tp_size,
                tp_rank=shape.tp_rank,
                ep_size=shape.ep_size,
                ep_rank=shape.ep_rank,
                use_fused_finalize=self._options["use_fused_finalize"],
                device=device,
            )
        )

    def reserved_bytes(self) -> int:
        """Scratch of FlashInfer's profiler at the largest bucket, which it keeps until the process ends.

        Per routed row: the input, the doubled and the single activation of one expert, and the maps of ten
        routing samples. The workspace is not in it: it is allocated already. Source of the formula:
        `GemmProfilerBackend::getProfilerWorkspaces` in FlashInfer's `cutlass_fused_moe_kernels.cuh`.
        """
        shape = self.shape
        rows = shape.max_num_tokens * shape.top_k
        per_row = shape.dtype.itemsize * (shape.hidden_size + 3 * shape.intermediate_size) + 256
        return rows * per_row + 4 * shape.num_local_experts * shape.max_num_tokens + (64 << 20)

    def run(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, most = hidden_states.shape[0], self.shape.max_num_tokens
        assert num_tokens <= most, f"{num_tokens} tokens in one call; the workspace is for {most}"
        output = torch.empty_like(hidden_states)
        self._fused_moe(
            hidden_states,
            topk_ids,
            topk_weights,
            w13,
            w2,
            self.shape.dtype,
            # The op wants both biases on every rank, and adds the second where tp_rank is 0.
            fc1_expert_biases=b13,
            fc2_expert_biases=b2,
            output=output,
            **self._options,
        )
        return output
