"""MegaMoE winners in the record file: what the kernel's knob cache would hold, under a namespace of its own.

The payload is the knob-cache entry as the installed FlashInfer wrote it, so that a start can hand it back unchanged.
A stored payload is trusted for nothing: it must name this kernel, this geometry and this capacity, and knobs that
the kernel accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.autotune.megamoe.kernels.base import Knobs, MegaMoEKernel

NAMESPACE = "flashinfer_megamoe"


@dataclass(frozen=True)
class Winner:
    """The choice for one capacity.

    `entry` is the knob-cache entry (None: the kernel's default, not stored) with its format `version`. `source` is
    tuned, cached (a stored record), kept (already open in this process) or default.
    """

    capacity: int
    knobs: Knobs | None
    source: str
    entry: Mapping[str, Any] | None = None
    version: int = 1
    time_us: float | None = None
    default_us: float | None = None
    note: str | None = None


def key_of(kernel: MegaMoEKernel, capacity: int) -> str:
    """The record's name: kernel, geometry and capacity."""
    fields = {**kernel.entry_fields(), "max_tokens": capacity}
    if kernel.variant:
        fields["variant"] = kernel.variant
    return "|".join([kernel.name, *(f"{name}={value}" for name, value in fields.items())])


def to_payload(kernel: MegaMoEKernel, winner: Winner) -> dict[str, Any]:
    assert winner.entry is not None
    payload = {"kernel": kernel.name, "version": winner.version, "entry": dict(winner.entry)}
    return payload if winner.default_us is None else {**payload, "default_us": winner.default_us}


def from_payload(kernel: MegaMoEKernel, capacity: int, payload: Any) -> Winner:
    """The winner that a stored payload holds; ValueError with the reason when it cannot be used."""
    if not isinstance(payload, dict) or not isinstance(payload.get("entry"), dict):
        raise ValueError("it holds no knob-cache entry")
    entry, version = payload["entry"], payload.get("version")
    if payload.get("kernel") != kernel.name:
        raise ValueError(f"it belongs to kernel {payload.get('kernel')!r}")
    if type(version) is not int or version < 1:
        raise ValueError("its format version is not a number")
    for name, value in {**kernel.entry_fields(), "max_tokens": capacity}.items():
        if entry.get(name) != value:
            raise ValueError(f"its {name} is {entry.get(name)!r}, not {value!r}")
    knobs = kernel.check_knobs(entry.get("knobs"))
    return Winner(
        capacity,
        knobs,
        "cached",
        entry,
        version,
        _microseconds(entry.get("p50_us")),
        _microseconds(payload.get("default_us")),
    )


def read_winners(
    kernel: MegaMoEKernel, capacities: Sequence[int], namespace: Mapping[str, Any]
) -> tuple[dict[int, Winner], list[dict[str, str]]]:
    """The usable winners by capacity, and each rejected record with its reason."""
    winners: dict[int, Winner] = {}
    rejected = []
    for capacity in capacities:
        key = key_of(kernel, capacity)
        if key in namespace:
            try:
                winners[capacity] = from_payload(kernel, capacity, namespace[key])
            except (ValueError, TypeError) as error:
                rejected.append({"key": key, "reason": str(error)})
    return winners, rejected


def _microseconds(value: Any) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9
    return float(value) if usable else None
