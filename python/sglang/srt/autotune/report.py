"""What the stage did, as one JSON document.

The same object goes to the report file, beside the records and under ``autotune`` in ``GET /server_info``. Its
schema is documented in `docs/autotune.md`; `SCHEMA` changes when a field changes its meaning or goes away.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.autotune.records.document import read_json_object
from sglang.srt.autotune.records.files import replace_file

if TYPE_CHECKING:
    from sglang.srt.autotune.host import Host
    from sglang.srt.autotune.records.store import LoadedRecords

logger = logging.getLogger(__name__)

SCHEMA = 1
#: How long a reader of a pipe may stop reading the report.
_READER_S = 5.0
REPORT_NAME = "report.json"
"""The file beside the records: the report of the last start that tuned something."""


@dataclass
class StepReport:
    """One step. ``source`` is where its answer came from; times are per layer, of the tunable op alone."""

    phase: str
    num_tokens: int
    source: str = "pending"  # seeded, user, given, tuned, mixed, left out, over budget, untuned
    seconds: float = 0.0
    default_ms: float | None = None
    tuned_ms: float | None = None
    relative_error: float | None = None
    profiles_tuned: int = 0
    winners: dict[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def name(self) -> str:
        return f"{self.phase} {self.num_tokens}"

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
    """Records by where they came from; `rejected` are those of files that are not used, see `rejections`.

    `superseded` says in words which record yielded to another one with the same question, and `unused` how many were
    loaded that no kernel here asks for, which count nowhere else.
    """

    seeded: int = 0
    user: int = 0
    given: int = 0
    tuned: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)
    superseded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


@dataclass
class StageReport:
    """See the module docstring. ``status`` is completed, skipped or failed; ``reason`` says why in words."""

    status: str = "failed"
    reason: str = ""
    seconds: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)
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
        """The document: plain JSON, a number that is not finite becomes null."""
        document: dict[str, Any] = _finite({"schema": SCHEMA, **asdict(self)})
        return document

    def write(self, path: Path) -> None:
        """Write the document, atomically where ``path`` is a file or nothing yet; raises OSError or ValueError."""
        data = (json.dumps(self.to_json(), indent=2) + "\n").encode()
        if path.exists() and not path.is_file():
            _write_into(path, data)
            return
        path = Path(os.path.realpath(path))  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, durable=False)

    def save(self, report_path: Path | None) -> None:
        """Write to the file that the user named, and beside the records when they have changed. Never raises."""
        if report_path is not None:
            try:
                self.write(report_path)
            except (OSError, ValueError) as error:
                logger.error("--flashinfer-autotune-report %s cannot be written: %s", report_path, error)
        if self.cache_path is not None and self.profiles_tuned:
            try:
                self.write(Path(self.cache_path).with_name(REPORT_NAME))
            except (OSError, ValueError) as error:
                logger.warning("FlashInfer autotune: the report cannot be kept beside the records: %s", error)


def _write_into(path: Path, data: bytes) -> None:
    """Write to a device or a pipe such as ``/dev/stdout``, which must not be replaced by a file."""
    # Without waiting: a pipe that nobody reads must not hang the start.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while data:
            if not select.select([], [descriptor], [], _READER_S)[1]:
                raise TimeoutError(f"nobody has read from it for {_READER_S:g} s")
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_engine(host: Host) -> dict[str, Any]:
    """What was tuned for: the report's ``engine``."""
    identity, capability = host.identity, host.capability
    return {
        "device": host.device.type,
        "capability": None if capability is None else list(capability),
        "model": dict(identity.model),
        "dtype": identity.dtype,
        "quantization": identity.quantization,
        "backends": dict(identity.backends),
        "parallel": dict(identity.parallel),
        "ops": list(host.op_names),
    }


def rejections(source: str, loaded: LoadedRecords) -> list[dict[str, str]]:
    """Everything in a file that is not used, each with its ``kind``: file, environment or entry."""
    kinds = ["file"] * (loaded.rejected_file is not None)
    kinds += ["environment"] * (not loaded.environment.matches)
    kinds += ["entry"] * len(loaded.rejected)
    return [
        {"source": source, "path": loaded.path, "kind": kind, "reason": reason}
        for kind, reason in zip(kinds, loaded.problems, strict=True)
    ]


def notes_of(steps: Iterable[tuple[str, int, str | None]]) -> list[tuple[str, str]]:
    """``(steps in words, note)`` for each note once, given the phase, the size and the note of every step.

    A spent budget leaves a note at a dozen steps: that is one line, ``prefill 1024 512 256``.
    """
    sizes: dict[str, dict[str, list[str]]] = {}
    for phase, num_tokens, note in steps:
        if note:
            sizes.setdefault(note, {}).setdefault(phase, []).append(str(num_tokens))
    return [
        (", ".join(f"{phase} {' '.join(numbers)}" for phase, numbers in found.items()), note)
        for note, found in sizes.items()
    ]


def read_report(path: Path) -> dict[str, Any]:
    """The document at ``path``: a report file, or a directory whose newest report is taken.

    Raises:
        ValueError: there is none, or it is not one that this version reads; the file is named.
    """
    if path.is_dir():
        path = newest_report(path)
    document = read_json_object(path)
    if not isinstance(document.get("steps"), list):
        raise ValueError(f"{path} is not an autotune report (a record file? see `sglang autotune show`)")
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has report schema {document.get('schema')!r}; this version reads {SCHEMA}: tune again"
        )
    return document


def newest_report(directory: Path) -> Path:
    """The most recent ``report.json`` at or below ``directory``; `ValueError` when there is none."""
    found = [path for path in directory.rglob(REPORT_NAME) if path.is_file()]
    if not found:
        raise ValueError(f"there is no {REPORT_NAME} in or below {directory}")
    return max(found, key=lambda path: path.stat().st_mtime)


def capacities_at_default(megamoe: Mapping[str, Any] | None) -> list[int]:
    """Capacities that have no winner, of what stands under ``megamoe`` in a report."""
    winners = {} if megamoe is None else megamoe["winners"]
    return sorted(int(capacity) for capacity, winner in winners.items() if winner["source"] == "default")
