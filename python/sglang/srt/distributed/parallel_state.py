"""The process groups of one rank, as a value that is passed to whoever needs it.

A rank lives on a grid of `pp_size` stages times `tp_size` ranks (global rank = stage * tp_size + tp rank).
The tensor ranks of one stage are cut in two independent ways:

- for attention, into `attn_dp_size` neighbours of `attn_tp_size` contiguous ranks. Ranks of one `attn_tp`
  group hold the same tokens and split the heads; ranks of one `attn_dp` group hold different tokens and the
  same heads;
- for the experts, into `ep_size` neighbours of `moe_tp_size` contiguous ranks. Ranks of one `moe_tp` group
  split every expert; ranks of one `ep` group hold different experts.

There is no module-level state: a process that serves two engines holds two `ParallelState` values.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renames the collective and warns about its old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate. `rank` is this process's index in `ranks`, which are global ranks.

    Tensors on an accelerator travel through `device_group` (NCCL), tensors on the CPU and Python objects
    through `cpu_group` (gloo). A group of one touches neither: its collectives return their input.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    device_group: Any = field(default=None, repr=False)
    cpu_group: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def _group_for(self, tensor: torch.Tensor) -> Any:
        return self.cpu_group if tensor.device.type == "cpu" else self.device_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place; returns it. It must be contiguous."""
        if self.size > 1 and tensor.numel():  # an idle batch has no rows, on all ranks that would sum them
            dist.all_reduce(tensor, group=self._group_for(tensor))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate equally shaped tensors of all ranks along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        moved = tensor.movedim(dim, 0).contiguous()
        gathered = moved.new_empty((self.size * moved.shape[0], *moved.shape[1:]))
        _all_gather_single(gathered, moved, group=self._group_for(tensor))
        return gathered.movedim(0, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` (contiguous) with that of the rank with index `src`; returns it."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(tensor, self.ranks[src], group=self._group_for(tensor))
        return tensor

    def isend(self, tensor: torch.Tensor, dst: int) -> dist.Work:
        """Begin to send `tensor` (contiguous) to the rank with index `dst`; it must live until `wait()` returns."""
        work = dist.isend(tensor, self.ranks[dst], group=self._group_for(tensor))
        assert work is not None, "this rank is in the group"
        return work

    def irecv(self, tensor: torch.Tensor, src: int) -> dist.Work:
        """Begin to fill `tensor` (contiguous) from the rank with index `src`; it may be read after `wait()`."""
        work = dist.irecv(tensor, self.ranks[src], group=self._group_for(tensor))
        assert work is not None, "this rank is in the group"
        return work

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The picklable objects of all ranks, in rank order."""
        if self.size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.cpu_group)
        return gathered

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks; raises `RuntimeError` that names those which did not come in `timeout_s`."""
        if self.size > 1:
            bound = datetime.timedelta(seconds=timeout_s)
            dist.monitored_barrier(self.cpu_group, timeout=bound, wait_all_ranks=True)


@dataclass(frozen=True, eq=False)
class ParallelState:
    """All groups that one rank belongs to; see the module's docstring for what each of them shares.

    `store` is the key-value store of the rendezvous, over which ranks talk without a collective; None alone.
    """

    world: Group
    tp: Group
    pp: Group
    attn_tp: Group
    attn_dp: Group
    ep: Group
    moe_tp: Group
    store: dist.Store | None = None

    @classmethod
    def single(cls) -> ParallelState:
        """The state of a process that is alone."""
        names = ("world", "tp", "pp", "attn_tp", "attn_dp", "ep", "moe_tp")
        groups = {name: Group(name) for name in names}
        return cls(store=None, **groups)


class ParallelArgs(Protocol):
    """The part of `ServerArgs` that shapes the grid; sizes are already known to divide."""

    tp_size: int
    pp_size: int
    ep_size: int
    attn_dp_size: int
    dist_timeout: float


def partitions(args: ParallelArgs) -> dict[str, list[tuple[int, ...]]]:
    """For each group name, the global ranks of every such group of the whole grid, in rank order."""
    tp_size, pp_size = args.tp_size, args.pp_size
    stages = [range(stage * tp_size, (stage + 1) * tp_size) for stage in range(pp_size)]

    def contiguous(size: int) -> list[tuple[int, ...]]:
        return [tuple(s[i : i + size]) for s in stages for i in range(0, tp_size, size)]

    def strided(stride: int) -> list[tuple[int, ...]]:
        return [tuple(s[i::stride]) for s in stages for i in range(stride)]

    attn_tp_size = tp_size // args.attn_dp_size
    moe_tp_size = tp_size // args.ep_size
    return {
        "world": [tuple(range(tp_size * pp_size))],
        "tp": contiguous(tp_size),
        "pp": [tuple(stage[i] for stage in stages) for i in range(tp_size)],
        "attn_tp": contiguous(attn_tp_size),
        "attn_dp": strided(attn_tp_size),
        "ep": strided(moe_tp_size),
        "moe_tp": contiguous(moe_tp_size),
    }


def initialize(args: ParallelArgs, rank: int, init_method: str, device: torch.device) -> ParallelState:
    """Join the default process group and create this rank's groups; collective over all ranks.

    `init_method` is a torch.distributed rendezvous (`tcp://host:port`, or `env://` under torchrun). With a
    world of one rank nothing is opened. Every wait is bounded by `dist_timeout` seconds.
    """
    world_size = args.tp_size * args.pp_size
    if world_size == 1:
        return ParallelState.single()
    timeout = datetime.timedelta(seconds=args.dist_timeout)
    on_cuda = device.type == "cuda"
    store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_cuda else None,
    )
    groups = _ProcessGroups(timeout, on_cuda)
    named = {name: groups.of(name, all_ranks, rank) for name, all_ranks in partitions(args).items()}
    return ParallelState(store=store, **named)


class _ProcessGroups:
    """Creates torch's process groups, one for each set of ranks: a set often serves under several names, and every
    NCCL communicator takes memory and time. torch wants all ranks to create all groups, in the same order.
    """

    def __init__(self, timeout: datetime.timedelta, on_cuda: bool) -> None:
        self._timeout, self._on_cuda = timeout, on_cuda
        self._created: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def of(self, name: str, all_ranks: Sequence[tuple[int, ...]], rank: int) -> Group:
        """The group of `rank` among those that partition the grid as `all_ranks`."""
        mine = None
        for ranks in all_ranks:
            device_group, cpu_group = self._create(ranks)
            if rank in ranks:
                mine = Group(name, ranks.index(rank), ranks, device_group, cpu_group)
        assert mine is not None, f"rank {rank} is in no {name} group of {all_ranks}"
        return mine

    def _create(self, ranks: tuple[int, ...]) -> tuple[Any, Any]:
        if len(ranks) == 1:
            return None, None
        if ranks not in self._created:
            cpu_group = dist.new_group(ranks, timeout=self._timeout, backend="gloo")
            device_group = cpu_group
            if self._on_cuda:
                device_group = dist.new_group(ranks, timeout=self._timeout, backend="nccl")
            self._created[ranks] = device_group, cpu_group
        return self._created[ranks]


def shutdown() -> None:
    """Leave the default process group, if this process joined one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
