"""Which stored records the in-tree ops of this engine could serve with: the runner is here and has such a tactic.

A record that they could not serve with must not stand over one that they could, so each source is looked through before
the sources are merged. Ops of FlashInfer's own are not judged: their runners exist only inside a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.autotune.records.record import Record, RecordKey, describe_tactic, parsed_key

#: Tactics of one runner that are named; the rest is counted.
_MAX_NAMED = 3


@dataclass(frozen=True)
class Unusable:
    """Records of one op that are not used, all for one reason."""

    op_name: str
    reason: str
    keys: tuple[str, ...]


def sort_out(records: Mapping[str, Record], ops: Sequence[Any]) -> tuple[dict[str, Record], list[Unusable]]:
    """The records that ``ops`` could serve with, or do not know; and the others, with a reason for each kind."""
    runners = {op.name: {type(runner).__name__: runner for runner in op.runners} for op in ops}
    kept: dict[str, Record] = {}
    strangers: dict[tuple[str, str], list[Record]] = {}
    without_tactic: dict[tuple[str, str], list[Record]] = {}
    for key, record in records.items():
        parsed = parsed_key(key)
        if parsed is None or parsed.custom_op not in runners:
            kept[key] = record
            continue
        runner = runners[parsed.custom_op].get(parsed.runner)
        group = (parsed.custom_op, parsed.runner)
        if runner is None:
            strangers.setdefault(group, []).append(record)
        elif not _has_tactic(runner, parsed, record.tactic):
            without_tactic.setdefault(group, []).append(record)
        else:
            kept[key] = record
    unusable = []
    for (op_name, name), group_records in strangers.items():
        words = f"{_count(group_records)} {name}, which is no runner of {op_name} here"
        unusable.append(_unusable(op_name, words, group_records))
    for (op_name, name), group_records in without_tactic.items():
        tactics = list(dict.fromkeys(describe_tactic(record.tactic) for record in group_records))
        named = "; ".join(tactics[:_MAX_NAMED]) + ("; ..." if len(tactics) > _MAX_NAMED else "")
        words = f"{_count(group_records)} a tactic that {name} of {op_name} does not have here ({named})"
        unusable.append(_unusable(op_name, words, group_records))
    return kept, unusable


def _unusable(op_name: str, reason: str, records: Iterable[Record]) -> Unusable:
    return Unusable(op_name, reason, tuple(record.key for record in records))


def _count(records: Sequence[Record]) -> str:
    return f"{len(records)} record names" if len(records) == 1 else f"{len(records)} records name"


def _has_tactic(runner: Any, key: RecordKey, tactic: Any) -> bool:
    """Whether a lookup at the record's own bucket would accept the tactic, as far as shapes tell."""
    validate = getattr(runner, "validate_tactic", None)
    if validate is None:
        return True
    try:
        inputs = [torch.empty(shape, device="meta") for shape in key.profile]
        return bool(validate(inputs, tactic))
    except Exception:  # shapes that are none: the lookup asks again, if it ever finds this record
        return True
