"""The record file as a value: FlashInfer's own format, read without trust and written without surprises.

A file holds ``_metadata`` (the environment stamp), ``_records`` (namespaced records of kernels that tune
themselves), one entry ``"<key>": [runner, tactic, policy?]`` per winner and ``_generation`` (a digest of the
rest). FlashInfer, and engines that let it write the file, read what is written here, and the reverse.

What FlashInfer has no place for (when a record was tuned, how fast, whether it is pinned, which records a
step asked for) lives under ``_metadata["sglang"]``. FlashInfer ignores fields of ``_metadata`` that it does
not know and keeps the metadata that it finds on disk when it merges into a file. A namespace of ``_records``
would also survive, but there its older copy in memory wins over a newer one on disk. Any other top-level key
would be read as a bogus winner.

Reading never raises for what a file holds: a file that cannot be used is a :class:`RejectedFile`, a bad entry
costs that entry and is listed with its reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.autotune.records.record import (
    SOURCES,
    Record,
    RecordSet,
    StepEntry,
    policy_from_json,
    tactic_from_json,
    tactic_to_json,
)

METADATA_KEY = "_metadata"
NAMESPACES_KEY = "_records"
GENERATION_KEY = "_generation"
ANNOTATIONS_KEY = "sglang"
ANNOTATIONS_SCHEMA = 1

#: A start's own file has hundreds of entries and some 100 KB. Beyond these bounds a file would cost a start seconds and
#: hundreds of megabytes, again at every step.
MAX_FILE_BYTES = 16 * 2**20
MAX_ENTRIES = 20_000
MAX_KEY_LENGTH = 64 * 1024
MAX_JSON_DEPTH = 64


@dataclass(frozen=True)
class RejectedFile:
    """A file that cannot be used as a whole. ``slug`` is a short name of the reason for a file name."""

    path: str
    reason: str
    slug: str


@dataclass(frozen=True)
class RejectedRecord:
    """One entry that was left out of a file that is otherwise used."""

    key: str
    reason: str


@dataclass(frozen=True)
class Document(RecordSet):
    """A parsed file. ``metadata`` is None when the file has none; it does not hold our annotations.

    ``generation`` is what the file says of itself; ``edited`` tells whether its content differs from that.
    """

    metadata: Mapping[str, Any] | None = None
    rejected: tuple[RejectedRecord, ...] = ()
    generation: str | None = None
    edited: bool = field(default=False, compare=False)


def read_document(
    path: str | os.PathLike[str], *, check_generation: bool = False
) -> Document | RejectedFile | None:
    """Read a record file; None when there is none. Raises nothing for any content or kind of file."""
    name = os.fspath(path)
    data = _read_bytes(name)
    if not isinstance(data, bytes):
        return data
    return parse_document(data, name, check_generation=check_generation)


def parse_document(data: bytes, name: str, *, check_generation: bool = False) -> Document | RejectedFile:
    """Parse a file's bytes; ``name`` is used in reasons only."""
    content = _parse_object(data, name)
    if isinstance(content, RejectedFile):
        return content
    if _count_entries(content) > MAX_ENTRIES:
        return RejectedFile(name, f"has more than {MAX_ENTRIES} entries", "too-many")
    return _document_from(content, check_generation)


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read any JSON object with the same bounds; ``ValueError`` naming the file when that cannot be done."""
    name = os.fspath(path)
    data = _read_bytes(name)
    if data is None:
        raise ValueError(f"{name} does not exist")
    content = data if isinstance(data, RejectedFile) else _parse_object(data, name)
    if isinstance(content, RejectedFile):
        raise ValueError(f"{name} {content.reason}")
    return content


def _read_bytes(name: str) -> bytes | RejectedFile | None:
    try:
        # O_NONBLOCK: opening a FIFO that someone left there must not hang a start.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return RejectedFile(name, f"cannot be opened: {_os_reason(error)}", "unreadable")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return RejectedFile(name, "is not a regular file", "not-a-file")
        if status.st_size > MAX_FILE_BYTES:
            return RejectedFile(name, f"is larger than {MAX_FILE_BYTES // 2**20} MiB", "too-large")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return RejectedFile(name, f"cannot be read: {_os_reason(error)}", "unreadable")
    finally:
        os.close(descriptor)


def _parse_object(data: bytes, name: str) -> dict[str, Any] | RejectedFile:
    if len(data) > MAX_FILE_BYTES:
        return RejectedFile(name, f"is larger than {MAX_FILE_BYTES // 2**20} MiB", "too-large")
    if not data.strip(b" \t\r\n\0"):
        return RejectedFile(name, "is empty", "empty")
    try:
        content = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        return RejectedFile(name, "is not UTF-8 text", "not-text")
    except json.JSONDecodeError as error:
        return RejectedFile(name, f"is not valid JSON (truncated?): {error}", "not-json")
    except ValueError as error:  # an integer with more digits than Python converts
        return RejectedFile(name, f"is not usable JSON: {error}", "not-json")
    except (RecursionError, MemoryError):
        return RejectedFile(name, "is nested too deeply", "too-deep")
    if not isinstance(content, dict):
        return RejectedFile(name, f"holds a JSON {type(content).__name__}, not an object", "not-an-object")
    return content


def _count_entries(content: dict[str, Any]) -> int:
    namespaces = content.get(NAMESPACES_KEY)
    groups = namespaces.values() if isinstance(namespaces, dict) else ()
    return len(content) + sum(len(group) for group in groups if isinstance(group, dict))


def _document_from(content: dict[str, Any], check_generation: bool) -> Document:
    rejected: list[RejectedRecord] = []
    edited = check_generation and GENERATION_KEY in content and not _generation_holds(content)
    generation = content.pop(GENERATION_KEY, None)
    has_metadata = METADATA_KEY in content
    raw_metadata = content.pop(METADATA_KEY, None)
    metadata: dict[str, Any] | None = None
    annotations: Any = None
    if isinstance(raw_metadata, dict):
        metadata = {key: value for key, value in raw_metadata.items() if _is_plain(value)}
        annotations = raw_metadata.get(ANNOTATIONS_KEY)
        metadata.pop(ANNOTATIONS_KEY, None)
    elif has_metadata:
        rejected.append(RejectedRecord(METADATA_KEY, "is not an object"))
    namespaces = _parse_namespaces(content.pop(NAMESPACES_KEY, None), rejected)
    notes = (
        annotations
        if isinstance(annotations, dict) and annotations.get("schema") == ANNOTATIONS_SCHEMA
        else {}
    )
    record_notes = notes.get("records")
    if not isinstance(record_notes, dict):
        record_notes = {}
    records: dict[str, Record] = {}
    for key, value in content.items():
        try:
            records[key] = _parse_record(key, value, record_notes.get(key))
        except ValueError as error:
            rejected.append(RejectedRecord(printable(key), str(error)))
    return Document(
        records=records,
        namespaces=namespaces,
        steps=steps_from_json(notes.get("steps")),
        metadata=metadata,
        rejected=tuple(rejected),
        generation=generation if isinstance(generation, str) else None,
        edited=edited,
    )


def _parse_record(key: str, value: Any, note: Any) -> Record:
    if key.startswith("_"):
        raise ValueError("the name is reserved by FlashInfer and means nothing here")
    if len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise ValueError("the key is too long or not printable")
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("the value is not a list of runner, tactic and policy")
    runner = value[0]
    if not isinstance(runner, str) or not runner or len(runner) > 512 or not runner.isprintable():
        raise ValueError("the runner is not a name")
    if f", '{runner}', " not in key:
        raise ValueError(f"the key is not one of runner {runner}")
    tactic = tactic_from_json(value[1])
    if runner.startswith("Cudnn") and isinstance(tactic, int) and tactic >= 0:
        raise ValueError("FlashInfer ignores integer plan indices of cuDNN runners")
    policy = policy_from_json(value[2]) if len(value) > 2 and value[2] is not None else None
    # A note speaks of one tactic: when another writer has replaced the winner, it no longer applies.
    if not isinstance(note, dict) or note.get("tactic") != value[1]:
        return Record(key, runner, tactic, policy)
    source = note.get("source")
    return Record(
        key,
        runner,
        tactic,
        policy,
        pinned=note.get("pinned") is True,
        source=source if source in SOURCES else "user",
        tuned_at=_text(note.get("tuned_at")),
        default_ms=_milliseconds(note.get("default_ms")),
        tuned_ms=_milliseconds(note.get("tuned_ms")),
    )


def records_from_entries(entries: Mapping[str, Any], source: str = "user") -> dict[str, Record]:
    """FlashInfer entries ``{key: [runner, tactic, policy?]}`` as records; what is no usable entry is left out."""
    records: dict[str, Record] = {}
    for key, value in entries.items():
        with contextlib.suppress(ValueError):
            records[key] = _parse_record(key, value, None).with_source(source)
    return records


def unreadable_reason(record: Record) -> str | None:
    """Why this record would not be read back from a file; None when it would."""
    try:
        _parse_record(record.key, record.to_json_entry(), None)
    except ValueError as error:
        return str(error)
    return None


def plain_namespaces(namespaces: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The namespaces as they will be read back from a file; ``ValueError`` when something would not be."""
    rejected: list[RejectedRecord] = []
    try:
        plain = _parse_namespaces(json.loads(json.dumps(namespaces, allow_nan=False)), rejected)
    except TypeError as error:
        raise ValueError(f"namespaced records must be plain JSON: {error}") from error
    if rejected:
        raise ValueError(f"namespaced records cannot be stored: {rejected[0].key}: {rejected[0].reason}")
    return {name: entries for name, entries in plain.items() if entries}


def _parse_namespaces(value: Any, rejected: list[RejectedRecord]) -> dict[str, dict[str, Any]]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        rejected.append(RejectedRecord(NAMESPACES_KEY, "is not an object"))
        return {}
    namespaces: dict[str, dict[str, Any]] = {}
    for name, entries in value.items():
        where = f"{NAMESPACES_KEY}[{printable(name)}]"
        if not name or name.startswith("_") or not name.isprintable():
            rejected.append(RejectedRecord(where, "the namespace has no public name"))
        elif not isinstance(entries, dict):
            rejected.append(RejectedRecord(where, "is not an object"))
        else:
            namespaces[name] = {key: entry for key, entry in entries.items() if _is_plain(entry)}
            for key in entries.keys() - namespaces[name].keys():
                reason = "is nested too deeply or holds a number that is not finite"
                rejected.append(RejectedRecord(f"{where}[{printable(key)}]", reason))
    return namespaces


def steps_from_json(value: Any) -> dict[str, StepEntry]:
    """The steps of a file or seed; entries that are none are left out."""
    steps: dict[str, StepEntry] = {}
    for name, entry in value.items() if isinstance(value, dict) else ():
        keys = entry.get("keys") if isinstance(entry, dict) else None
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            steps[name] = StepEntry(
                name,
                tuple(keys),
                default_ms=_milliseconds(entry.get("default_ms")),
                tuned_ms=_milliseconds(entry.get("tuned_ms")),
                tuned_at=_text(entry.get("tuned_at")),
            )
    return steps


def to_json_object(content: RecordSet, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The file's JSON object, ``_generation`` included, computed exactly as FlashInfer does."""
    ordered: dict[str, Any] = {}
    notes = _annotations(content)
    if metadata is not None or notes:
        ordered[METADATA_KEY] = {**(metadata or {}), **({ANNOTATIONS_KEY: notes} if notes else {})}
    namespaces = {name: dict(entries) for name, entries in content.namespaces.items() if entries}
    if namespaces:
        ordered[NAMESPACES_KEY] = namespaces
    for key in sorted(content.records):
        ordered[key] = content.records[key].to_json_entry()
    ordered[GENERATION_KEY] = _generation(ordered)
    return ordered


def to_bytes(content: RecordSet, metadata: Mapping[str, Any] | None) -> bytes:
    return json.dumps(to_json_object(content, metadata), indent=2, allow_nan=False).encode()


def _generation(content: Mapping[str, Any]) -> str:
    source = {key: value for key, value in content.items() if key != GENERATION_KEY}
    return hashlib.sha256(json.dumps(source, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _generation_holds(content: Mapping[str, Any]) -> bool:
    try:
        return bool(content[GENERATION_KEY] == _generation(content))
    except RecursionError:
        return False


def steps_to_json(steps: Mapping[str, StepEntry]) -> dict[str, Any]:
    return {
        name: _without_none(
            keys=list(step.keys), default_ms=step.default_ms, tuned_ms=step.tuned_ms, tuned_at=step.tuned_at
        )
        for name, step in sorted(steps.items())
    }


def _annotations(content: RecordSet) -> dict[str, Any]:
    records = {key: note for key in sorted(content.records) if (note := _record_note(content.records[key]))}
    steps = steps_to_json(content.steps)
    if not records and not steps:
        return {}
    return {"schema": ANNOTATIONS_SCHEMA, "records": records, "steps": steps}


def _record_note(record: Record) -> dict[str, Any]:
    note = _without_none(
        source=record.source if record.source != "user" else None,
        pinned=True if record.pinned else None,
        tuned_at=record.tuned_at,
        default_ms=record.default_ms,
        tuned_ms=record.tuned_ms,
    )
    return {"tactic": tactic_to_json(record.tactic), **note} if note else {}


def printable(text: str, limit: int = 200) -> str:
    """``text`` safe for a terminal and a log line."""
    clean = text if text.isprintable() else text.encode("ascii", "backslashreplace").decode()
    clean = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in clean)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= 64 and value.isprintable() else None


def _milliseconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _is_plain(value: Any) -> bool:
    """Whether a JSON value is shallow enough and free of NaN and infinities (iterative, so never too deep)."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return False
        children: Iterable[Any] = (
            item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        )
        for child in children:
            if depth >= MAX_JSON_DEPTH:
                return False
            stack.append((child, depth + 1))
    return True


def _os_reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
