"""Where a rank's records lie: a path made of everything that changes the answer and of nothing else.

The directory is a digest of the model's geometry, its number formats, the backends, the parallel sizes, the
ops left out of tuning and the environment. Where the weights are mounted, how many requests a server admits
or which version the engine has, leave it alone. The environment belongs to it because FlashInfer refuses a
file of another environment: without it an H100 and an H200 on one volume would each lock the other out.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.autotune.records.files import replace_file

IDENTITY_SCHEMA = 1


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that selects or changes a winner.

    ``model`` holds the geometry that reaches kernels (hidden size, experts, top-k, vocabulary, kinds of
    layers, ...), plain values only. ``backends`` maps a role (``moe``, ``a2a``, ``attention``) to its
    backend, ``parallel`` a size's name (``tp``, ``pp``, ``ep``, ``attn_dp``) to the size. ``environment`` is
    FlashInfer's stamp, on a CPU with the CPU's model added. Orders do not matter.
    """

    model: Mapping[str, Any]
    dtype: str
    environment: Mapping[str, str]
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    backends: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    skip_ops: tuple[str, ...] = ()
    draft: bool = False

    def described(self) -> dict[str, Any]:
        """What is hashed, as plain JSON."""
        return {
            "schema": IDENTITY_SCHEMA,
            "model": dict(self.model),
            "dtype": _short_dtype(self.dtype),
            "quantization": self.quantization,
            "kv_cache_dtype": _short_dtype(self.kv_cache_dtype),
            "backends": dict(self.backends),
            "parallel": dict(self.parallel),
            "skip_ops": sorted(set(self.skip_ops)),
            "draft": self.draft,
            "environment": dict(self.environment),
        }

    def canonical(self) -> str:
        return json.dumps(self.described(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RankPlace:
    """Which rank's file: its coordinates, and the GPU's UUID where the file must have one writer per GPU."""

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    draft: bool = False
    gpu_uuid: str | None = None

    def file_name(self) -> str:
        gpu = f"_gpu{safe_part(self.gpu_uuid)}" if self.gpu_uuid else ""
        return f"{self._stem()}{gpu}.json"

    def sibling_pattern(self) -> re.Pattern[str]:
        """Matches the names of the same rank's files on other GPUs."""
        return re.compile(re.escape(self._stem()) + r"_gpu[^/]+\.json")

    def _stem(self) -> str:
        return f"rank_tp{self.tp_rank}_pp{self.pp_rank}_dp{self.dp_rank}{'_draft' if self.draft else ''}"


@dataclass(frozen=True)
class CachePath:
    """The files of one identity under one root. ``sm`` is ``sm90`` or ``cpu``."""

    root: Path
    identity: CacheIdentity
    sm: str

    @property
    def directory(self) -> Path:
        version = self.identity.environment.get("flashinfer_version", "unknown")
        base = self.root / "flashinfer" / "autotune" / safe_part(version) / safe_part(self.sm)
        return base / self.identity.digest()

    def records(self, place: RankPlace) -> Path:
        return self.directory / place.file_name()

    def fresh_records(self, place: RankPlace, run_id: str) -> Path:
        """A file of its own for a start that neither reads nor touches what was stored before."""
        return self.directory / "runs" / safe_part(run_id) / place.file_name()

    def fallback(self, place: RankPlace) -> Path | None:
        """For a file named by GPU that does not exist: the newest one of the same rank on another GPU.

        All files of the directory have one environment, so a pod that moved to another GPU of the same kind
        starts warm. None when the exact file exists, the place names no GPU, or there is no other.
        """
        exact = self.records(place)
        if place.gpu_uuid is None or exact.exists():
            return None
        pattern = place.sibling_pattern()
        siblings: list[tuple[float, str]] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                if pattern.fullmatch(entry.name) and entry.is_file():
                    siblings.append((entry.stat().st_mtime, entry.path))
        return Path(max(siblings)[1]) if siblings else None

    def describe(self) -> None:
        """Write ``identity.json`` beside the records once, for people; failing to is no matter."""
        target = self.directory / "identity.json"
        with contextlib.suppress(OSError):
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(target, json.dumps(self.identity.described(), indent=2, sort_keys=True).encode())


def new_run_id() -> str:
    """``<UTC time>-<pid>``; made once per start and shared by its ranks."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}"


def safe_part(text: str, limit: int = 96) -> str:
    """``text`` as one harmless path component: no separators, no leading dot, never empty."""
    clean = re.sub(r"[^A-Za-z0-9._+-]", "_", text)[:limit].lstrip(".")
    return clean or "unknown"


def _short_dtype(name: str) -> str:
    return name.removeprefix("torch.")
