"""`sglang autotune pin`: mark records that tuning must not replace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang.cli.autotune.common import (
    add_selection,
    bucket_of,
    op_of,
    print_json,
    read_records,
    selected,
    stamp_of,
)
from sglang.cli.errors import START_ERROR, report_error
from sglang.srt.autotune.records.record import describe_tactic
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.flags import FlagParser


def parser() -> FlagParser:
    result = FlagParser(
        prog="sglang autotune pin",
        description="Mark records of a file so that tuning neither measures nor replaces them, or lift that.",
    )
    result.add_argument("path", type=Path, metavar="FILE", help="The record file.")
    add_selection(result)
    result.add_argument("--all", action="store_true", help="All records of the file.")
    result.add_argument("--off", action="store_true", help="Lift the mark instead.")
    result.add_argument("--json", action="store_true", help="Print JSON instead of a list.")
    return result


def main(argv: Sequence[str]) -> int:
    args = parser().parse_strictly(argv)
    if not (args.all or args.op is not None or args.bucket is not None):
        raise ValueError("say which records: --op TEXT, --bucket N, or --all")
    document = read_records(args.path)
    chosen = list(selected(document, args.op, args.bucket))
    if not chosen:
        own = "; what a kernel keeps for itself, such as MegaMoE, cannot be pinned" * bool(
            document.namespaces
        )
        raise ValueError(
            f"{args.path} holds no such record; `sglang autotune show {args.path}` lists them{own}"
        )
    store = RecordStore(args.path, stamp_of(args.path, document))
    changed = store.pin([record.key for record in chosen], pinned=not args.off)
    if not store.writable:
        report_error(parser().prog, OSError(f"{args.path} cannot be written: {store.reason}"))
        return START_ERROR
    if args.json:
        keys = [record.key for record in chosen]
        print_json({"path": str(args.path), "pinned": not args.off, "changed": changed, "keys": keys})
        return 0
    done = "not pinned" if args.off else "pinned"
    for record in chosen:
        was = " already" * (record.pinned is not args.off)
        choice = f"tactic {describe_tactic(record.tactic)} of {record.runner}"
        print(f"{op_of(record)} at {bucket_of(record)} tokens, {choice}:{was} {done}")
    return 0
