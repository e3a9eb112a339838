"""The one protocol through which the stage sees its engine.

An engine that implements `Host` can carry this folder. Nothing else of the engine is imported by the
subsystem.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sglang.srt.autotune.identity import EngineIdentity, Topology
from sglang.srt.autotune.megamoe.host import MegaMoEHost
from sglang.srt.autotune.plan import Limits, Shape


class OpProbe(Protocol):
    """The tunable op of one layer on fixed inputs; local to the rank, no collective."""

    def run(self) -> torch.Tensor:
        """``[num_tokens, hidden]`` with whatever choice is in force; may be captured in a CUDA graph."""
        ...

    def compile_jobs(self) -> list[Callable[[], None]]:
        """Kernels that `run` would compile on their first launch, as jobs for any thread; nothing is launched."""
        ...

    def reference(self, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to ``max_rows`` row numbers and the op's result for them computed in float32."""
        ...


class Host(Protocol):
    """What the stage asks of an engine. All methods are called from the rank's main thread."""

    device: torch.device
    capability: tuple[int, int] | None
    limits: Limits
    topology: Topology
    identity: EngineIdentity
    moe_backend: str
    #: dtype in which `op_probe` computes.
    probe_dtype: torch.dtype
    #: Names under which the selected backends ask FlashInfer's AutoTuner.
    op_names: tuple[str, ...]
    #: In-tree ops, to which a profiler is lent. One with several runners comes first in ``op_names``, before the ops
    #: that only its runners ask for.
    tuned_ops: tuple[Any, ...]
    #: The MegaMoE profiles of an engine whose experts run on it; None elsewhere.
    megamoe: MegaMoEHost | None
    #: CPU process group over ``topology.alike`` for FlashInfer's own reductions; None with one rank or on CPU.
    timing_group: Any | None

    def forward_context(self) -> AbstractContextManager[None]:
        """The stream and grad mode in which serving runs its forwards."""
        ...

    def dummy_forward(self, shape: Shape, *, every_layer: bool = True) -> None:
        """Run one forward of ``shape`` through the layers of this rank, with its collectives.

        Without ``every_layer`` one layer of each kind is enough: layers of a kind ask for the same tactics.
        Token ids look real and routing keeps every local expert busy. No KV of a request is touched.
        """
        ...

    def op_probe(self, num_tokens: int) -> OpProbe:
        """The tunable op of one layer on inputs of ``num_tokens`` rows, which compares tuned with default choices."""
        ...

    def free_memory_bytes(self) -> int | None:
        """Free device memory; None where it is not worth asking (CPU)."""
        ...

    def step_memory_bytes(self, shape: Shape) -> int:
        """An upper estimate of what a dummy forward of ``shape`` allocates."""
        ...
