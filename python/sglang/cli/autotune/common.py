"""What the record commands share: reading files, picking records, tables and JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.autotune.records.document import Document, RejectedFile, printable, read_document
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, RecordKey, StepEntry, parsed_key

if TYPE_CHECKING:
    from rich.table import Table


def read_records(path: Path) -> Document:
    """Read a record file; `ValueError` naming it when it does not exist or cannot be used."""
    found = read_document(path, check_generation=True)
    if found is None:
        raise ValueError(f"{path} does not exist")
    if isinstance(found, RejectedFile):
        raise ValueError(f"{path} {found.reason}")
    return found


def stamp_of(path: Path, document: Document) -> dict[str, str]:
    """The environment that a file names; `ValueError` when it does not name one completely."""
    metadata = document.metadata or {}
    missing = [name for name in ENVIRONMENT_FIELDS if not isinstance(metadata.get(name), str)]
    if missing:
        raise ValueError(
            f"{path} does not say where it was measured (_metadata lacks {', '.join(missing)}); "
            'add the fields, "*" for those that you vouch for'
        )
    return {name: str(metadata[name]) for name in ENVIRONMENT_FIELDS}


def current_environment() -> tuple[dict[str, str] | None, str]:
    """FlashInfer's stamp of this machine, or None and the reason why it is not known."""
    try:
        from sglang.srt.autotune import flashinfer_api  # imports torch

        flashinfer_api.version()
        return flashinfer_api.environment(), ""
    except Exception as error:  # a broken torch or FlashInfer must not stop a file from being shown
        return None, f"{type(error).__name__}: {error}"


def with_step_times(document: Document) -> Document:
    """The same with the times of a step in each record that it asked for and that has none of its own.

    A start notes times by step, those of the whole op. A record that is newer than its step's note, or has no date, as
    after an edit by hand, may be another choice than the one that was measured.
    """
    notes: dict[str, StepEntry] = {}
    for step in document.steps.values():
        for key in step.keys:
            noted = notes.get(key)
            if noted is None or (noted.tuned_at or "") <= (step.tuned_at or ""):
                notes[key] = step
    records = {}
    for key, record in document.records.items():
        noted = notes.get(key)
        if noted is not None and record.tuned_ms is None and record.tuned_at is not None:
            if record.tuned_at <= (noted.tuned_at or ""):
                record = replace(record, default_ms=noted.default_ms, tuned_ms=noted.tuned_ms)
        records[key] = record
    return replace(document, records=records)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """`--op` and `--bucket`, for :func:`selected`."""
    parser.add_argument("--op", metavar="TEXT", help="Only ops whose name contains TEXT.")
    parser.add_argument(
        "--bucket", type=int, nargs="+", metavar="N", help="Only these buckets (numbers of tokens)."
    )


def selected(document: Document, op: str | None, buckets: Sequence[int] | None) -> Iterator[Record]:
    """The records that `--op` and `--bucket` name, by op and bucket."""
    for record in by_op_and_bucket(document.records.values()):
        key = key_of(record)
        if op is not None and op not in (key.custom_op if key else record.key):
            continue
        if buckets is not None and (key is None or key.num_tokens not in buckets):
            continue
        yield record


def by_op_and_bucket(records: Iterable[Record]) -> list[Record]:
    def order(record: Record) -> tuple[str, int, str]:
        key = key_of(record)
        return (key.custom_op, key.num_tokens or 0, record.key) if key else ("~", 0, record.key)

    return sorted(records, key=order)


def key_of(record: Record) -> RecordKey | None:
    """The parts of a record's key; None when it is not of FlashInfer's form."""
    return parsed_key(record.key)


def op_of(record: Record) -> str:
    key = key_of(record)
    return printable(key.custom_op if key else record.key, 80)


def bucket_of(record: Record) -> str:
    key = key_of(record)
    return str(key.num_tokens) if key and key.num_tokens else "-"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def age(tuned_at: str | None, now: datetime.datetime | None = None) -> str:
    """How long ago an ISO time was: `40 s`, `5 min`, `3 h`, `12 d`; `-` when it is not known."""
    if tuned_at is None:
        return "-"
    try:
        then = datetime.datetime.fromisoformat(tuned_at)
    except ValueError:
        return "-"
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.timezone.utc)
    seconds = max(0, int(((now or datetime.datetime.now(datetime.timezone.utc)) - then).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def new_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add cells as plain text: what a file holds is never read as markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))


def print_table(table: Table) -> None:
    """Print at the terminal's width, or wide where the output is no terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))


def refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another name or add --force")
