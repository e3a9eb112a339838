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
from sglang.srt.layers.moe.triton_grouped.stream import first_stream, second_stream
from sglang.srt.layers.moe.triton_grouped.tactics import (
    BLOCK_M,
    DOT_TMA,
    FEW,
    GEMV,
    MAX_FEW_SLOTS,
    MAX_STREAM_TOKENS,
    STREAM,
    SWAP,
    SWAP_TMA,
    Config,
)
from sglang.srt.layers.moe.triton_grouped.tiles import first_tiles, second_tiles

#: Whether kernels run in Triton's interpreter, which has no overlap of launches and multiplies no BF16.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_ALIGN_BLOCK = 1024
_FEW_TOKENS = 16


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


@dataclass(frozen=True)
class _Rows:
    """Where tiles find their rows: `(sorted_slots, block_experts)` and the count of blocks, or the ids themselves."""

    block_m: int
    num_blocks: int
    slot_block: int
    tables: tuple[torch.Tensor, torch.Tensor] | None = None


class Planner:
    """Makes the launches of one shape. `overlaps` lets each kernel start while its forerunner ends."""

    def __init__(self, shape: MoEShape, *, overlaps: bool = True) -> None:
        self._shape = shape
        self._overlaps = overlaps and not INTERPRETED
        self._num_sms = (
            torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 4
        )
        self._sizes = {
            "hidden": shape.hidden_size,
            "inner": shape.intermediate_size,
            "num_experts": shape.num_local_experts,
            "top_k": shape.top_k,
        }
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
        rows, launches = self._rows(inputs, method)
        act_rows = rows.num_blocks * rows.block_m if rows.tables else inputs.ids.numel()
        act = torch.empty(
            act_rows, self._shape.intermediate_size, dtype=inputs.x.dtype, device=inputs.x.device
        )
        out = torch.empty_like(inputs.x)
        launches.append(self._first(inputs, first, rows, act))
        launches += self._second(inputs, second, rows, act, out)
        return launches, out

    def _rows(self, inputs: Inputs, method: str) -> tuple[_Rows, list[Launch]]:
        shape, num_slots, block_m = self._shape, inputs.ids.numel(), BLOCK_M[method]
        if method == FEW:
            few = _FEW_TOKENS * triton.next_power_of_2(shape.top_k)
            return _Rows(block_m, num_slots, few if num_slots <= few else MAX_FEW_SLOTS), []
        used = min(num_slots, shape.num_local_experts)
        num_blocks = used + (num_slots - used) // block_m
        table = torch.empty(num_blocks * (block_m + 1), dtype=torch.int32, device=inputs.ids.device)
        slots, experts = table[: num_blocks * block_m], table[num_blocks * block_m :]
        align = Launch(
            align_slots,
            (shape.num_local_experts + 1,),
            (inputs.ids, slots, experts, num_slots, num_blocks),
            {
                "num_experts": shape.num_local_experts,
                "expert_block": triton.next_power_of_2(shape.num_local_experts),
                "slot_block": _ALIGN_BLOCK,
                "block_m": block_m,
                "overlaps": self._overlaps,
                "num_warps": 8,
            },
        )
        return _Rows(block_m, num_blocks, 1, (slots, experts)), [align]

    def _first(self, inputs: Inputs, config: Config, rows: _Rows, act: torch.Tensor) -> Launch:
        kind, block_n, block_k, warps, stages = config[:5]
        shape, waits = self._shape, self._overlaps and rows.tables is not None
        meta = {
            **self._sizes,
            **self._activation,
            "block_n": block_n,
            "block_k": block_k,
            "stages": stages,
            "overlaps": self._overlaps,
            "num_warps": warps,
        }
        num_n = triton.cdiv(shape.intermediate_size, block_n)
        if kind == STREAM:
            streamed = (inputs.x, inputs.w13, inputs.b13, inputs.ids, act, inputs.ids.numel())
            meta |= {"block_k": triton.next_power_of_2(shape.hidden_size)}
            meta |= {"slot_block": MAX_STREAM_TOKENS * triton.next_power_of_2(shape.top_k)}
            programs = block_k * self._num_sms
            meta |= {"turns": triton.cdiv(inputs.ids.numel() * num_n, programs)}
            return Launch(first_stream, (programs,), streamed, meta)
        if kind == GEMV:
            args = (inputs.x, inputs.w13, inputs.b13, inputs.ids, act)
            return Launch(first_gemv, (inputs.ids.numel(), num_n), args, meta)
        return Launch(
            first_tiles,
            (rows.num_blocks * num_n,),
            (
                inputs.x,
                _weights(inputs.w13, config),
                inputs.b13,
                inputs.ids,
                *(rows.tables or (None, None)),
                act,
                inputs.num_tokens,
            ),
            {**meta, **_tile_meta(kind, rows), "waits": waits, **_overlapping(waits)},
        )

    def _second(
        self, inputs: Inputs, config: Config, rows: _Rows, act: torch.Tensor, out: torch.Tensor
    ) -> list[Launch]:
        kind, block_n, block_k, warps, stages = config[:5]
        shape, waits = self._shape, self._overlaps
        b2 = inputs.b2 if shape.adds_output_bias else None
        num_n = triton.cdiv(shape.hidden_size, block_n)
        meta = {
            **self._sizes,
            "block_n": block_n,
            "block_k": block_k,
            "stages": stages,
            "waits": waits,
            "num_warps": warps,
            **_overlapping(waits),
        }
        if kind == STREAM:
            args = (act, inputs.w2, b2, inputs.ids, inputs.weights, out)
            meta |= {"block_k": triton.next_power_of_2(shape.intermediate_size)}
            meta |= {"slot_block": triton.next_power_of_2(shape.top_k)}
            programs = block_k * self._num_sms // inputs.num_tokens
            meta |= {"turns": triton.cdiv(num_n, programs)}
            return [Launch(second_stream, (programs, inputs.num_tokens), args, meta)]
        if kind == GEMV:
            slot_block = triton.next_power_of_2(shape.top_k)
            args = (act, inputs.w2, b2, inputs.ids, inputs.weights, out)
            return [Launch(second_gemv, (inputs.num_tokens, num_n), args, {**meta, "slot_block": slot_block})]
        splits, num_slots = config[5], inputs.ids.numel()
        # Few rows are cheap to keep in full precision; many are the op's largest traffic after the weights.
        dtype = torch.float32 if rows.tables is None or splits > 1 else out.dtype
        parts = torch.empty(splits, num_slots, shape.hidden_size, dtype=dtype, device=out.device)
        product = Launch(
            second_tiles,
            (rows.num_blocks * num_n * splits,),
            (
                act,
                _weights(inputs.w2, config),
                b2,
                inputs.ids,
                inputs.weights,
                *(rows.tables or (None, None)),
                parts,
                inputs.num_tokens,
            ),
            {**meta, **_tile_meta(kind, rows), "splits": splits, "overlaps": self._overlaps},
        )
        block = 256 if inputs.num_tokens <= 64 else 1024
        total = Launch(
            sum_parts,
            (inputs.num_tokens, triton.cdiv(shape.hidden_size, block)),
            (parts, inputs.ids, out, num_slots),
            {
                "hidden": shape.hidden_size,
                "num_experts": shape.num_local_experts,
                "top_k": shape.top_k,
                "part_block": triton.next_power_of_2(shape.top_k * splits),
                "splits": splits,
                "block_n": block,
                "waits": waits,
                "num_warps": block // 256,
                **_overlapping(waits),
            },
        )
        return [product, total]


def _overlapping(waits: bool) -> dict[str, Any]:
    """The option that lets a kernel start before the former one has ended; only one that waits in itself may."""
    return {"launch_pdl": True} if waits else {}


def _tile_meta(kind: str, rows: _Rows) -> dict[str, Any]:
    return {
        "slot_block": rows.slot_block,
        "block_m": rows.block_m,
        "is_sorted": rows.tables is not None,
        "swaps": kind in (SWAP, SWAP_TMA),
        "is_tma": kind in (DOT_TMA, SWAP_TMA),
        "widens": INTERPRETED,
    }


def _weights(weights: torch.Tensor, config: Config) -> Any:
    """`weights` as the kernel of `config` takes them: themselves, or a descriptor of all experts' rows."""
    kind, block_n, block_k = config[:3]
    if kind not in (DOT_TMA, SWAP_TMA):
        return weights
    return TensorDescriptor.from_tensor(weights.view(-1, weights.shape[2]), [block_n, block_k])
