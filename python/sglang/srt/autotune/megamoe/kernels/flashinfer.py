"""FlashInfer's MegaMoE kernels behind the `MegaMoEKernel` interface, over the public `flashinfer.moe_ep` names.

| kernel | GPU | weights | tuned by |
|---|---|---|---|
| `sm90_fp8_fp8_bf16_pull_cutedsl` | Hopper | FP8, 128x128 blocks | the sweep |
| `sm100_mxfp8_mxfp8_bf16_cutedsl` | Blackwell | MXFP8 | FlashInfer |
| `sm100_nvfp4_nvfp4_bf16_cutedsl` | Blackwell | NVFP4 | FlashInfer |

A rank that is alone needs no symmetric memory (`MEGA_NO_DIST=1`); several ranks share it through NVSHMEM.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from functools import partial
from typing import Any, Literal

import torch

from sglang.srt.autotune import flashinfer_api, flashinfer_moe_ep
from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.kernels.base import (
    BenchSpec,
    Geometry,
    Knobs,
    MegaInputs,
    MegaMoEKernel,
    Owner,
    Workspace,
)
from sglang.srt.autotune.megamoe.kernels.fp8_launch import DirectLaunch, direct_launch
from sglang.srt.autotune.megamoe.kernels.fp8_reference import blockwise_fp8_moe
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions

#: A worker beside its weights: CUDA context, compiled kernels, timing buffers (measured: about 0.6 GiB).
_WORKER_OVERHEAD_BYTES = 1 << 30


class FlashInferOwner(Owner):
    """`flashinfer.moe_ep.MoEEpMegaLayer` with the scales of its layer, which are staged on every forward."""

    def __init__(self, layer: Any, tensors: Any, scales: dict[str, torch.Tensor]) -> None:
        self.layer, self._tensors, self._scales = layer, tensors, scales
        self._has_view = bool(layer.supports_output_view)
        self._takes_output = "output" in inspect.signature(tensors).parameters  # since 0.7.2

    def create_workspace(self, max_tokens_per_rank: int) -> Workspace:
        workspace: Workspace = self.layer.create_workspace(max_tokens_per_rank)
        return workspace

    def warmup(self, inputs: MegaInputs | None = None, *, workspace: Any = None) -> str | None:
        self.layer.warmup(None if inputs is None else self._bundle(inputs), workspace=workspace)
        return None

    def forward(self, inputs: MegaInputs, *, workspace: Any = None) -> torch.Tensor:
        # A view of the workspace lasts until the next launch on it, which is the next layer's: long enough.
        as_view = self._has_view and inputs.output is None
        result: torch.Tensor = self.layer.forward(
            self._bundle(inputs), workspace=workspace, return_workspace_view=as_view
        )
        if inputs.output is not None and not self._takes_output:
            return inputs.output[: inputs.num_tokens].copy_(result)
        return result

    def destroy(self) -> None:
        self.layer.destroy()

    def _bundle(self, inputs: MegaInputs) -> Any:
        optional = dict(self._scales)
        if inputs.output is not None and self._takes_output:
            optional["output"] = inputs.output
        return self._tensors(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, **optional)


class HopperFp8Owner(FlashInferOwner):
    """Launches on its own workspaces directly, where that gives what FlashInfer's `forward` gives."""

    def __init__(self, layer: Any, tensors: Any, weights: Any) -> None:
        super().__init__(layer, tensors, {})
        self._weights = weights
        self._direct: dict[int, DirectLaunch] = {}  # by id of the workspace, which each of them holds

    def create_workspace(self, max_tokens_per_rank: int) -> Workspace:
        for key in [key for key, launch in self._direct.items() if launch.workspace.is_destroyed]:
            del self._direct[key]  # or its buffers would stay
        return super().create_workspace(max_tokens_per_rank)

    def warmup(self, inputs: MegaInputs | None = None, *, workspace: Any = None) -> str | None:
        super().warmup(inputs, workspace=workspace)
        if inputs is None or inputs.output is not None or workspace is None:
            return None
        public = partial(super().forward, inputs, workspace=workspace)
        launch = direct_launch(self._weights, workspace, inputs, public)
        if isinstance(launch, str):
            return f"launches go through FlashInfer's forward, which is slower: {launch}"
        self._direct[id(workspace)] = launch
        return None

    def launches_directly(self, workspace: Any) -> bool:
        """Whether forwards on a workspace leave FlashInfer's out, which stages and launches with more host work."""
        return id(workspace) in self._direct

    def forward(self, inputs: MegaInputs, *, workspace: Any = None) -> torch.Tensor:
        direct = self._direct.get(id(workspace))
        if direct is None or inputs.output is not None or workspace.is_destroyed:
            return super().forward(inputs, workspace=workspace)
        return direct(inputs)

    def destroy(self) -> None:
        self._direct.clear()
        super().destroy()


class FlashInferMegaMoE(MegaMoEKernel):
    """What FlashInfer's kernels have in common.

    Args:
        group: process group over the EP ranks with a CUDA backend; None with one rank.
    """

    alignment: int
    """Hidden and intermediate sizes must be multiples of it."""

    def __init__(
        self, geometry: Geometry, device: torch.device, options: MegaMoEOptions, group: Any = None
    ) -> None:
        super().__init__(geometry, device)
        self.options, self.group = options, group
        self.variant = "in_kernel_fc2_reduce" if options.in_kernel_fc2_reduce else ""
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

    def check(self) -> None:
        """Raise ValueError, with the rule, when the installed FlashInfer, the geometry or an option forbids a run."""
        try:
            self._config(None)
        except (ImportError, TypeError) as error:
            raise ValueError(
                f"--moe-runner-backend flashinfer_megamoe: FlashInfer {flashinfer_api.version()} has no usable "
                f"{self.name} ({error}); install flashinfer-python 0.7.2 or later"
            ) from error
        geometry = self.geometry
        for what, size in (
            ("hidden", geometry.hidden_size),
            ("expert intermediate", geometry.intermediate_size),
        ):
            if size % self.alignment:
                raise ValueError(
                    f"{self.name} needs a {what} size that is a multiple of {self.alignment} (the model has {size}); "
                    "choose another --moe-runner-backend"
                )
        if geometry.num_experts % geometry.world_size:
            raise ValueError(
                f"{self.name} needs the same number of experts on every rank: {geometry.num_experts} experts do not "
                f"divide over --ep-size {geometry.world_size}"
            )

    def create_owner(
        self, weights: Any, max_tokens_per_rank: int, knobs: Knobs | str | None = None
    ) -> FlashInferOwner:
        from flashinfer.moe_ep import (
            BootstrapConfig,
            FleetParams,
            MegaConfig,
            MoEEpMegaLayer,
            MoEEpTensors,
        )

        geometry = self.geometry
        layer = MoEEpMegaLayer(
            BootstrapConfig(
                geometry.world_size, geometry.rank, process_group=self.group, device=self.device.index
            ),
            FleetParams(geometry.num_experts, max_tokens_per_rank, geometry.hidden_size),
            None,  # type: ignore[arg-type]  # the weights are prepared already
            MegaConfig(
                self._config(knobs), preprocess_weights=False, transformed_weights=self._transformed(weights)
            ),
        )
        return self._owner(layer, MoEEpTensors, weights)

    def _owner(self, layer: Any, tensors: Any, weights: Any) -> FlashInferOwner:
        return FlashInferOwner(layer, tensors, self._scales(weights))

    def prepare_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        from flashinfer.moe_ep import MoEWeightPack

        self.check()
        up, gate = w13.chunk(2, dim=1)
        # The layer keeps UP rows first, FlashInfer's MegaMoE wants GATE rows first.
        return self._preprocess(MoEWeightPack(torch.cat((gate, up), dim=1), w2))

    @abstractmethod
    def _config(self, knobs: Knobs | str | None) -> Any:
        """The kernel's FlashInfer config."""

    @abstractmethod
    def _preprocess(self, pack: Any) -> Any:
        """FlashInfer's preparation of canonical weights (GATE rows first)."""

    def _transformed(self, weights: Any) -> Any:
        return weights

    def layer_tensors(self, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self._transformed(weights)
        return first[0], second[0]

    def _scales(self, weights: Any) -> dict[str, torch.Tensor]:
        """Per-layer tensors that are staged on every forward."""
        return {}

    def required_environment(self) -> dict[str, str]:
        return {"MEGA_NO_DIST": "1"} if self.geometry.world_size == 1 else {}

    def is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def entry_fields(self) -> dict[str, Any]:
        return {"device": self._device_name, **self.geometry.entry_fields()}

    def recorded(self, capacity: int) -> Knobs | None:
        return knob_file.lookup(knob_file.knob_file_path(), self.entry_fields(), capacity)

    def float_reference(self, weights: Any, inputs: MegaInputs, first_expert: int = 0) -> torch.Tensor:
        raise NotImplementedError(
            f"{self.name} is tuned by FlashInfer, which has no check against a reference"
        )


class HopperFp8MegaMoE(FlashInferMegaMoE):
    """FP8 e4m3 with 128x128 weight blocks and 1x128 activation blocks, on compute capability 9.0."""

    name = "sm90_fp8_fp8_bf16_pull_cutedsl"
    policy = "sweep"
    alignment = 128
    tolerance = 0.03
    kind: Literal["fp8_e4m3"] = "fp8_e4m3"
    scale_mode: Literal["blockwise"] = "blockwise"

    def check(self) -> None:
        super().check()
        if self.options.in_kernel_fc2_reduce and self.geometry.world_size > 1:
            # With it, a rank without tokens leaves its launch out and its peers would wait for ever.
            raise ValueError(
                f"SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE=1 is for one rank with {self.name}: unset it, or use "
                "--ep-size 1"
            )

    def _config(self, knobs: Knobs | str | None) -> Any:
        from flashinfer.moe_ep import Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig

        return Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig(
            intermediate_size=self.geometry.intermediate_size,
            top_k=self.geometry.top_k,
            kind=self.kind,
            fp8_scale_mode=self.scale_mode,
            knobs=knobs,
            enable_in_kernel_fc2_reduce=self.options.in_kernel_fc2_reduce,
        )

    def _preprocess(self, pack: Any) -> Any:
        from flashinfer.moe_ep import preprocess_sm90_pull_fp8_mega_weights

        return preprocess_sm90_pull_fp8_mega_weights(
            pack,
            intermediate_size=self.geometry.intermediate_size,
            hidden_size=self.geometry.hidden_size,
            kind=self.kind,
            fp8_scale_mode=self.scale_mode,
        )

    def _owner(self, layer: Any, tensors: Any, weights: Any) -> FlashInferOwner:
        if self.options.in_kernel_fc2_reduce:  # its sums have no fixed order: two ways could not be compared
            return super()._owner(layer, tensors, weights)
        return HopperFp8Owner(layer, tensors, self._transformed(weights))

    def default_knobs(self, capacity: int) -> Knobs:
        return flashinfer_moe_ep.hopper_default(capacity, self.scale_mode)

    def candidates(self, capacity: int) -> list[Knobs]:
        return flashinfer_moe_ep.hopper_candidates(capacity, self.scale_mode)

    def screened(self, capacity: int) -> list[Knobs]:
        """One candidate for each launch geometry."""
        by_geometry: dict[tuple[Any, ...], Knobs] = {}
        for knobs in self.candidates(capacity):
            by_geometry.setdefault(_launch_geometry(knobs), knobs)
        return list(by_geometry.values())

    def variants(self, knobs: Knobs) -> list[Knobs]:
        """The other candidates of the same launch geometry: how tokens go back, how tiles are grouped and split."""
        geometry = _launch_geometry(knobs)
        return [
            other for other in self.candidates(1) if _launch_geometry(other) == geometry and other != knobs
        ]

    def check_knobs(self, knobs: Any) -> Knobs:
        known = self.default_knobs(1)
        if not isinstance(knobs, dict) or set(knobs) != set(known):
            raise ValueError(f"the knobs are not exactly {', '.join(sorted(known))}")
        restored = {name: tuple(value) if isinstance(value, list) else value for name, value in knobs.items()}
        for name in ("mma_tiler_mnk", "cluster_shape_mnk"):
            value = restored[name]
            if not (
                isinstance(value, tuple) and len(value) == 3 and all(type(part) is int for part in value)
            ):
                raise ValueError(f"knob {name} is not three integers")
        if not flashinfer_moe_ep.hopper_is_valid(restored):
            raise ValueError("the kernel cannot be compiled with these knobs")
        return restored

    def entry_fields(self) -> dict[str, Any]:
        return {**super().entry_fields(), "dtype": self.kind, "fp8_scale_mode": self.scale_mode}

    def record(self, knobs: Knobs, capacity: int, time_us: float | None, source: str) -> None:
        flashinfer_moe_ep.hopper_record(
            knobs, **self.entry_fields(), max_tokens=capacity, p50_us=time_us, source=source
        )

    def recorded(self, capacity: int) -> Knobs | None:
        return flashinfer_moe_ep.hopper_lookup(**self.entry_fields(), max_tokens=capacity)

    def float_reference(self, weights: Any, inputs: MegaInputs, first_expert: int = 0) -> torch.Tensor:
        return blockwise_fp8_moe(weights, inputs, first_expert)

    def bench(self) -> BenchSpec | None:
        return BenchSpec(
            "sglang.srt.autotune.megamoe.kernels.fp8_bench:create_bench",
            {**self.geometry.on_one_rank(), "in_kernel_fc2_reduce": self.options.in_kernel_fc2_reduce},
        )

    def worker_bytes(self) -> int:
        geometry = self.geometry
        weights = 3 * geometry.num_local_experts * geometry.intermediate_size * geometry.hidden_size
        return weights + _WORKER_OVERHEAD_BYTES


def _launch_geometry(knobs: Knobs) -> tuple[Any, ...]:
    return tuple(knobs[name] for name in ("swap_ab", "pingpong", "mma_tiler_mnk", "cluster_shape_mnk"))


class BlackwellMegaMoE(FlashInferMegaMoE):
    """What the SM100 kernels have in common: FlashInfer tunes them and its table is their default."""

    policy = "native"
    alignment = 64
    dtype_name: str

    def default_knobs(self, capacity: int) -> Knobs:
        return {}

    def candidates(self, capacity: int) -> list[Knobs]:
        raise NotImplementedError(f"{self.name} is tuned by FlashInfer, with its own candidates")

    def check_knobs(self, knobs: Any) -> Knobs:
        scalars = (bool, int, float, str, type(None))
        if not isinstance(knobs, dict) or not knobs or len(knobs) > 64:
            raise ValueError("the knobs are not an object with some entries")
        restored = {name: tuple(value) if isinstance(value, list) else value for name, value in knobs.items()}
        for name, value in restored.items():
            parts = value if isinstance(value, tuple) else (value,)
            if not isinstance(name, str) or not all(isinstance(part, scalars) for part in parts):
                raise ValueError(f"knob {name} is neither a scalar nor a list of scalars")
        if restored.get("in_kernel_fc2_reduce") and not self.options.in_kernel_fc2_reduce:
            raise ValueError(
                "the knobs reduce in the kernel, and SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE is not set"
            )
        return restored

    def entry_fields(self) -> dict[str, Any]:
        return {
            **super().entry_fields(),
            "dtype": self.dtype_name,
            "combine_dtype": self.options.combine_dtype,
        }

    def record(self, knobs: Knobs, capacity: int, time_us: float | None, source: str) -> None:
        raise NotImplementedError(f"{self.name} is tuned by FlashInfer, which writes its own entries")


def kernel_class_for(capability: tuple[int, int], quantization: str | None) -> type[FlashInferMegaMoE]:
    """The kernel for a GPU and a checkpoint's quantisation (None: BF16, quantised while loading).

    Raises:
        ValueError: there is none.
    """
    have = ".".join(map(str, capability))
    if capability == (9, 0) and quantization in (None, "fp8"):
        return HopperFp8MegaMoE
    if capability in ((10, 0), (10, 3)) and quantization in (None, "fp8"):
        return Mxfp8MegaMoE
    if capability in ((10, 0), (10, 3)) and quantization == "nvfp4":
        return Nvfp4MegaMoE
    raise ValueError(
        f"--moe-runner-backend flashinfer_megamoe has no kernel for compute capability {have} and quantisation "
        f"{quantization or 'none'}: it runs FP8 on 9.0, MXFP8 and NVFP4 on 10.0 and 10.3"
    )


class Mxfp8MegaMoE(BlackwellMegaMoE):
    """MXFP8 weights and activations. Never run natively by this tree's tests."""

    name = "sm100_mxfp8_mxfp8_bf16_cutedsl"
    dtype_name = "mxfp8_e4m3"

    def _config(self, knobs: Knobs | str | None) -> Any:
        from flashinfer.moe_ep import Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig

        return Sm100_Mxfp8_Mxfp8_Bf16_Cutedsl_MegaMoeConfig(
            intermediate_size=self.geometry.intermediate_size,
            top_k=self.geometry.top_k,
            enable_in_kernel_fc2_reduce=self.options.in_kernel_fc2_reduce,
            knobs=knobs,
        )

    def _preprocess(self, pack: Any) -> Any:
        from flashinfer.moe_ep import preprocess_mxfp8_cutedsl_mega_weights

        return preprocess_mxfp8_cutedsl_mega_weights(
            pack, intermediate_size=self.geometry.intermediate_size, hidden_size=self.geometry.hidden_size
        )


class Nvfp4MegaMoE(BlackwellMegaMoE):
    """NVFP4 weights and activations (W4A4). Never run natively by this tree's tests.

    The global scales of a checkpoint differ from layer to layer while layers share workspaces, so each owner stages
    its own on every forward; weights quantised here have scales of one.
    """

    name = "sm100_nvfp4_nvfp4_bf16_cutedsl"
    dtype_name = "nvfp4"

    def _config(self, knobs: Knobs | str | None) -> Any:
        from flashinfer.moe_ep import Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig

        return Sm100_Nvfp4_Nvfp4_Bf16_Cutedsl_MegaMoeConfig(
            intermediate_size=self.geometry.intermediate_size,
            top_k=self.geometry.top_k,
            enable_in_kernel_fc2_reduce=self.options.in_kernel_fc2_reduce,
            combine_dtype=self.options.combine_dtype,
            knobs=knobs,
        )

    def _preprocess(self, pack: Any) -> Any:
        from flashinfer.moe_ep import preprocess_nvfp4_cutedsl_mega_weights

        transformed = preprocess_nvfp4_cutedsl_mega_weights(
            pack, intermediate_size=self.geometry.intermediate_size, hidden_size=self.geometry.hidden_size
        )
        experts = self.geometry.num_local_experts
        ones = torch.ones(experts, dtype=torch.float32, device=pack.w13.device)
        return transformed, {"fc1_alpha": ones, "fc2_alpha": ones.clone(), "fc1_norm_const": ones.clone()}

    def _transformed(self, weights: Any) -> Any:
        return weights[0]

    def _scales(self, weights: Any) -> dict[str, torch.Tensor]:
        scales: dict[str, torch.Tensor] = weights[1]
        return scales
