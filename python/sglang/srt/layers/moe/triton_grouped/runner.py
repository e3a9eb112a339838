"""The kernels as one FlashInfer runner."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from flashinfer.autotuner import OptimizationProfile, TunableRunner

from sglang.srt.layers.moe.base import MoEShape, tuning_key
from sglang.srt.layers.moe.triton_grouped import tactics as known
from sglang.srt.layers.moe.triton_grouped.tactics import Space

if TYPE_CHECKING:
    from sglang.srt.layers.moe.triton_grouped.launches import Inputs, Launch

FLAG = "--moe-runner-backend triton_grouped"
MIN_CAPABILITY = (9, 0)
ALIGNMENT = 16
"""Elements that rows of weights must be a multiple of, so that threads load 16 bytes and tiles need no other masks."""

_INSTEAD = "use --moe-runner-backend torch_grouped"


def check_supported(shape: MoEShape, device: torch.device) -> None:
    """Raise `ValueError` with the remedy where the kernels cannot serve `shape` on `device`."""
    if device.type != "cuda":
        raise ValueError(f"{FLAG} needs a GPU: on {device.type} use --moe-runner-backend reference")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        raise ValueError(
            f"{FLAG} needs compute capability 9.0 or later and this GPU has {have}: use "
            "--moe-runner-backend reference --disable-cuda-graph"
        )
    if shape.dtype is not torch.bfloat16:
        raise ValueError(f"{FLAG} computes in bfloat16, not {shape.dtype}: set --dtype bfloat16")
    for name, size in (("hidden size", shape.hidden_size), ("expert width", shape.intermediate_size)):
        if size % ALIGNMENT:
            raise ValueError(
                f"{FLAG} needs a {name} per rank that is a multiple of {ALIGNMENT} (got {size}): {_INSTEAD}"
            )
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{FLAG} needs Triton, which comes with torch's CUDA builds: install it, or {_INSTEAD}"
        )


class TritonGroupedMoE(TunableRunner):
    """The experts of one shape by Triton; inputs are those of `MoERunner.run` with ids of `shape.local_expert_ids`.

    Tactics are described in `tactics.py`; -1 picks one by rule. Nothing waits for the host and all buffers come
    from torch's allocator, so a CUDA graph can hold every tactic. `check_supported` says where it can serve;
    where Triton interprets its kernels it computes on a CPU, for tests.
    """

    def __init__(self, shape: MoEShape, device: torch.device, *, overlaps: bool = True) -> None:
        from sglang.srt.layers.moe.triton_grouped.launches import Planner

        self.shape, self.device = shape, device
        self._planner = Planner(shape, overlaps=overlaps)

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return tuning_key(inputs, self.shape.activation)

    def tactic_space(self, inputs: list[torch.Tensor]) -> list[Space]:
        """The candidates for this many tokens, method by method, each product's configurations on their own."""
        return known.spaces(inputs[0].shape[0], self.shape.top_k, self.shape.num_local_experts)

    def get_valid_tactics(
        self, inputs: list[torch.Tensor], profile: OptimizationProfile | None
    ) -> list[tuple[Any, ...]]:
        """The candidates as tactics: each configuration of a product once, beside the first one of the other."""
        return [tactic for space in self.tactic_space(inputs) for tactic in space.tactics()]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a stored tactic exists here and is one for this many tokens."""
        return self._usable(inputs, tactic) is not None

    def compile_jobs(
        self, inputs: list[torch.Tensor], tactics: Sequence[tuple[Any, ...]]
    ) -> list[Callable[[], None]]:
        """One job for each distinct kernel of `tactics` at these inputs: to compile and load it, and launch nothing.

        Jobs may run in any thread, several at once. A job raises when its kernel does not compile or asks for more
        than the GPU has.
        """
        launches: dict[tuple[Any, ...], Launch] = {}
        for tactic in tactics:
            for launch in self._planner.plan(self._named(inputs), self._resolved(inputs, tactic))[0]:
                launches.setdefault(launch.key, launch)
        return [_CompileJob(launch, self.device) for launch in launches.values()]

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        launches, out = self._planner.plan(self._named(inputs), self._resolved(inputs, tactic))
        for launch in launches:
            launch.run()
        return out

    def _named(self, inputs: list[torch.Tensor]) -> Inputs:
        from sglang.srt.layers.moe.triton_grouped.launches import Inputs

        return Inputs(*inputs)

    def _usable(self, inputs: list[torch.Tensor], tactic: Any) -> tuple[Any, ...] | None:
        num_tokens = inputs[0].shape[0]
        if type(tactic) is int and tactic == -1:
            return known.default_tactic(num_tokens, self.shape.top_k, self.shape.num_local_experts)
        found = known.normalised(tactic)
        return found if found is not None and known.suits(found, num_tokens) else None

    def _resolved(self, inputs: list[torch.Tensor], tactic: Any) -> tuple[Any, ...]:
        found = self._usable(inputs, tactic)
        if found is None:
            raise ValueError(
                f"{tactic!r} is no tactic of the Triton MoE kernels for {inputs[0].shape[0]} tokens"
            )
        return found


class _CompileJob:
    """Compiles one launch's kernel when called, whichever thread calls."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch, self._device = launch, device
        self.key = launch.key

    def __call__(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._launch.compile()

    def __repr__(self) -> str:
        kernel, meta = self._launch.kernel, self._launch.meta
        names = ("block_m", "block_n", "block_k", "num_warps", "stages", "swaps", "is_tma")
        return f"{kernel.__name__}({', '.join(f'{name}={meta[name]}' for name in names if name in meta)})"
