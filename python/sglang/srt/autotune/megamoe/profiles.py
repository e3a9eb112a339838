"""The ladder of workspaces that serving picks from: every layer's owner, one workspace each per capacity.

A profile is a capacity with the knobs that suit it. Profiles are opened and warmed while the engine starts, frozen
before anything is captured, and closed with the engine. Picking one is a bisect over a tuple; nothing else about them
changes while the engine serves.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.autotune.megamoe.env_guard import environment, scratch_knob_cache
from sglang.srt.autotune.megamoe.kernels.base import (
    CapacityExceeded,
    Knobs,
    MegaInputs,
    MegaMoEError,
    MegaMoEKernel,
    Owner,
    Workspace,
)

logger = logging.getLogger(__name__)

#: Knobs of the workspaces that are open in this process, with the number of ladders that hold them. It mirrors the
#: kernels' process-wide pool: a workspace that is pooled keeps its knobs, so a second ladder must keep them too.
_OPEN: dict[tuple[Any, ...], tuple[Knobs | None, int]] = {}


def knobs_in_use(kernel: MegaMoEKernel, capacity: int) -> Knobs | None:
    """The knobs of a workspace of this geometry and capacity that this process has open."""
    return _OPEN.get(_place(kernel, capacity), (None, 0))[0]


class MegaMoEProfiles:
    """All layers' owners of one kernel, and their workspaces.

    Args:
        bootstrap_capacity: tokens per rank of the one workspace that an engine without tuned profiles has.
    """

    def __init__(self, kernel: MegaMoEKernel, bootstrap_capacity: int) -> None:
        self.kernel, self.bootstrap_capacity = kernel, bootstrap_capacity
        self.owners: list[Owner] = []
        self.weights: list[Any] = []
        self.capacities: tuple[int, ...] = ()
        self.is_frozen = self.is_tuned = self.has_run = False
        self._opened: dict[int, tuple[Workspace, ...]] = {}
        self._workspaces: tuple[tuple[Workspace, ...], ...] = ()

    def add_owner(self, weights: Any) -> int:
        """Take over a layer's prepared weights; returns the number by which its forwards go."""
        assert not self._opened, "every layer must be added before a workspace is opened"
        with environment(self.kernel.required_environment()):
            owner = self.kernel.create_owner(weights, self.bootstrap_capacity)
        self.owners.append(owner)
        self.weights.append(weights)
        return len(self.owners) - 1

    # opening ---------------------------------------------------------------------------------------------

    def create(self, capacity: int, knobs: Knobs | None) -> None:
        """Open a workspace of `capacity` on every owner; the knob cache must say `knobs` at this moment."""
        assert not self.is_frozen, "the profiles are frozen"
        if not self.owners:
            raise MegaMoEError("no layer was given to the MegaMoE profiles")
        opened: list[Workspace] = []
        try:
            for owner in self.owners:
                opened.append(owner.create_workspace(capacity))
        except BaseException:
            for workspace in reversed(opened):
                workspace.destroy()
            raise
        self._opened[capacity] = tuple(opened)
        present, count = _OPEN.get(_place(self.kernel, capacity), (knobs, 0))
        _OPEN[_place(self.kernel, capacity)] = (present, count + 1)

    def warm(self, capacity: int, inputs: MegaInputs | None) -> list[str]:
        """Compile and run every owner once at this capacity; collective. Returns what a report should say of it."""
        pairs = zip(self.owners, self._opened[capacity], strict=True)
        said = [owner.warmup(inputs, workspace=workspace) for owner, workspace in pairs]
        remarks = sorted({remark for remark in said if remark is not None})
        for remark in remarks:
            logger.warning("MegaMoE at capacity %d: %s", capacity, remark)
        return remarks

    def freeze(self, *, tuned: bool) -> None:
        """From here on forwards pick among what is open; nothing is opened or closed until `close`."""
        assert self._opened and not self.is_frozen
        self.capacities = tuple(sorted(self._opened))
        self._workspaces = tuple(
            tuple(self._opened[capacity][index] for capacity in self.capacities)
            for index in range(len(self.owners))
        )
        self.is_frozen, self.is_tuned = True, tuned

    def open_ordinary(self, inputs: MegaInputs | None = None) -> None:
        """One workspace of the bootstrap capacity with the kernel's default knobs, for an engine that does not tune."""
        with scratch_knob_cache(self.kernel.required_environment()):
            self.create(self.bootstrap_capacity, None)
            self.warm(self.bootstrap_capacity, inputs)
        self.freeze(tuned=False)

    def abandon(self) -> None:
        """Close what was opened, in reverse order; the owners stay."""
        for capacity in reversed(list(self._opened)):
            for workspace in reversed(self._opened.pop(capacity)):
                workspace.destroy()
            self._forget(capacity)
        self._workspaces, self.capacities, self.is_frozen, self.is_tuned = (), (), False, False

    def close(self) -> None:
        """Destroy all owners with their workspaces; collective, once no graph uses them any more."""
        for owner in reversed(self.owners):
            owner.destroy()
        for capacity in list(self._opened):
            del self._opened[capacity]
            self._forget(capacity)
        self.owners, self.weights, self._workspaces, self.capacities = [], [], (), ()

    def _forget(self, capacity: int) -> None:
        knobs, count = _OPEN.pop(_place(self.kernel, capacity))
        if count > 1:
            _OPEN[_place(self.kernel, capacity)] = (knobs, count - 1)

    # serving ---------------------------------------------------------------------------------------------

    def select(self, most_tokens: int) -> int:
        """Index of the smallest capacity that covers `most_tokens`, the largest count of any rank.

        Raises:
            CapacityExceeded: no capacity does.
        """
        index = bisect_left(self.capacities, most_tokens)
        if index == len(self.capacities):
            self._refuse(most_tokens)
        return index

    def forward(self, owner: int, inputs: MegaInputs, most_tokens: int) -> torch.Tensor:
        """`[T, H]` of one layer. Every rank calls it with the same `most_tokens`, those without tokens too."""
        index = self.select(most_tokens)
        self.has_run = True
        return self.owners[owner].forward(inputs, workspace=self._workspaces[owner][index])

    def workspaces(self, owner: int) -> Sequence[Workspace]:
        """An owner's workspaces, by ascending capacity."""
        return self._workspaces[owner]

    def _refuse(self, most_tokens: int) -> None:
        if not self.is_frozen:
            raise MegaMoEError("a MegaMoE forward came before its workspaces were opened")
        raise CapacityExceeded(
            f"a MegaMoE forward has {most_tokens} tokens on one rank and the largest workspace holds "
            f"{self.capacities[-1]}; raise SGLANG_FLASHINFER_MEGAMOE_MAX_TOKENS_PER_RANK, or lower "
            "--chunked-prefill-size and --max-running-requests"
        )


def _place(kernel: MegaMoEKernel, capacity: int) -> tuple[Any, ...]:
    group = getattr(kernel, "group", None)
    return (kernel.name, kernel.variant, kernel.geometry, id(group), str(kernel.device), capacity)
