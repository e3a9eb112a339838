"""From inputs and a tactic to the launches that compute it, in order.

A `Launch` is a value: what runs it is `run`, what compiles it and nothing else is `compile`, and two launches with
one `key` need one compiled kernel. Token counts are no part of a key, so a kernel serves all counts of its tactic.

Imported where Triton is installed only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.triton_grouped.align import align_slots, sum_parts
from sglang.srt.layers.moe.triton_grouped.gemv import first_gemv, second_gemv
from sglang.srt.layers.moe.triton_grouped.tactics import BLOCK_M, DOT_TMA, FEW, SWAP, SWAP_TMA, Config
from sglang.srt.layers.moe.triton_grouped.tiles import first_tiles, second_tiles

#: Whether kernels run in Triton's interpreter, which has no overlap of launches and multiplies no BF16.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_ALIGN_BLOCK = 1024


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments; `meta` holds its compile-time arguments and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        types = tuple(str(arg.dtype) if isinstance(arg, torch.Tensor) else type(arg) for arg in self.args)
        return (self.kernel.__name__, types, tuple(sorted(self.meta.items(), key=lambda item: item[0])))

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.meta)

    def compile(self) -> None:
        """Compile and load the kernel that `run` would launch; raises what Triton raises when it cannot."""
        kernel = self.kernel.warmup(*self.args, grid=self.grid, **self.meta)
        # Loading it is what finds out that it wants more shared memory or registers than there are.
        _ = kernel.run


@dataclass(frozen=True)
class Inputs:
    """What `MoERunner.run` takes, with ids counted within this rank's experts and biases or None."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]


class Planner:
    """Makes the launches of one shape. `overlaps` lets each kernel start while its forerunner ends."""

    def __init__(self, shape: MoEShape, *, overlaps: bool = True) -> None:
        self._shape = shape
        self._overlaps = overlaps and not INTERPRETED
        self._sizes = {
            "hidden": shape.hidden_size,
            "inner": shape.intermediate_size,
            "num_experts": shape.num_local_experts,
            "top_k": shape.top_k,
        }
        #: By address and block. A descriptor holds its weights, so an address here belongs to no others.
        self._descriptors: dict[tuple[Any, ...], TensorDescriptor] = {}
        activation = shape.activation
        self._activation = {
            "alpha": float(activation.alpha),
            "beta": float(activation.beta),
            "limit": None if activation.limit is None else float(activation.limit),
        }

    def plan(self, inputs: Inputs, tactic: tuple[Any, ...]) -> tuple[list[Launch], torch.Tensor]:
        """The launches of `tactic` and the tensor `[T, H]` that they fill.

        All buffers are taken here, before the first launch: overlapping kernels must not share memory.
        """
        method, first, second = tactic
        out = torch.empty_like(inputs.x)
        if method == FEW:
            return self._gemv(inputs, first, second, out), out
        return self._tiles(inputs, BLOCK_M[method], first, second, out), out

    def _gemv(self, inputs: Inputs, first: Config, second: Config, out: torch.Tensor) -> list[Launch]:
        shape, num_slots = self._shape, inputs.ids.numel()
        act = inputs.x.new_empty(num_slots, shape.intermediate_size)
        return [
            Launch(
                first_gemv,
                (num_slots, _ceil_div(shape.intermediate_size, first[1])),
                (inputs.x, inputs.w13, inputs.b13, inputs.ids, act),
                {**self._sizes, **self._activation, **_blocks(first), "overlaps": self._overlaps},
            ),
            Launch(
                second_gemv,
                (inputs.num_tokens, _ceil_div(shape.hidden_size, second[1])),
                (act, inputs.w2, self._b2(inputs), inputs.ids, inputs.weights, out),
                {
                    **self._sizes,
                    **_blocks(second),
                    "slot_block": _next_power_of_2(shape.top_k),
                    "waits": self._overlaps,
                    **_may_start_early(self._overlaps),
                },
            ),
        ]

    def _tiles(
        self, inputs: Inputs, block_m: int, first: Config, second: Config, out: torch.Tensor
    ) -> list[Launch]:
        shape, num_slots = self._shape, inputs.ids.numel()
        used = min(num_slots, shape.num_local_experts)
        num_blocks = used + (num_slots - used) // block_m
        table = torch.empty(num_blocks * (block_m + 1), dtype=torch.int32, device=inputs.ids.device)
        tables = (table[: num_blocks * block_m], table[num_blocks * block_m :])
        act = inputs.x.new_empty(num_blocks * block_m, shape.intermediate_size)
        parts = inputs.x.new_empty(num_slots, shape.hidden_size)
        tiles = {
            **self._sizes,
            "block_m": block_m,
            "widens": INTERPRETED,
            "overlaps": self._overlaps,
            **_may_start_early(self._overlaps),
        }
        return [
            Launch(
                align_slots,
                (shape.num_local_experts + 1,),
                (inputs.ids, *tables, num_slots, num_blocks),
                {
                    "num_experts": shape.num_local_experts,
                    "expert_block": _next_power_of_2(shape.num_local_experts),
                    "slot_block": _ALIGN_BLOCK,
                    "block_m": block_m,
                    "overlaps": self._overlaps,
                    "num_warps": 8,
                },
            ),
            Launch(
                first_tiles,
                (num_blocks * _ceil_div(shape.intermediate_size, first[1]),),
                (inputs.x, self._weights(inputs.w13, first), inputs.b13, *tables, act, inputs.num_tokens),
                {**tiles, **self._activation, **_blocks(first), **_sides(first)},
            ),
            Launch(
                second_tiles,
                (num_blocks * _ceil_div(shape.hidden_size, second[1]),),
                (
                    act,
                    self._weights(inputs.w2, second),
                    self._b2(inputs),
                    inputs.weights,
                    *tables,
                    parts,
                    inputs.num_tokens,
                ),
                {**tiles, **_blocks(second), **_sides(second)},
            ),
            self._sum(inputs, parts, out),
        ]

    def _sum(self, inputs: Inputs, parts: torch.Tensor, out: torch.Tensor) -> Launch:
        shape = self._shape
        block = 256 if inputs.num_tokens <= 64 else 1024
        return Launch(
            sum_parts,
            (inputs.num_tokens, _ceil_div(shape.hidden_size, block)),
            (parts, inputs.ids, out),
            {
                "hidden": shape.hidden_size,
                "num_experts": shape.num_local_experts,
                "top_k": shape.top_k,
                "part_block": _next_power_of_2(shape.top_k),
                "block_n": block,
                "num_warps": block // 256,
                "waits": self._overlaps,
                **_may_start_early(self._overlaps),
            },
        )

    def _b2(self, inputs: Inputs) -> torch.Tensor | None:
        return inputs.b2 if self._shape.adds_output_bias else None

    def _weights(self, weights: torch.Tensor, config: Config) -> Any:
        """`weights` as the kernel of `config` takes them: themselves, or a descriptor of all experts' rows."""
        kind, *block = config[:3]
        if kind not in (DOT_TMA, SWAP_TMA):
            return weights
        key = (weights.data_ptr(), *block)
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            descriptor = TensorDescriptor.from_tensor(weights.view(-1, weights.shape[2]), block)
            self._descriptors[key] = descriptor
        return descriptor


# In plain numbers: Triton's own versions are made for kernels too and take microseconds, in every launch.


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _may_start_early(waits: bool) -> dict[str, Any]:
    """The option that lets a kernel start before the former one has ended; only one that waits in itself may."""
    return {"launch_pdl": True} if waits else {}


def _blocks(config: Config) -> dict[str, Any]:
    _, block_n, block_k, warps, stages = config
    return {"block_n": block_n, "block_k": block_k, "num_warps": warps, "stages": stages}


def _sides(config: Config) -> dict[str, Any]:
    return {"swaps": config[0] in (SWAP, SWAP_TMA), "is_tma": config[0] in (DOT_TMA, SWAP_TMA)}
