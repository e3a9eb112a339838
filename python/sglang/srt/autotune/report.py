"""What the stage did, as one JSON document.

The same object goes to the report file and under ``autotune`` in ``GET /server_info``. Its schema is
documented in `docs/autotune.md`; `SCHEMA` changes when a field changes its meaning or goes away.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass
class StepReport:
    """One step. ``source`` is where its answer came from; times are per layer, of the tunable op alone."""

    phase: str
    num_tokens: int
    source: str = "pending"  # seeded, user, given, tuned, mixed, left out, untuned
    seconds: float = 0.0
    default_ms: float | None = None
    tuned_ms: float | None = None
    relative_error: float | None = None
    profiles_tuned: int = 0
    winners: dict[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def speedup(self) -> float | None:
        if not self.default_ms or not self.tuned_ms:
            return None
        return self.default_ms / self.tuned_ms


@dataclass
class FallbackReport:
    """A lookup that no record answered after the stage: op, step, and the shapes as FlashInfer logged them."""

    op: str
    step: str
    shapes: str


@dataclass
class RecordCounts:
    seeded: int = 0
    user: int = 0
    given: int = 0
    tuned: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)


@dataclass
class StageReport:
    """See the module docstring. ``status`` is completed, skipped or failed; ``reason`` says why in words."""

    status: str = "failed"
    reason: str = ""
    seconds: float = 0.0
    plan: dict[str, Any] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    records: RecordCounts = field(default_factory=RecordCounts)
    seeds: list[dict[str, Any]] = field(default_factory=list)
    profiles_tuned: int = 0
    fallbacks: int = 0
    fallback_details: list[FallbackReport] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    megamoe: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    cache_path: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    skipped_ops: dict[str, list[str]] = field(default_factory=lambda: {"names": [], "never_asked": []})
    timings: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, path: Path) -> None:
        """Write the document atomically; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        os.replace(scratch, path)
