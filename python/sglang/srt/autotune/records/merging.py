"""From seeds, the user's file and what was given on purpose to the one set of records that a start loads.

Later wins: seeds, then the user's file, then given files; a question has one record, whichever runner it names
(`record.question_of`). A pinned record of the user's file stands against
everything but a given one. FlashInfer replaces all namespaces with every file that it loads, so the sources are
merged here and loaded once, from a scratch file that carries this environment's stamp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from sglang.srt.autotune.records.document import records_from_entries, to_bytes
from sglang.srt.autotune.records.files import replace_file
from sglang.srt.autotune.records.record import (
    Policy,
    Record,
    RecordSet,
    StepEntry,
    bucket_in,
    by_question,
    parse_key,
    parsed_key,
    question_of,
)

#: ``(custom_op, runner) -> policy``: how the op would be timed now; None when that is not known.
PolicyFor: TypeAlias = Callable[[str, str], Policy | None]


@dataclass(frozen=True)
class Overridden:
    """A record that yielded to another one with the same question and a different choice."""

    kept: Record
    dropped: Record

    def words(self) -> str:
        kept, dropped = str(self.kept.tactic), str(self.dropped.tactic)
        if self.kept.runner != self.dropped.runner:
            kept, dropped = f"{self.kept.runner} {kept}", f"{self.dropped.runner} {dropped}"
        return (
            f"{self.kept.source} record {kept} stands over {self.dropped.source} record "
            f"{dropped} for {self.kept.key}"
        )


@dataclass(frozen=True)
class MergedRecords(RecordSet):
    """The result of :func:`merge_sources`. Each record's ``source`` is the kind of place that it came from."""

    overridden: tuple[Overridden, ...] = field(default=())

    def count_by_source(self) -> dict[str, int]:
        """How many records each kind of source contributed; ``seed``, ``user`` and ``given`` are always there."""
        counts = Counter(record.source for record in self.records.values())
        return {source: counts[source] for source in ("seed", "user", "given")}

    def count_of_other_ops(self, op_names: Collection[str]) -> dict[tuple[str, str], int]:
        """How many records there are by source and op, for ops that are none of ``op_names``."""
        keys = ((record.source, parsed_key(key)) for key, record in self.records.items())
        return Counter(
            (source, key.custom_op) for source, key in keys if key and key.custom_op not in op_names
        )

    def without_buckets(self, buckets: Collection[int], keep: Collection[str] = ()) -> MergedRecords:
        """The same without the records of these token buckets, except the keys in ``keep``.

        For buckets that the ranks tune together: ``keep`` may name only what all of them hold, such as a file
        that was given to all.
        """
        kept = {
            key: record
            for key, record in self.records.items()
            if key in keep or bucket_in(key) not in buckets
        }
        return replace(self, records=kept)

    def new_in(self, entries: Mapping[str, Any]) -> list[Record]:
        """What tuning added to these records, as records to commit.

        ``entries`` is what FlashInfer holds or saved, ``{key: [runner, tactic, policy?]}``, loaded records
        included; those that still say what was loaded are left out, whatever their policy.
        """
        fresh = []
        for key, record in records_from_entries(entries).items():
            loaded = self.records.get(key)
            if loaded is None or not record.same_choice(loaded):
                fresh.append(record.with_source("tuned"))
        return fresh


def merge_sources(
    seeds: Sequence[RecordSet] = (), user: RecordSet | None = None, given: Sequence[RecordSet] = ()
) -> MergedRecords:
    """Merge in the order of precedence; of several seeds or given files the later wins.

    Every input has passed its environment check. Pins of seeds count for nothing. Namespaces are merged entry
    by entry in the same order, and the steps that records are known to cover likewise.
    """
    # By question: of two runners' records for one, the tuner might take the lesser.
    merged: dict[str, Record] = {}
    overridden: list[Overridden] = []
    namespaces: dict[str, dict[str, Any]] = {}
    steps: dict[str, StepEntry] = {}
    layers = [("seed", seed) for seed in seeds]
    layers += [("user", user)] if user is not None else []
    layers += [("given", file) for file in given]
    for source, layer in layers:
        ours = {
            key: replace(record, source=source, pinned=record.pinned and source != "seed")
            for key, record in layer.records.items()
        }
        answers = by_question(ours.values())
        for record in ours.values():
            kept = answers[question_of(record.key)]
            if kept is not record:
                overridden.append(Overridden(kept=kept, dropped=record))
        for question, record in answers.items():
            present = merged.get(question)
            # Only given records can meet a pinned one here, and a pin yields to what was given this time.
            if present is not None and not present.same_choice(record):
                overridden.append(Overridden(kept=record, dropped=present))
            merged[question] = record
        for name, entries in layer.namespaces.items():
            namespaces.setdefault(name, {}).update(entries)
        steps.update(layer.steps)
    records = {record.key: record for record in merged.values()}
    return MergedRecords(records, namespaces, steps, tuple(overridden))


def materialise(
    merged: RecordSet,
    metadata: Mapping[str, str],
    path: str | Path,
    policy_for: PolicyFor | None = None,
) -> Path:
    """Write the scratch file for one ``load_configs``; returns its path.

    ``metadata`` is this process's own stamp: the sources were checked, so the file belongs here. In tuning mode
    FlashInfer accepts a stored record only if its policy is the op's own; ``policy_for`` names that, and it is
    attached to every record that was seeded, given or pinned (they stand, however they were measured) and to
    those that carry none. What tuning measured under another policy keeps it and is measured again.
    """
    records = {key: _with_policy(record, policy_for) for key, record in merged.records.items()}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, to_bytes(RecordSet(records, merged.namespaces), metadata), durable=False)
    return target


def _with_policy(record: Record, policy_for: PolicyFor | None) -> Record:
    stands = record.pinned or record.source in ("seed", "given")
    if policy_for is None or not (stands or record.policy is None):
        return record
    try:
        policy = policy_for(parse_key(record.key).custom_op, record.runner)
    except ValueError:
        return record  # not a key of FlashInfer's form: it can never be looked up
    return record if policy is None else replace(record, policy=policy)
