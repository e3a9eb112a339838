"""What the stage and the layer ask of a MegaMoE kernel.

A *kernel* describes one geometry on one rank. An *owner* holds one layer's prepared weights. A *workspace* is
opened on an owner for a capacity (most tokens per rank of one launch); owners of one geometry share its buffers
through a process-wide pool with reference counts. The terms and the life cycle are those of
`flashinfer.moe_ep.MoEEpMegaLayer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Knobs = dict[str, Any]
"""One choice of launch parameters, as the kernel names them; tuples and scalars only."""


class MegaMoEError(RuntimeError):
    """The life cycle of profiles was broken: something was asked for at the wrong time."""


class CapacityExceeded(ValueError):
    """A forward has more tokens on some rank than the largest workspace holds."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of one layer's experts. `intermediate_size` is the width after SwiGLU; experts are counted globally."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    world_size: int = 1
    rank: int = 0

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.world_size

    def on_one_rank(self) -> dict[str, int]:
        """The arguments of a `Geometry` of this rank's experts alone, as a sweep worker runs them."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_experts": self.num_local_experts,
            "top_k": min(self.top_k, self.num_local_experts),
        }

    def entry_fields(self) -> dict[str, int]:
        """The sizes that identify an entry of FlashInfer's knob cache, under the names it has there."""
        return {
            "world_size": self.world_size,
            "hidden": self.hidden_size,
            "intermediate": self.intermediate_size,
            "num_experts": self.num_experts,
            "topk": self.top_k,
        }


@dataclass
class MegaInputs:
    """What one rank brings to a launch: its own tokens with global expert ids.

    `hidden_states` `[T, H]`, `topk_ids` `[T, K]` integer, `topk_weights` `[T, K]` float32; `T` may be 0, the rank
    takes part all the same. `output` `[T, H]`, if given, receives the result.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    output: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.hidden_states.shape[0]


class Workspace(Protocol):
    """Buffers for one capacity on one owner."""

    @property
    def max_tokens_per_rank(self) -> int: ...
    @property
    def is_destroyed(self) -> bool: ...
    def destroy(self) -> None: ...


class Owner(ABC):
    """One layer's prepared weights. Every method is called by all ranks together, in the same order."""

    @abstractmethod
    def create_workspace(self, max_tokens_per_rank: int) -> Workspace:
        """Open a workspace; one per capacity. Raises when that capacity is open already or in a capture."""

    @abstractmethod
    def warmup(self, inputs: MegaInputs | None = None, *, workspace: Workspace | None = None) -> str | None:
        """Compile and run once, so that `forward` may be captured; gives what a report should say of it, or None."""

    @abstractmethod
    def forward(self, inputs: MegaInputs, *, workspace: Workspace | None = None) -> torch.Tensor:
        """`[T, H]`; without a workspace, the owner's own of its bootstrap capacity."""

    @abstractmethod
    def destroy(self) -> None:
        """Close what is open, in reverse order; a second call does nothing."""


@dataclass(frozen=True)
class BenchSpec:
    """How a worker process builds the bench of a kernel: `factory` is `module:function`, called with `arguments`."""

    factory: str
    arguments: dict[str, Any] = field(default_factory=dict)


class MegaMoEKernel(ABC):
    """One kernel for one geometry on this rank."""

    name: str
    policy: str
    """How its profiles are tuned by default: `sweep` or `native`."""
    uses_workers: bool = True
    """Whether a sweep of one rank runs in worker processes: worth it where a candidate must be compiled."""
    variant: str = ""
    """Set by options that change what is computed; winners of one variant mean nothing to another."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device

    @abstractmethod
    def prepare_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        """What the kernel reads, from `w13` `[E_local, 2*I, H]` (UP rows first) and `w2` `[E_local, H, I]`.

        Raises:
            ValueError: a size breaks the kernel's alignment rule, which the message gives.
        """

    @abstractmethod
    def layer_tensors(self, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The two weight tensors among prepared weights, for the layer to keep in place of its own."""

    @abstractmethod
    def create_owner(self, weights: Any, max_tokens_per_rank: int, knobs: Knobs | str | None = None) -> Owner:
        """An owner of prepared weights. `knobs`: a dict, `"auto"` (tune in the first forward), or None (knob cache)."""

    @abstractmethod
    def default_knobs(self, capacity: int) -> Knobs:
        """What the kernel chooses by itself when nothing was tuned."""

    @abstractmethod
    def candidates(self, capacity: int) -> list[Knobs]:
        """Everything worth trying at a capacity, the default first."""

    def screened(self, capacity: int) -> list[Knobs]:
        """The candidates that differ in what matters most; `variants` of the best are tried after them."""
        return self.candidates(capacity)

    def variants(self, knobs: Knobs) -> list[Knobs]:
        """Candidates that differ from `knobs` in a minor choice only."""
        return []

    @abstractmethod
    def check_knobs(self, knobs: Any) -> Knobs:
        """`knobs` as read from JSON, with tuples restored; ValueError when the kernel could not run them."""

    @abstractmethod
    def entry_fields(self) -> dict[str, Any]:
        """The fields by which a knob-cache entry is matched, capacity and knobs apart."""

    @abstractmethod
    def record(self, knobs: Knobs, capacity: int, time_us: float | None, source: str) -> None:
        """Write an entry to the knob cache that `FLASHINFER_MOE_EP_KNOB_CACHE` names."""

    @abstractmethod
    def recorded(self, capacity: int) -> Knobs | None:
        """The knobs that an owner with `knobs=None` would take from the knob cache."""

    def required_environment(self) -> dict[str, str]:
        """Variables that must be set while owners and workspaces are made or freed."""
        return {}

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        return

    @abstractmethod
    def float_reference(self, weights: Any, inputs: MegaInputs, first_expert: int = 0) -> torch.Tensor:
        """`[T, H]` float32: what the experts of these prepared weights add to the rows; numbers from `first_expert`."""

    #: Largest relative error (norm over norm) of a right result against `float_reference`.
    tolerance: float = 0.02

    def bench(self) -> BenchSpec | None:
        """How worker processes time candidates of this geometry by themselves; None when they cannot."""
        return None

    def worker_bytes(self) -> int:
        """Device memory that one such worker takes."""
        return 0
