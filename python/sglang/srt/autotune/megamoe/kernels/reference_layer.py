"""A MegaMoE layer in plain torch over gloo, with the life cycle and the errors of FlashInfer's.

One forward: every rank sends its tokens to the ranks that hold their experts, runs its experts over what it
received, and sends the weighted results back. Workspaces live in a process-wide pool with reference counts, as
`flashinfer.moe_ep` keeps them; knobs change the speed and never a bit of the result.

Why no bit changes: every product has rows in multiples of sixteen (shorter ones round differently on some CPUs),
sums run in one fixed order, and padding only ever adds rows.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from flashinfer.moe_ep import MoEEpConfigError

from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.inputs import synthetic_inputs
from sglang.srt.autotune.megamoe.kernels.base import Geometry, Knobs, MegaInputs, Owner, Workspace

#: `experts`: one product per tile in a loop, or all tiles in one batch. `tile_rows`: rows of one product.
KNOB_VALUES: dict[str, tuple[Any, ...]] = {"experts": ("loop", "batched"), "tile_rows": (16, 32)}
DEFAULT_KNOBS: Knobs = {"experts": "loop", "tile_rows": 16}

#: FlashInfer's exchange function of torch, under its newer name where there is one.
_all_to_all = getattr(dist, "all_to_all_single", None)


class _Capture:
    active = False


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Stands where a CUDA graph capture would be: inside, nothing may be allocated, freed, warmed or tuned."""
    _Capture.active = True
    try:
        yield
    finally:
        _Capture.active = False


def is_capturing() -> bool:
    return _Capture.active


@dataclass
class Buffers:
    """The pooled part of a workspace: exchange buffers for one capacity, and the knobs they were opened with."""

    capacity: int
    knobs: Knobs
    outgoing: torch.Tensor  # [W, C, H + 2K] float32: hidden states, local expert ids (-1: none), weights
    partial: torch.Tensor  # [W, C, H] float32
    signature: tuple[Any, ...] | None = None


@dataclass
class _PoolEntry:
    buffers: Buffers
    references: int = 0


@dataclass
class _Pool:
    entries: dict[tuple[Any, ...], _PoolEntry] = field(default_factory=dict)


_POOL = _Pool()


def pooled_workspace_count() -> int:
    return len(_POOL.entries)


def pooled_workspace_refcount(buffers: Buffers) -> int:
    """Workspaces that share these buffers; 0 when they are not pooled (any more)."""
    return next((entry.references for entry in _POOL.entries.values() if entry.buffers is buffers), 0)


class ReferenceWorkspace:
    """A capacity opened on one layer; see `ReferenceMegaLayer.create_workspace`."""

    def __init__(self, layer: ReferenceMegaLayer, buffers: Buffers) -> None:
        self._layer = weakref.ref(layer)
        self.max_tokens_per_rank, self.buffers = buffers.capacity, buffers
        self.is_destroyed = False

    def destroy(self) -> None:
        if self.is_destroyed:
            return
        layer = self._layer()
        if layer is None:
            raise MoEEpConfigError("the MegaMoE layer of this workspace no longer exists")
        layer.destroy_workspace(self)


class ReferenceMegaLayer(Owner):
    """Experts `w13` `[E_local, 2*I, H]` (UP rows first) and `w2` `[E_local, H, I]` of one layer.

    Args:
        group: gloo group over the EP ranks; None with one rank.
        max_tokens_per_rank: capacity of the workspace that `forward` uses when it is given none.
        knobs: a dict, "auto" (tune in the first forward), or None: the knob cache, else the default.
        entry_fields: key of this geometry in the knob cache.
    """

    supports_output_view = False

    def __init__(
        self,
        geometry: Geometry,
        group: Any,
        weights: tuple[torch.Tensor, torch.Tensor],
        max_tokens_per_rank: int,
        knobs: Knobs | str | None,
        entry_fields: dict[str, Any],
    ) -> None:
        if geometry.num_experts % geometry.world_size:
            raise MoEEpConfigError(
                f"num_experts ({geometry.num_experts}) must be divisible by world_size ({geometry.world_size})"
            )
        if isinstance(knobs, str) and knobs != "auto":
            raise ValueError(f"knobs must be None, a dict or 'auto' (got {knobs!r})")
        self.geometry, self.group = geometry, group
        self.w13, self.w2 = weights
        self._bootstrap_capacity, self._knobs, self._fields = max_tokens_per_rank, knobs, entry_fields
        self._workspaces: dict[int, ReferenceWorkspace] = {}
        self._default: Buffers | None = None
        self._untuned = knobs == "auto"
        self._destroyed = False

    # life cycle ------------------------------------------------------------------------------------------

    def create_workspace(self, max_tokens_per_rank: int) -> ReferenceWorkspace:
        if isinstance(max_tokens_per_rank, bool) or not isinstance(max_tokens_per_rank, int):
            raise TypeError("max_tokens_per_rank must be an int")
        if max_tokens_per_rank <= 0:
            raise ValueError("max_tokens_per_rank must be positive")
        if self._destroyed:
            raise MoEEpConfigError("MegaMoE layer has been destroyed")
        if self._knobs == "auto":
            raise MoEEpConfigError(
                "create_workspace() needs fixed knobs; knobs='auto' tunes in the first forward"
            )
        self._refuse_in_capture("workspace allocation")
        if max_tokens_per_rank in self._workspaces:
            raise MoEEpConfigError(
                f"a MegaMoE workspace for max_tokens_per_rank={max_tokens_per_rank} already exists on this layer"
            )
        if max_tokens_per_rank == self._bootstrap_capacity and self._default is not None:
            buffers, self._default = self._default, None
        else:
            buffers = self._acquire(max_tokens_per_rank)
        workspace = ReferenceWorkspace(self, buffers)
        self._workspaces[max_tokens_per_rank] = workspace
        return workspace

    def destroy_workspace(self, workspace: ReferenceWorkspace) -> None:
        if self._workspaces.get(workspace.max_tokens_per_rank) is not workspace:
            raise MoEEpConfigError("MegaMoE workspace was not created by this layer or is no longer active")
        self._refuse_in_capture("workspace destruction")
        self._release(workspace.buffers)
        workspace.is_destroyed = True
        del self._workspaces[workspace.max_tokens_per_rank]

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._refuse_in_capture("layer destruction")
        for workspace in reversed(tuple(self._workspaces.values())):
            self.destroy_workspace(workspace)
        if self._default is not None:
            self._release(self._default)
            self._default = None
        self._destroyed = True

    def warmup(self, inputs: MegaInputs | None = None, *, workspace: Workspace | None = None) -> None:
        self._refuse_in_capture("warmup")
        buffers = self._resolve(workspace)
        if inputs is not None:
            self.forward(inputs, workspace=workspace)
            return
        capacity = buffers.capacity if buffers is not None else self._bootstrap_capacity
        self.forward(
            synthetic_inputs(capacity, self.geometry, self.w13.dtype, self.w13.device), workspace=workspace
        )
        if buffers is not None:
            buffers.signature = None  # the first real batch decides the steady signature

    def forward(self, inputs: MegaInputs, *, workspace: Workspace | None = None) -> torch.Tensor:
        buffers = self._resolve(workspace)
        capacity = buffers.capacity if buffers is not None else self._bootstrap_capacity
        if inputs.num_tokens > capacity:
            raise MoEEpConfigError(f"{inputs.num_tokens} tokens exceed max_tokens_per_rank={capacity}")
        if buffers is None:
            self._refuse_in_capture("workspace allocation")
            buffers = self._default = self._acquire(self._bootstrap_capacity)
        self._check_signature(inputs, buffers)
        if self._untuned:
            self._tune(inputs, buffers)
            self._untuned = False
        result = self._launch(inputs, buffers)
        if inputs.output is not None:
            inputs.output[: inputs.num_tokens].copy_(result)
            return inputs.output
        return result

    def _refuse_in_capture(self, what: str) -> None:
        if is_capturing():
            raise MoEEpConfigError(f"MegaMoE {what} cannot run during CUDA graph capture")

    def _resolve(self, workspace: Workspace | None) -> Buffers | None:
        if self._destroyed:
            raise MoEEpConfigError("MegaMoE layer has been destroyed")
        if workspace is None:
            bootstrap = self._workspaces.get(self._bootstrap_capacity)
            return bootstrap.buffers if bootstrap is not None else self._default
        if not isinstance(workspace, ReferenceWorkspace):
            raise TypeError("workspace must be created by create_workspace()")
        if workspace.is_destroyed:
            raise MoEEpConfigError("MegaMoE workspace has been destroyed")
        if self._workspaces.get(workspace.max_tokens_per_rank) is not workspace:
            raise MoEEpConfigError("MegaMoE workspace belongs to a different layer")
        return workspace.buffers

    def _check_signature(self, inputs: MegaInputs, buffers: Buffers) -> None:
        hidden, ids = inputs.hidden_states, inputs.topk_ids
        signature = (hidden.dtype, hidden.shape[1], ids.dtype, ids.shape[1])
        expected = (self.geometry.hidden_size, self.geometry.top_k)
        if (signature[1], signature[3]) != expected:
            raise MoEEpConfigError(
                f"hidden size and top-k must be {expected} (got {(signature[1], signature[3])})"
            )
        if buffers.signature is not None and buffers.signature != signature:
            raise MoEEpConfigError("MegaMoE steady-state input signature changed")
        buffers.signature = signature

    # pool ------------------------------------------------------------------------------------------------

    def _pool_key(self, capacity: int) -> tuple[Any, ...]:
        # As in FlashInfer 0.7.2 the key holds the knobs that were asked for, not the ones that the cache gave.
        knobs = tuple(sorted(self._knobs.items())) if isinstance(self._knobs, dict) else self._knobs
        return (self.geometry, id(self.group), self.w13.dtype, capacity, knobs)

    def _acquire(self, capacity: int) -> Buffers:
        if self._knobs == "auto":
            return self._allocate(capacity)
        entry = _POOL.entries.get(self._pool_key(capacity))
        if entry is None:
            entry = _POOL.entries[self._pool_key(capacity)] = _PoolEntry(self._allocate(capacity))
        entry.references += 1
        return entry.buffers

    def _release(self, buffers: Buffers) -> None:
        for key, entry in _POOL.entries.items():
            if entry.buffers is buffers:
                entry.references -= 1
                if entry.references == 0:
                    del _POOL.entries[key]
                return

    def _allocate(self, capacity: int) -> Buffers:
        knobs = self._knobs
        if not isinstance(knobs, dict):
            knobs = knob_file.lookup(knob_file.knob_file_path(), self._fields, capacity) or DEFAULT_KNOBS
        geometry = self.geometry
        width = geometry.hidden_size + 2 * geometry.top_k
        return Buffers(
            capacity,
            dict(knobs),
            torch.zeros(geometry.world_size, capacity, width),
            torch.zeros(geometry.world_size, capacity, geometry.hidden_size),
        )

    # the launch ------------------------------------------------------------------------------------------

    def _launch(self, inputs: MegaInputs, buffers: Buffers) -> torch.Tensor:
        geometry, num_tokens = self.geometry, inputs.num_tokens
        hidden, top_k = geometry.hidden_size, geometry.top_k
        outgoing = buffers.outgoing
        outgoing.zero_()
        outgoing[:, :, hidden : hidden + top_k] = -1
        ids = inputs.topk_ids.long()
        for peer in range(geometry.world_size):
            local = ids - peer * geometry.num_local_experts
            local = local.masked_fill((local < 0) | (local >= geometry.num_local_experts), -1)
            rows = (local >= 0).any(dim=1).nonzero().squeeze(1)
            outgoing[peer, rows, :hidden] = inputs.hidden_states[rows].float()
            outgoing[peer, rows, hidden : hidden + top_k] = local[rows].float()
            outgoing[peer, rows, hidden + top_k :] = inputs.topk_weights[rows].float()
        received = self._exchange(outgoing).view(-1, outgoing.shape[-1])
        partial = run_experts(
            received[:, :hidden],
            received[:, hidden : hidden + top_k].long(),
            received[:, hidden + top_k :],
            self.w13,
            self.w2,
            buffers.knobs,
        )
        buffers.partial.copy_(partial.view_as(buffers.partial))
        returned = self._exchange(buffers.partial)
        total = torch.zeros(num_tokens, hidden)
        for peer in range(geometry.world_size):
            total = total + returned[peer, :num_tokens]
        return total.to(inputs.hidden_states.dtype)

    def _exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """Block p of every rank to rank p; returns the blocks that were meant for this rank, by sender."""
        if self.geometry.world_size == 1:
            return blocks
        received = torch.empty_like(blocks)
        assert _all_to_all is not None
        _all_to_all(received, blocks, group=self.group)
        return received

    # knobs="auto" ----------------------------------------------------------------------------------------

    def _tune(self, inputs: MegaInputs, buffers: Buffers) -> None:
        """Time every candidate on these inputs; the slowest rank's time counts, rank 0 records the winner."""
        self._refuse_in_capture("tuning")
        times = []
        for knobs in all_knobs():
            buffers.knobs = knobs
            self._launch(inputs, buffers)
            runs = []
            for _ in range(3):
                start = time.perf_counter()
                self._launch(inputs, buffers)
                runs.append(time.perf_counter() - start)
            times.append(statistics.median(runs))
        slowest = torch.tensor(times, dtype=torch.float64)
        if self.geometry.world_size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        best = int(slowest.argmin())
        buffers.knobs = all_knobs()[best]
        path = knob_file.knob_file_path()
        if self.geometry.rank == 0 and path is not None:
            knob_file.record(
                path, self._fields, buffers.capacity, buffers.knobs, 1e6 * float(slowest[best]), "autotune"
            )


def all_knobs() -> list[Knobs]:
    """Every combination, the default first."""
    return [
        {"experts": experts, "tile_rows": rows}
        for experts in KNOB_VALUES["experts"]
        for rows in KNOB_VALUES["tile_rows"]
    ]


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    knobs: Knobs,
) -> torch.Tensor:
    """Weighted sum of the local experts over rows `x` `[R, H]` float32; ids `[R, K]` are local, -1 for none."""
    tile_rows = int(knobs["tile_rows"])
    w13, w2 = w13.float(), w2.float()
    flat = ids.reshape(-1)
    tiles, experts = [], []  # slot numbers of one product, -1 for padding; and its expert
    for expert in range(w13.shape[0]):
        slots = (flat == expert).nonzero().squeeze(1)
        for start in range(0, slots.shape[0], tile_rows):
            tile = slots[start : start + tile_rows]
            tiles.append(F.pad(tile, (0, tile_rows - tile.shape[0]), value=-1))
            experts.append(expert)
    results = torch.zeros(flat.shape[0] + 1, x.shape[1])  # the last row takes what padding computes
    if tiles:
        slots = torch.stack(tiles)
        rows = x[slots.clamp(min=0) // ids.shape[1]]
        if knobs["experts"] == "batched":
            chosen = torch.tensor(experts)
            out = torch.bmm(_swiglu(torch.bmm(rows, w13[chosen].transpose(1, 2))), w2[chosen].transpose(1, 2))
        else:
            out = torch.stack(
                [_swiglu(tile @ w13[e].t()) @ w2[e].t() for tile, e in zip(rows, experts, strict=True)]
            )
        results[slots.reshape(-1)] = out.reshape(-1, x.shape[1])
        results[-1] = 0
    weighted = results[:-1].view(*ids.shape, -1) * weights.unsqueeze(2)
    total = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        total = total + weighted[:, k]
    return total


def _swiglu(up_gate: torch.Tensor) -> torch.Tensor:
    up, gate = up_gate.chunk(2, dim=-1)
    return F.silu(gate) * up
