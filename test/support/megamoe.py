"""Ranks that run the reference MegaMoE kernel over gloo, with real votes and real record files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels.base import Geometry
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.staging import MegaMoEReport, stage_profiles
from sglang.srt.autotune.records.store import RecordStore
from support.ranks import join_gloo

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 8, 2
BOOTSTRAP = 4
CAPACITIES = (1, 2, 4, 8, 16)


class FileRecords:
    """A record file as the stage hands it to the MegaMoE profiles."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, RecordStore(path, flashinfer_api.environment())
        self.commits = 0

    def namespace(self, name: str) -> Mapping[str, Any]:
        return self.store.load().namespaces.get(name, {})

    def commit_namespace(self, name: str, entries: Mapping[str, Any]) -> None:
        self.commits += 1
        self.store.commit(namespaces={name: entries})


class MemoryRecords:
    """The same without a file."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, Any]] = {}

    def namespace(self, name: str) -> Mapping[str, Any]:
        return dict(self.content.get(name, {}))

    def commit_namespace(self, name: str, entries: Mapping[str, Any]) -> None:
        self.content.setdefault(name, {}).update(entries)


def small_geometry(rank: int = 0, size: int = 1) -> Geometry:
    return Geometry(HIDDEN, INNER, EXPERTS, TOP_K, size, rank)


def random_experts(geometry: Geometry, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's `w13` and `w2` of a layer; the same experts whatever the number of ranks."""
    generator = torch.Generator().manual_seed(layer)
    w13 = torch.randn((geometry.num_experts, 2 * INNER, HIDDEN), generator=generator) * HIDDEN**-0.5
    w2 = torch.randn((geometry.num_experts, HIDDEN, INNER), generator=generator) * INNER**-0.5
    first = geometry.rank * geometry.num_local_experts
    mine = slice(first, first + geometry.num_local_experts)
    return w13[mine].contiguous(), w2[mine].contiguous()


class MegaRank:
    """One rank: its gloo group, its votes, its kernel."""

    def __init__(self, rank: int, size: int, port: int, *, bound_s: float = 10.0) -> None:
        self.rank, self.size = rank, size
        self.tcp_store = join_gloo(rank, size, port, bound_s)
        self.kernel = ReferenceMegaMoE(small_geometry(rank, size), dist.group.WORLD)
        self.bound_s, self._votes = bound_s, 0

    def agreement(self) -> Agreement:
        """Votes of one staging; every staging of a test has its own."""
        self._votes += 1
        prefix = dist.PrefixStore(f"votes{self._votes}", self.tcp_store)
        return Agreement(prefix, self.rank, range(self.size), self.bound_s)

    def profiles(self, num_layers: int = 2) -> MegaMoEProfiles:
        profiles = MegaMoEProfiles(self.kernel, BOOTSTRAP)
        for layer in range(num_layers):
            profiles.add_owner(self.kernel.prepare_weights(*random_experts(self.kernel.geometry, layer)))
        return profiles

    def stage(
        self, profiles: MegaMoEProfiles, records: Any, *, policy: str | None = None, **options: Any
    ) -> MegaMoEReport:
        return stage_profiles(
            profiles,
            options.pop("capacities", CAPACITIES),
            records,
            options.pop("agreement", None) or self.agreement(),
            dtype=torch.float32,
            policy=policy,
            **options,
        )

    def outputs(self, profiles: MegaMoEProfiles, counts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Results of every layer for each row of token counts, one count per rank."""
        results = []
        for index, row in enumerate(counts):
            inputs = routed_inputs(
                row[self.rank], self.kernel.geometry, torch.float32, self.kernel.device, 50 + index
            )
            for layer in range(len(profiles.owners)):
                results.append(profiles.forward(layer, inputs, max(row)))
        return results
