"""`sglang autotune merge`: one record file from several of the same environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang.cli.autotune.common import (
    print_json,
    read_records,
    refuse_to_overwrite,
    stamp_of,
    with_step_times,
)
from sglang.srt.autotune.records.document import Document, to_bytes
from sglang.srt.autotune.records.environment import FieldDifference
from sglang.srt.autotune.records.files import replace_file
from sglang.srt.autotune.records.record import Record, RecordSet, StepEntry, by_question
from sglang.srt.flags import FlagParser


def parser() -> FlagParser:
    result = FlagParser(
        prog="sglang autotune merge",
        description="Merge record files that were measured in one environment. Pinned records stand.",
    )
    result.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="Record files, two or more.")
    result.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="The file to write.")
    result.add_argument(
        "--prefer",
        choices=("later", "faster"),
        default="later",
        help="Whose record is kept where files differ: the later file's (default), or the one with the lower "
        "measured time, where both have one.",
    )
    result.add_argument("--force", action="store_true", help="Replace OUT when it exists.")
    result.add_argument("--json", action="store_true", help="Print JSON instead of a summary.")
    return result


def main(argv: Sequence[str]) -> int:
    args = parser().parse_strictly(argv)
    if len(args.paths) < 2:
        raise ValueError("name two record files or more")
    refuse_to_overwrite(args.output, args.force)
    documents = [read_records(path) for path in args.paths]
    metadata = _common_stamp(args.paths, documents)
    merged, num_conflicts = _merge(documents, prefer_faster=args.prefer == "faster")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.output, to_bytes(merged, metadata))
    except OSError as error:
        raise ValueError(f"{args.output} cannot be written: {error.strerror or error}") from error
    rejected = sum(len(document.rejected) for document in documents)
    if args.json:
        print_json(
            {
                "output": str(args.output),
                "records": len(merged.records),
                "conflicts": num_conflicts,
                "left_out": rejected,
            }
        )
    else:
        print(
            f"wrote {args.output}: {len(merged.records)} records, {num_conflicts} of which the files disagreed on"
        )
        if rejected:
            print(f"left out {rejected} entries that could not be used; `sglang autotune show` names them")
    return 0


def _common_stamp(paths: Sequence[Path], documents: Sequence[Document]) -> dict[str, str]:
    """The environment that all files name; `ValueError` with the first difference otherwise."""
    first = stamp_of(paths[0], documents[0])
    for path, document in zip(paths[1:], documents[1:], strict=True):
        stamp = stamp_of(path, document)
        different = [
            FieldDifference(name, first[name], stamp[name], hard=True)
            for name in first
            if stamp[name] != first[name]
        ]
        if different:
            words = "; ".join(f"{item.field}: {item.saved} and {item.current}" for item in different)
            raise ValueError(f"{paths[0]} and {path} were measured in different environments ({words})")
    return first


def _merge(documents: Sequence[Document], prefer_faster: bool) -> tuple[RecordSet, int]:
    records: dict[str, Record] = {}  # by question: one of them may have another runner's record in each file
    namespaces: dict[str, dict[str, object]] = {}
    steps: dict[str, StepEntry] = {}
    conflicts = set()
    for document in documents:
        for question, record in by_question(with_step_times(document).records.values()).items():
            present = records.get(question)
            if present is None or present.same_choice(record):
                keeps = present is not None and present.pinned and not record.pinned
                records[question] = present if keeps and present is not None else record
                continue
            conflicts.add(question)
            if _replaces(record, present, prefer_faster):
                records[question] = record
        for name, entries in document.namespaces.items():
            namespaces.setdefault(name, {}).update(entries)
    merged = {record.key: record for record in records.values()}
    for document in documents:
        for name, step in document.steps.items():
            # Its times are of the choices that it names: the file whose choices stand says what they took.
            if name not in steps or all(_stands(document, key, merged) for key in step.keys):
                steps[name] = step
    return RecordSet(merged, namespaces, steps), len(conflicts)


def _stands(document: Document, key: str, merged: Mapping[str, Record]) -> bool:
    """Whether a file's record of this key is what the merged file has."""
    own, kept = document.records.get(key), merged.get(key)
    return own is not None and kept is not None and own.same_choice(kept)


def _replaces(record: Record, present: Record, prefer_faster: bool) -> bool:
    if record.pinned != present.pinned:
        return record.pinned
    if prefer_faster and record.tuned_ms is not None and present.tuned_ms is not None:
        return record.tuned_ms < present.tuned_ms
    return True
