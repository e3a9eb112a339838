"""FlashInfer's knob cache, read and written in its own format.

`{"version": 1, "entries": [{<key fields>, "max_tokens": 8, "knobs": {...}, "p50_us": 42.0, ...}]}`: one entry per
geometry and capacity. A lookup takes the exact capacity, else the smallest above it, else the largest below.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.autotune.megamoe.env_guard import KNOB_CACHE_VARIABLE
from sglang.srt.autotune.records.document import read_json_object
from sglang.srt.autotune.records.files import replace_file

VERSION = 1
_OFF_WORDS = ("0", "off", "none", "disable", "disabled")


def knob_file_path() -> Path | None:
    """The file that the variable names, FlashInfer's default without it, None where it says off."""
    text = os.environ.get(KNOB_CACHE_VARIABLE, "")
    if text.strip().lower() in _OFF_WORDS:
        return None
    return Path(os.path.expanduser(text or "~/.cache/flashinfer/moe_ep_knob_cache.json"))


def read_entries(path: Path | None) -> list[dict[str, Any]]:
    """All entries of any version; a file that cannot be read has none."""
    if path is None:
        return []
    try:
        entries = read_json_object(path).get("entries")
    except ValueError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def entry_at(path: Path | None, fields: Mapping[str, Any], capacity: int) -> dict[str, Any] | None:
    """The entry of exactly this capacity; the last one where a newer format keeps several."""
    matches = [entry for entry in _matching(path, fields) if entry["max_tokens"] == capacity]
    return matches[-1] if matches else None


def lookup(path: Path | None, fields: Mapping[str, Any], capacity: int) -> dict[str, Any] | None:
    """Knobs by FlashInfer's rule, lists turned into tuples; None when no entry matches the key fields."""
    matches = _matching(path, fields)
    if not matches:
        return None
    above = [entry for entry in matches if entry["max_tokens"] >= capacity]
    best = min(above, key=lambda e: e["max_tokens"]) if above else max(matches, key=lambda e: e["max_tokens"])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in best["knobs"].items()}


def version_of(path: Path) -> int:
    """The file's format version; ours where it has none."""
    try:
        version = read_json_object(path).get("version")
    except ValueError:
        return VERSION
    return version if isinstance(version, int) else VERSION


def restore(path: Path, entries: Sequence[Mapping[str, Any]], version: int) -> None:
    """Add entries as they were once read, under the version that they came from."""
    _replace(path, [*read_entries(path), *map(dict, entries)], version)


def record(
    path: Path,
    fields: Mapping[str, Any],
    capacity: int,
    knobs: Mapping[str, Any],
    p50_us: float | None,
    source: str,
) -> None:
    """Replace the entry of this key and capacity; the file is replaced as a whole."""
    kept = [
        entry
        for entry in read_entries(path)
        if entry.get("max_tokens") != capacity or any(entry.get(name) != fields[name] for name in fields)
    ]
    entry = {
        **fields,
        "max_tokens": capacity,
        "knobs": {name: list(value) if isinstance(value, tuple) else value for name, value in knobs.items()},
        "p50_us": p50_us,
        "source": source,
        "tuned_at": datetime.datetime.now().isoformat(timespec="seconds"),
    }
    _replace(path, [*kept, entry], VERSION)


def _replace(path: Path, entries: Sequence[Mapping[str, Any]], version: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"version": version, "entries": list(entries)}, indent=1)
    replace_file(path, content.encode(), durable=False)


def _matching(path: Path | None, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        entry
        for entry in read_entries(path)
        if all(entry.get(name) == value for name, value in fields.items())
        and isinstance(entry.get("knobs"), dict)
        and isinstance(entry.get("max_tokens"), int)
    ]
