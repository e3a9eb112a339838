"""Seeds: measured records that ship as data, chosen by what they apply to and never loaded anywhere else.

A seed says for which engine configuration it was measured (``applies``), in which environment and how
(``provenance``, for people). All of it is compared before anything is loaded, because FlashInfer itself would
apply a wrong record without a word and a tactic of another FlashInfer build can fail in the middle of a forward.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.autotune.records.document import (
    plain_namespaces,
    printable,
    read_json_object,
    records_from_entries,
    steps_from_json,
    steps_to_json,
)
from sglang.srt.autotune.records.environment import (
    ENVIRONMENT_FIELDS,
    FieldDifference,
    compare_seed_environment,
)
from sglang.srt.autotune.records.files import replace_file
from sglang.srt.autotune.records.record import RecordSet

logger = logging.getLogger(__name__)

SEED_SCHEMA = 1
BUILTIN_SEEDS = Path(__file__).with_name("seeds")


#: A seed that differs in one of these is for another model: nobody would expect it to fit.
_MODEL_FIELDS = frozenset({"model_type", "hidden_size"})


@dataclass(frozen=True)
class Seed(RecordSet):
    """One seed file. ``applies`` and ``environment`` hold a plain value, ``"*"`` or a list of choices per field."""

    name: str = ""
    applies: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SeedSelection:
    """``chosen`` seeds, and ``refused`` near-matches: ``(seed name, reasons in words)``."""

    chosen: tuple[Seed, ...] = ()
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()


class SeedCatalogue:
    """The seeds of a directory, read once. A file that is no seed is left out with a warning."""

    def __init__(self, directory: str | os.PathLike[str] = BUILTIN_SEEDS):
        self.directory = Path(directory)
        self.seeds: tuple[Seed, ...] = tuple(self._read())

    def _read(self) -> Iterator[Seed]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                yield read_seed(path)
            except ValueError as error:
                logger.warning("FlashInfer autotune ignores a seed: %s", error)

    def select(self, applies: Mapping[str, Any], environment: Mapping[str, str]) -> SeedSelection:
        """Pick the seeds that were measured for exactly this configuration and environment.

        ``applies`` describes the engine with the names that seeds use, nested objects for groups such as
        ``geometry``; fields that a seed does not mention do not matter. A seed for the same model that does not fit
        is refused in words (field, saved, current); seeds for other models, or another size of it, are passed over.
        """
        chosen, refused = [], []
        for seed in self.seeds:
            reasons = _differences(seed.applies, applies)
            if any(name in _MODEL_FIELDS for name, _ in reasons):
                continue
            words = [text for _, text in reasons]
            words += [
                item.words() for item in compare_seed_environment(seed.environment, environment).differences
            ]
            if words:
                refused.append((seed.name, tuple(words)))
            else:
                chosen.append(seed)
        return SeedSelection(tuple(chosen), tuple(refused))


def read_seed(path: str | os.PathLike[str]) -> Seed:
    """Read one seed file; ``ValueError`` naming the file when any part of it is not as it should be.

    Unlike a user's file a seed is shipped and reviewed: one bad entry makes the whole seed suspect.
    """
    name = os.fspath(path)
    content = read_json_object(name)
    if content.get("schema") != SEED_SCHEMA:
        raise ValueError(f"{name}: schema {content.get('schema')!r} is not {SEED_SCHEMA}")
    parts: dict[str, dict[str, Any]] = {}
    for part in ("applies", "environment", "provenance", "records"):
        value = content.get(part)
        if not isinstance(value, dict):
            raise ValueError(f"{name}: {part!r} is missing or not an object")
        parts[part] = value
    if not isinstance(parts["applies"].get("model_type"), str):
        raise ValueError(f"{name}: 'applies' names no model_type")
    if missing := [field_name for field_name in ENVIRONMENT_FIELDS if field_name not in parts["environment"]]:
        raise ValueError(f"{name}: 'environment' lacks {', '.join(missing)}; \"*\" stands for any value")
    records = records_from_entries(parts["records"], source="seed")
    if bad := sorted(parts["records"].keys() - records.keys()):
        raise ValueError(f"{name}: no usable record: {printable(bad[0])}")
    namespaces = content.get("namespaces", {})
    if not isinstance(namespaces, dict):
        raise ValueError(f"{name}: 'namespaces' is not an object")
    try:
        namespaces = plain_namespaces(namespaces)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Seed(
        records=records,
        namespaces=namespaces,
        steps=steps_from_json(content.get("steps")),
        name=str(content.get("name") or Path(name).stem),
        applies=parts["applies"],
        environment=parts["environment"],
        provenance=parts["provenance"],
    )


def write_seed(seed: Seed, path: str | os.PathLike[str]) -> None:
    """Write a seed file that :func:`read_seed` reads."""
    content = {
        "schema": SEED_SCHEMA,
        "name": seed.name,
        "applies": dict(seed.applies),
        "environment": dict(seed.environment),
        "provenance": dict(seed.provenance),
        "records": {key: seed.records[key].to_json_entry() for key in sorted(seed.records)},
        "namespaces": {name: dict(entries) for name, entries in seed.namespaces.items()},
        "steps": steps_to_json(seed.steps),
    }
    replace_file(Path(path), (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _differences(
    required: Mapping[str, Any], actual: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, str]]:
    """``(field, words)`` for every field of ``required`` that ``actual`` does not satisfy."""
    found: list[tuple[str, str]] = []
    for name, wanted in required.items():
        where, have = prefix + name, actual.get(name)
        if isinstance(wanted, Mapping):
            found += _differences(wanted, have if isinstance(have, Mapping) else {}, where + ".")
        elif wanted != "*" and not _fits(name, wanted, have):
            found.append((where, FieldDifference(where, wanted, have, hard=True).words()))
    return found


def _fits(name: str, wanted: Any, have: Any) -> bool:
    choices = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    return any(_canonical(name, choice) == _canonical(name, have) for choice in choices)


def _canonical(name: str, value: Any) -> Any:
    """``sm_103`` is ``sm103``, ``torch.bfloat16`` is ``bfloat16``; True is not 1."""
    if isinstance(value, str):
        value = value.removeprefix("torch.")
        return value.lower().replace("_", "") if name == "sm" else value
    return (type(value).__name__, value) if isinstance(value, bool) else value
