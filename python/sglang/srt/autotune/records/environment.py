"""Where records were measured, and whether that is here.

FlashInfer stamps a file with seven fields, because its tactics are indices into lists that these fields can
reorder. The comparison follows FlashInfer's rules so that what passes here is what ``load_configs`` accepts,
but it runs before anything is loaded and says what differs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT_FIELDS = (
    "flashinfer_version",
    "cuda_version",
    "cublas_version",
    "cudnn_version",
    "cudnn_frontend_version",
    "cutlass_dsl_version",
    "gpu",
)
WILDCARD = "*"
INDETERMINATE = (None, "unknown", "None")

_DIGEST = re.compile(r"([0-9a-f]{8})[0-9a-f]{24,}")
#: Packages of a list that are named one by one; FlashInfer 0.7.4 stamps seven with a digest each.
_MAX_NAMED = 3


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs. ``hard``: the file names another environment; else it does not say which."""

    field: str
    saved: Any
    current: Any
    hard: bool

    def words(self) -> str:
        saved = "not recorded" if self.saved is None else str(self.saved)
        if isinstance(self.saved, (list, tuple)):
            saved = " or ".join(str(item) for item in self.saved)
        current = "not known" if self.current is None else str(self.current)
        if ";" in saved and ";" in current:
            saved, current = _apart(saved, current), _apart(current, saved)
        return f"{self.field}: saved {_short(saved)}, current {_short(current)}"


@dataclass(frozen=True)
class EnvironmentComparison:
    """In which fields a file's stamp differs from this process's; `hard` when one of them is."""

    differences: tuple[FieldDifference, ...] = ()

    @property
    def matches(self) -> bool:
        return not self.differences

    @property
    def hard(self) -> bool:
        return any(difference.hard for difference in self.differences)

    def words(self) -> str:
        """``cublas_version: saved 13.1.0, current 13.2.0; ...``; empty when everything matches."""
        return "; ".join(difference.words() for difference in self.differences)


def _apart(value: str, other: str) -> str:
    """What a list of packages, `a==1;b==2`, holds and the other one does not."""
    return ";".join(part for part in value.split(";") if part not in other.split(";")) or "nothing more"


def _short(words: str) -> str:
    """For a line of a log: digests cut to eight digits, the first few packages of a list."""
    parts = _DIGEST.sub(r"\1...", words).split(";")
    more = f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
    return ", ".join(parts[:_MAX_NAMED]) + more


def compare_environment(saved: Any, current: Mapping[str, str]) -> EnvironmentComparison:
    """Compare a file's ``_metadata`` with this process's stamp, by FlashInfer's rules.

    ``"*"`` never differs; equal values match, ``unknown`` with ``unknown`` too; a saved null, ``unknown``,
    ``None`` or missing field is a soft difference; two definite values that differ are a hard one. Anything
    but an object counts as all fields missing. Fields that ``current`` does not track are ignored.
    """
    fields = saved if isinstance(saved, Mapping) else {}
    differences = []
    for name, now in current.items():
        then = fields.get(name)
        if then not in (now, WILDCARD):
            differences.append(FieldDifference(name, then, now, hard=then not in INDETERMINATE))
    return EnvironmentComparison(tuple(differences))


def compare_seed_environment(
    required: Mapping[str, Any], current: Mapping[str, str]
) -> EnvironmentComparison:
    """As :func:`compare_environment`, but a field may list patterns, any of which may match.

    Such as ``["NVIDIA B300*", "NVIDIA GB300*"]`` for ``gpu``. A field that ``current`` lacks never matches.
    """
    differences = []
    for name in ENVIRONMENT_FIELDS:
        wanted, now = required.get(name), current.get(name)
        patterns = wanted if isinstance(wanted, (list, tuple)) else None
        if patterns is not None:
            matches = now is not None and any(fnmatch.fnmatchcase(now, str(item)) for item in patterns)
        else:
            matches = wanted == WILDCARD or (now is not None and wanted == now)
        if not matches:
            hard = patterns is not None or wanted not in INDETERMINATE
            differences.append(FieldDifference(name, wanted, now, hard))
    return EnvironmentComparison(tuple(differences))


def cpu_model_name() -> str:
    """The CPU's model, which stands for the GPU's name where FlashInfer's stamp says only ``unknown``."""
    with contextlib.suppress(OSError):  # not Linux: the platform module answers below
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")) and ":" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"
