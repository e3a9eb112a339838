"""Experts and their exchange between ranks in one kernel: every rank brings its own tokens and gets its own results.

Other runners see the tokens of all attention-DP ranks after a gather; this one leaves them where they are. Layers
hand their weights over once after loading and share the workspaces of `MegaMoEProfiles`, which the autotune stage
tunes. The capacity of a launch follows from the largest token count of any rank, which every rank knows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sglang.srt.autotune.megamoe.host import MegaMoEHost
from sglang.srt.autotune.megamoe.inputs import synthetic_inputs
from sglang.srt.autotune.megamoe.kernels.base import Geometry, MegaInputs, MegaMoEKernel
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.sweep import preload_workers, sweep_reserve_bytes
from sglang.srt.autotune.ops import MEGAMOE_OP
from sglang.srt.configs.model_support import MEGAMOE_LOAD_QUANTIZATIONS
from sglang.srt.environ import envs, warn_of_unknown_megamoe_variables
from sglang.srt.layers.moe.activation import PLAIN_SWIGLU
from sglang.srt.layers.moe.base import MoERunner, MoEShape

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import Group
    from sglang.srt.layers.fused_moe import FusedMoE

logger = logging.getLogger(__name__)

FLASHINFER, REFERENCE = "flashinfer_megamoe", "reference_megamoe"
#: Left to the engine when sweep workers share its GPU.
_MARGIN_BYTES = 2 << 30


class MegaMoERunner(MoERunner):
    """The MegaMoE path of all layers of a model on this rank. See the module."""

    op_names = (MEGAMOE_OP,)
    load_quantizations = MEGAMOE_LOAD_QUANTIZATIONS

    def __init__(self, name: str, shape: MoEShape, kernel: MegaMoEKernel, bootstrap_capacity: int) -> None:
        super().__init__(shape)
        self.name, self.kernel = name, kernel
        self.profiles = MegaMoEProfiles(kernel, bootstrap_capacity)

    @classmethod
    def create(
        cls, name: str, shape: MoEShape, device: torch.device, group: Group | None, quantization: str | None
    ) -> MegaMoERunner:
        """Choose the kernel for this GPU and these weights.

        Raises:
            ValueError: there is none, or a size breaks its rules; the message says which.
        """
        flag = f"--moe-runner-backend {name}"
        if group is None or group.is_first:
            warn_of_unknown_megamoe_variables()
        if shape.has_bias or shape.activation != PLAIN_SWIGLU:
            raise ValueError(
                f"{flag} runs experts with plain SwiGLU and no biases, and this model's have more"
            )
        size, rank = (1, 0) if group is None else (group.size, group.rank)
        geometry = Geometry(
            shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k, size, rank
        )
        kernel = create_kernel(name, geometry, device, group if size > 1 else None, quantization)
        capacity = envs.SGLANG_FLASHINFER_MEGAMOE_MAX_TOKENS_PER_RANK.get() or shape.max_num_tokens
        return cls(name, shape, kernel, capacity)

    def sweep_bytes_beyond(self, mem_fraction_static: float) -> int:
        """Memory that a sweep's workers need beyond what --mem-fraction-static leaves free anyway.

        The KV pool is sized without it, so that the workers find it when the stage runs.
        """
        if not self._sweeps_in_workers:
            return 0
        _, total = torch.cuda.mem_get_info(self.kernel.device)
        left_free = int(total * (1 - mem_fraction_static)) - _MARGIN_BYTES
        return max(0, sweep_reserve_bytes(self.kernel) - left_free)

    @property
    def _sweeps_in_workers(self) -> bool:
        kernel = self.kernel
        return kernel.device.type == "cuda" and kernel.uses_workers and kernel.policy == "sweep"

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("MegaMoE exchanges tokens itself: the layer calls `exchange_and_run`")

    def take_over(self, layers: Sequence[FusedMoE], *, will_tune: bool) -> None:
        """Prepare the weights of all MoE layers; each then holds the prepared tensors instead of its own.

        With `will_tune` the sweep's imports start now, beside that work.

        Raises:
            ValueError: a size breaks the kernel's alignment rule.
        """
        if will_tune and self._sweeps_in_workers:
            preload_workers()
        if self.name == FLASHINFER and self.kernel.geometry.rank == 0:
            logger.info("MegaMoE (%s): quantising the experts of %d layers", self.kernel.name, len(layers))
        for layer in layers:
            self._take_over(layer)
        if self.kernel.device.type == "cuda":
            torch.cuda.empty_cache()  # the KV pool is sized by what the driver calls free

    def _take_over(self, layer: FusedMoE) -> None:
        weights = self.kernel.prepare_weights(layer.w13.data, layer.w2.data)
        w13, w2 = self.kernel.layer_tensors(weights)
        layer.w13 = nn.Parameter(w13, requires_grad=False)
        layer.w2 = nn.Parameter(w2, requires_grad=False)
        layer.mega_owner = self.profiles.add_owner(weights)

    def host(self) -> MegaMoEHost:
        """What the autotune stage needs of this runner."""
        return MegaMoEHost(self.profiles, self.shape.dtype, self._free_bytes)

    def open_ordinary(self) -> None:
        """Without tuned profiles: one workspace of the bootstrap capacity. Collective; before anything is captured."""
        if self.profiles.is_frozen or not self.profiles.owners:
            return
        with torch.inference_mode():  # as serving runs its forwards
            inputs = synthetic_inputs(1, self.kernel.geometry, self.shape.dtype, self.kernel.device)
            self.profiles.open_ordinary(inputs)

    def exchange_and_run(
        self,
        owner: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: Sequence[int] | None,
    ) -> torch.Tensor:
        """`[T, H]` -> `[T, H]` of one layer; every EP rank calls it, those without tokens too.

        Args:
            num_tokens: token counts of all ranks, None with one rank.

        Raises:
            CapacityExceeded: a rank has more tokens than the largest workspace holds.
        """
        most = hidden_states.shape[0] if num_tokens is None else max(num_tokens)
        if most == 0:
            return hidden_states
        return self.profiles.forward(owner, MegaInputs(hidden_states, topk_ids, topk_weights), most)

    def _free_bytes(self) -> int | None:
        device = self.kernel.device
        if device.type == "cpu":
            return None
        torch.cuda.empty_cache()  # what torch keeps for itself is no use to another process
        return max(0, torch.cuda.mem_get_info(device)[0] - _MARGIN_BYTES)


def create_kernel(
    name: str, geometry: Geometry, device: torch.device, group: Group | None, quantization: str | None
) -> MegaMoEKernel:
    """The kernel that `--moe-runner-backend name` means on this device; `ValueError` when there is none."""
    if name == REFERENCE:
        from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE

        if device.type != "cpu":
            raise ValueError(f"--moe-runner-backend {name} runs on the CPU only: use {FLASHINFER} on a GPU")
        return ReferenceMegaMoE(geometry, group.cpu_group if group is not None else None)
    if device.type != "cuda":
        raise ValueError(f"--moe-runner-backend {name} needs a GPU: use {REFERENCE} with --device cpu")
    from sglang.srt.autotune.megamoe.kernels import flashinfer

    options = MegaMoEOptions(
        envs.SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE.get(),
        cast("Any", envs.SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE.get()),  # the options check it
    )
    capability = torch.cuda.get_device_capability(device)
    kernel_class = flashinfer.kernel_class_for(capability, quantization)
    kernel = kernel_class(geometry, device, options, group.device_group if group is not None else None)
    kernel.check()
    return kernel
