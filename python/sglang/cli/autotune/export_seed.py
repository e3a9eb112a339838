"""`sglang autotune export-seed`: a seed from a record file, with what it applies to and where it comes from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import (
    add_selection,
    print_json,
    read_records,
    refuse_to_overwrite,
    selected,
    stamp_of,
)
from sglang.srt.autotune.records.document import Document, read_json_object
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS, WILDCARD
from sglang.srt.autotune.records.record import Record, by_question
from sglang.srt.autotune.records.seeds import Seed, read_seed, write_seed
from sglang.srt.autotune.records.store import utc_now
from sglang.srt.flags import FlagParser
from sglang.version import __version__


def parser() -> FlagParser:
    result = FlagParser(
        prog="sglang autotune export-seed",
        description="Make a seed of a record file. What it applies to is read from identity.json beside the file.",
    )
    result.add_argument("path", type=Path, metavar="FILE", help="The record file.")
    result.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="The seed to write.")
    add_selection(result)
    result.add_argument("--name", help="The seed's name. Default: the name of OUT.")
    result.add_argument(
        "--applies",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help='Add or change a field of what the seed applies to, e.g. chunked_prefill_size=8192; "*" lifts one. '
        "May be repeated.",
    )
    result.add_argument(
        "--any",
        action="append",
        default=[],
        choices=ENVIRONMENT_FIELDS,
        metavar="FIELD",
        help="A field of the environment that cannot change these kernels; needs --because. May be repeated.",
    )
    result.add_argument(
        "--because", metavar="TEXT", help="Why the fields of --any do not matter; kept in the seed."
    )
    result.add_argument("--command", metavar="TEXT", help="The command that measured, for the provenance.")
    result.add_argument("--note", metavar="TEXT", help="Anything else that its readers should know.")
    result.add_argument("--force", action="store_true", help="Replace OUT when it exists.")
    result.add_argument("--json", action="store_true", help="Print the seed as JSON too.")
    return result


def main(argv: Sequence[str]) -> int:
    args = parser().parse_strictly(argv)
    refuse_to_overwrite(args.output, args.force)
    if args.any and not args.because:
        raise ValueError("--any needs --because: the reason why those fields cannot change these kernels")
    document = read_records(args.path)
    stamp = stamp_of(args.path, document)
    records = list(by_question(selected(document, args.op, args.bucket)).values())
    if not records:
        raise ValueError(f"{args.path} holds no such record")
    seed = Seed(
        records={record.key: record for record in records},
        namespaces=document.namespaces if args.op is None and args.bucket is None else {},
        name=args.name or args.output.stem,
        applies=_applies(args, stamp),
        environment={**stamp, **{name: WILDCARD for name in args.any}},
        provenance=_provenance(args, stamp, records, document),
    )
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_seed(seed, args.output)
    except OSError as error:
        raise ValueError(f"{args.output} cannot be written: {error.strerror or error}") from error
    read_seed(args.output)
    if args.json:
        print_json(json.loads(args.output.read_text()))
    else:
        print(f"wrote {args.output}: {len(records)} records for {seed.applies['model_type']}")
        print("put it into python/sglang/srt/autotune/records/seeds/ to ship it")
    return 0


def _applies(args: argparse.Namespace, stamp: Mapping[str, str]) -> dict[str, Any]:
    """From the identity beside the file and `--applies`, with the names that the engine gives its own."""
    applies: dict[str, Any] = {}
    identity_path = args.path.parent / "identity.json"
    if identity_path.exists():
        identity = read_json_object(identity_path)
        groups = {name: identity.get(name) for name in ("model", "parallel", "backends")}
        if not all(isinstance(group, dict) for group in groups.values()):
            raise ValueError(f"{identity_path} does not describe an engine")
        applies.update(groups["model"] or {})
        applies["dtype"] = identity.get("dtype")
        applies["quantization"] = identity.get("quantization")
        applies["moe_runner_backend"] = (groups["backends"] or {}).get("moe")
        applies.update(groups["parallel"] or {})
        applies["sm"] = args.path.resolve().parent.parent.name
    applies["flashinfer_version"] = stamp["flashinfer_version"]
    for assignment in args.applies:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--applies {assignment}: write FIELD=VALUE")
        applies[name] = _value(value)
    applies = {name: value for name, value in applies.items() if value not in (None, WILDCARD)}
    missing = [name for name in ("model_type", "dtype", "sm", "tp", "pp", "ep") if name not in applies]
    if missing:
        raise ValueError(
            f"nothing says what the seed applies to ({', '.join(missing)}): keep identity.json beside the file, "
            f"or add --applies {missing[0]}=..."
        )
    return applies


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _provenance(
    args: argparse.Namespace, stamp: Mapping[str, str], records: Sequence[Record], document: Document
) -> dict[str, Any]:
    times = sorted(record.tuned_at for record in records if record.tuned_at)
    provenance: dict[str, Any] = {
        "gpu": stamp["gpu"],
        "measured_from": times[0] if times else "not recorded",
        "measured_to": times[-1] if times else "not recorded",
        "command": args.command or "not recorded",
        "exported_at": utc_now(),
        "exported_by": f"sglang {__version__}",
    }
    if args.any:
        provenance["any"] = {"fields": sorted(args.any), "because": args.because}
    if args.note:
        provenance["note"] = args.note
    if document.edited:
        provenance["edited"] = "the record file had been edited by hand"
    return provenance
