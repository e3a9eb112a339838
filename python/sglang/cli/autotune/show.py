"""`sglang autotune show`: what was chosen, how it was measured, and whether it would load here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import (
    add_row,
    add_selection,
    age,
    bucket_of,
    current_environment,
    key_of,
    milliseconds,
    new_table,
    op_of,
    print_json,
    print_table,
    selected,
    tactic_words,
)
from sglang.srt.autotune.records.document import (
    Document,
    RejectedFile,
    printable,
    read_document,
    read_json_object,
)
from sglang.srt.autotune.records.environment import (
    ENVIRONMENT_FIELDS,
    EnvironmentComparison,
    compare_environment,
    compare_seed_environment,
)
from sglang.srt.autotune.records.record import Record, describe_policy, tactic_to_json
from sglang.srt.autotune.records.seeds import read_seed
from sglang.srt.environ import envs
from sglang.srt.flags import FlagParser


def parser() -> FlagParser:
    result = FlagParser(
        prog="sglang autotune show",
        description="Show record files of this engine, or of any other that writes them through FlashInfer.",
    )
    result.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="Record files, or directories to list. Default: the autotune directory under SGLANG_CACHE_DIR.",
    )
    add_selection(result)
    result.add_argument(
        "--no-check",
        action="store_true",
        help="Do not compare with this machine; needs neither torch nor GPU.",
    )
    result.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    return result


def main(argv: Sequence[str]) -> int:
    args = parser().parse_strictly(argv)
    default = Path(envs.SGLANG_CACHE_DIR.get()) / "flashinfer" / "autotune"
    if missing := [path for path in args.paths if not path.exists()]:
        raise ValueError(f"{missing[0]} does not exist")
    paths: list[Path] = args.paths or [default]
    files = [file for path in paths for file in _record_files(path)]
    environment, reason = (None, "not checked") if args.no_check else current_environment()
    described = [_describe(path, environment, reason, args) for path in files]
    if args.json:
        print_json({"environment": environment, "files": described})
    elif not args.paths or any(path.is_dir() for path in paths):
        _print_listing(paths, described)
    else:
        for item in described:
            _print_file(item)
    return 0


def _record_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(found for found in path.rglob("*.json") if found.name != "identity.json")
    return [path] if path.exists() else []


def _describe(
    path: Path, environment: Mapping[str, str] | None, reason: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One file as JSON: its records, and in words what of it would not be used here."""
    found = read_document(path, check_generation=True) or RejectedFile(str(path), "disappeared", "unreadable")
    if isinstance(found, RejectedFile):
        return {"path": str(path), "loads_here": False, "problems": [found.reason], "records": []}
    saved: Mapping[str, Any] | None = found.metadata
    compare: Callable[[Any, Mapping[str, str]], EnvironmentComparison] = compare_environment
    if "applies" in [bad.key for bad in found.rejected]:
        seed = read_seed(path)
        found = Document(seed.records, seed.namespaces, seed.steps, metadata=seed.environment)
        saved, compare = seed.environment, compare_seed_environment
    problems = []
    loads_here: bool | None = None
    if environment is not None:
        comparison = (
            compare(saved, environment) if saved is not None else compare_environment({}, environment)
        )
        loads_here = comparison.matches
        if saved is None:
            problems.append("has no _metadata, so nobody knows where it was measured")
        else:
            problems += [difference.words() for difference in comparison.differences]
    elif not args.no_check:
        problems.append(f"cannot be compared with this machine: {reason}")
    return {
        "path": str(path),
        "loads_here": loads_here,
        "problems": problems,
        "rejected": [{"key": bad.key, "reason": bad.reason} for bad in found.rejected],
        "edited_by_hand": found.edited,
        "environment": {name: (saved or {}).get(name) for name in ENVIRONMENT_FIELDS},
        "records": [_record_json(record) for record in selected(found, args.op, args.bucket)],
        "namespaces": {name: len(entries) for name, entries in found.namespaces.items()},
        "steps": list(_steps_json(found)),
    }


def _record_json(record: Record) -> dict[str, Any]:
    key = key_of(record)
    return {
        "key": record.key,
        "op": op_of(record),
        "bucket": key.num_tokens if key else None,
        "runner": record.runner,
        "tactic": tactic_to_json(record.tactic),
        "tactic_words": tactic_words(record.tactic),
        "bucket_words": bucket_of(record),
        "source": record.source,
        "pinned": record.pinned,
        "policy": describe_policy(record.policy),
        "default_ms": record.default_ms,
        "tuned_ms": record.tuned_ms,
        "tuned_at": record.tuned_at,
    }


def _steps_json(document: Document) -> Iterator[dict[str, Any]]:
    for step in document.steps.values():
        missing = [key for key in step.keys if key not in document.records]
        yield {
            "step": step.step,
            "records": len(step.keys),
            "complete": not missing,
            "default_ms": step.default_ms,
            "tuned_ms": step.tuned_ms,
            "tuned_at": step.tuned_at,
        }


def _print_listing(paths: Sequence[Path], described: list[dict[str, Any]]) -> None:
    if not described:
        print(f"No record files under {', '.join(map(str, paths))}.")
        return
    table = new_table("", "file", "for", "records", "tuned", "loads here", "why not", right=("records",))
    for item in described:
        newest = max((entry["tuned_at"] for entry in item["records"] if entry["tuned_at"]), default=None)
        verdict = {True: "yes", False: "no", None: "?"}[item["loads_here"]]
        name, count = _short_name(Path(item["path"]), paths), str(len(item["records"]))
        add_row(
            table, name, _engine(Path(item["path"])), count, age(newest), verdict, "; ".join(item["problems"])
        )
    print_table(table)


def _short_name(path: Path, roots: Sequence[Path]) -> str:
    for root in roots:
        if root.is_dir() and path.is_relative_to(root):
            return str(path.relative_to(root))
    return str(path)


def _engine(path: Path) -> str:
    """What identity.json beside the file says of its engine: `qwen3_moe bfloat16 tp1 pp1 ep1`."""
    try:
        identity = read_json_object(path.parent / "identity.json")
    except ValueError:
        return "-"
    model, parallel = identity.get("model"), identity.get("parallel")
    words = [str(model.get("model_type")) if isinstance(model, dict) else "?", str(identity.get("dtype"))]
    if isinstance(parallel, dict):
        words += [f"{name}{parallel[name]}" for name in ("tp", "pp", "ep") if name in parallel]
    return printable(" ".join(words))


def _print_file(item: dict[str, Any]) -> None:
    print(item["path"])
    print(
        {True: "would load here", False: "would NOT load here", None: "not compared with this machine"}[
            item["loads_here"]
        ]
    )
    for problem in item["problems"]:
        print(f"  {problem}")
    for bad in item.get("rejected", ()):
        print(f"  left out: {bad['key']}: {bad['reason']}")
    if item.get("edited_by_hand"):
        print("  edited since it was written")
    if not item["records"]:
        print("no records")
        return
    columns = ("op", "bucket", "runner", "tactic", "source", "policy", "default ms", "tuned ms", "age")
    table = new_table("records", *columns, right=("bucket", "default ms", "tuned ms", "age"))
    for entry in item["records"]:
        source = entry["source"] + (" (pinned)" if entry["pinned"] else "")
        times = milliseconds(entry["default_ms"]), milliseconds(entry["tuned_ms"])
        cells = (
            entry["op"],
            entry["bucket_words"],
            entry["runner"],
            entry["tactic_words"],
            source,
            entry["policy"],
        )
        add_row(table, *cells, *times, age(entry["tuned_at"]))
    print_table(table)
    if item["steps"]:
        steps = new_table(
            "steps",
            "step",
            "records",
            "default ms",
            "tuned ms",
            "age",
            right=("records", "default ms", "tuned ms", "age"),
        )
        for step in item["steps"]:
            name = step["step"] + ("" if step["complete"] else " (incomplete)")
            times = milliseconds(step["default_ms"]), milliseconds(step["tuned_ms"])
            add_row(steps, name, str(step["records"]), *times, age(step["tuned_at"]))
        print_table(steps)
    for name, count in item["namespaces"].items():
        print(f"namespace {name}: {count} entries")
