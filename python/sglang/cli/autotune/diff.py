"""`sglang autotune diff`: what two record files choose differently, and how their times compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import (
    add_row,
    bucket_of,
    by_op_and_bucket,
    milliseconds,
    new_table,
    op_of,
    print_json,
    print_table,
    read_records,
    with_step_times,
)
from sglang.srt.autotune.records.document import Document
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, by_question, describe_choice, question_of
from sglang.srt.flags import FlagParser


def parser() -> FlagParser:
    result = FlagParser(
        prog="sglang autotune diff",
        description="Compare two record files. Exit code 0 when they choose the same, 1 when they do not.",
    )
    result.add_argument("old", type=Path, metavar="OLD", help="A record file.")
    result.add_argument("new", type=Path, metavar="NEW", help="The record file to compare with it.")
    result.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return result


def main(argv: Sequence[str]) -> int:
    args = parser().parse_strictly(argv)
    old, new = with_step_times(read_records(args.old)), with_step_times(read_records(args.new))
    changes = list(_record_changes(old, new))
    environment = list(_environment_changes(old, new))
    namespaces = list(_namespace_changes(old.namespaces, new.namespaces))
    if args.json:
        print_json({"environment": environment, "records": changes, "namespaces": namespaces})
    else:
        _print(changes, environment, namespaces, _num_common(old, new))
    return 1 if changes or namespaces else 0


def _record_changes(old: Document, new: Document) -> Iterator[dict[str, Any]]:
    old_answers, new_answers = by_question(old.records.values()), by_question(new.records.values())
    for record in by_op_and_bucket({**old_answers, **new_answers}.values()):
        question = question_of(record.key)
        before, after = old_answers.get(question), new_answers.get(question)
        if before is None or after is None:
            change = "added" if before is None else "removed"
        elif before.same_choice(after):
            continue
        else:
            change = "changed"
        yield {
            "change": change,
            "key": record.key,
            "op": op_of(record),
            "bucket": bucket_of(record),
            "old": _choice(before),
            "new": _choice(after),
            "old_ms": before.tuned_ms if before else None,
            "new_ms": after.tuned_ms if after else None,
        }


def _num_common(old: Document, new: Document) -> int:
    """Questions that both files answer, the keys of namespaces included."""
    both = sum(len({*new.namespaces.get(name, {})} & {*entries}) for name, entries in old.namespaces.items())
    return len(set(map(question_of, old.records)) & set(map(question_of, new.records))) + both


def _choice(record: Record | None) -> str | None:
    return None if record is None else describe_choice(record.runner, record.tactic)


def _environment_changes(old: Document, new: Document) -> Iterator[dict[str, Any]]:
    before, after = old.metadata or {}, new.metadata or {}
    for name in ENVIRONMENT_FIELDS:
        if before.get(name) != after.get(name):
            yield {"field": name, "old": before.get(name), "new": after.get(name)}


def _namespace_changes(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    for name in sorted({*old, *new}):
        before, after = old.get(name, {}), new.get(name, {})
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                change = "added" if key not in before else "removed" if key not in after else "changed"
                yield {"change": change, "namespace": name, "key": key}


def _print(
    changes: list[dict[str, Any]],
    environment: list[dict[str, Any]],
    namespaces: list[dict[str, Any]],
    num_common: int,
) -> None:
    for item in environment:
        print(f"{item['field']}: {item['old'] or 'not recorded'} -> {item['new'] or 'not recorded'}")
    if changes:
        columns = ("change", "op", "bucket", "old", "new", "old ms", "new ms", "time")
        table = new_table("", *columns, right=("bucket", "old ms", "new ms", "time"))
        for item in changes:
            times = milliseconds(item["old_ms"]), milliseconds(item["new_ms"])
            choices = item["old"] or "-", item["new"] or "-"
            add_row(table, item["change"], item["op"], item["bucket"], *choices, *times, _ratio(item))
        print_table(table)
    for item in namespaces:
        print(f"{item['change']} in namespace {item['namespace']}: {item['key']}")
    kinds = [item["change"] for item in (*changes, *namespaces)]
    num_changed, num_added, num_removed = (kinds.count(kind) for kind in ("changed", "added", "removed"))
    print(
        f"{num_common - num_changed} the same, {num_changed} changed, {num_added} added, {num_removed} removed"
    )
    if num_added and num_removed and not num_common:
        print("No key is in both files: they are of different models, dtypes or parallel sizes.")


def _ratio(item: dict[str, Any]) -> str:
    if not item["old_ms"] or not item["new_ms"]:
        return "-"
    return f"{100 * (item['new_ms'] / item['old_ms'] - 1):+.1f}%"
