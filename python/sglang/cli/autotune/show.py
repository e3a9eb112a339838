"""`sglang autotune show`: what was chosen, how it was measured, and whether it would load here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import (
    add_selection,
    bucket_of,
    current_environment,
    key_of,
    op_of,
    print_json,
    selected,
)
from sglang.cli.autotune.show_text import print_file, print_listing
from sglang.srt.autotune.records.document import Document, RejectedFile, read_document
from sglang.srt.autotune.records.environment import (
    ENVIRONMENT_FIELDS,
    EnvironmentComparison,
    compare_environment,
    compare_seed_environment,
)
from sglang.srt.autotune.records.record import (
    Record,
    by_question,
    describe_policy,
    describe_tactic,
    question_of,
    tactic_to_json,
)
from sglang.srt.autotune.records.seeds import read_seed
from sglang.srt.autotune.report import REPORT_NAME
from sglang.srt.environ import envs
from sglang.srt.flags import FlagParser

#: What lies beside record files and is none.
OTHER_FILES = frozenset({"identity.json", REPORT_NAME, "tactics_blocklist.json"})


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
        print_listing(paths, described)
    else:
        for item in described:
            print_file(item)
    return 0


def _record_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(found for found in path.rglob("*.json") if found.name not in OTHER_FILES)
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
        "rejected": [
            *({"key": bad.key, "reason": bad.reason} for bad in found.rejected),
            *_superseded_json(found),
        ],
        "edited_by_hand": found.edited,
        "environment": {name: (saved or {}).get(name) for name in ENVIRONMENT_FIELDS},
        "total": len(found.records) + sum(map(len, found.namespaces.values())),
        "records": [_record_json(record) for record in selected(found, args.op, args.bucket)],
        "namespaces": {
            name: [
                entry
                for entry in map(_entry_json, entries.items())
                if args.bucket is None or entry["capacity"] in args.bucket
            ]
            for name, entries in found.namespaces.items()
            if args.op is None or args.op in name
        },
        "steps": list(_steps_json(found, args.op, args.bucket)),
    }


def _superseded_json(document: Document) -> Iterator[dict[str, str]]:
    """Records that a start would pass over, since one of another runner answers the same question."""
    answers = by_question(document.records.values())
    for record in document.records.values():
        kept = answers[question_of(record.key)]
        if kept is not record:
            yield {"key": record.key, "reason": f"the record of {kept.runner} answers the same question"}


def _record_json(record: Record) -> dict[str, Any]:
    key = key_of(record)
    return {
        "key": record.key,
        "op": op_of(record),
        "bucket": key.num_tokens if key else None,
        "runner": record.runner,
        "tactic": tactic_to_json(record.tactic),
        "tactic_words": describe_tactic(record.tactic),
        "bucket_words": bucket_of(record),
        "source": record.source,
        "pinned": record.pinned,
        # FlashInfer's tuner compares the policy that is stored; ops of this tree are timed by the tree's own profiler.
        "policy": "own timer" if op_of(record).startswith("sglang::") else describe_policy(record.policy),
        "default_ms": record.default_ms,
        "tuned_ms": record.tuned_ms,
        "tuned_at": record.tuned_at,
    }


def _entry_json(item: tuple[str, Any]) -> dict[str, Any]:
    """One entry of a namespace; what is known of its form (MegaMoE's) is taken out of it, the rest is null."""
    key, value = item
    outer: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    entry = outer.get("entry")
    inner: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    return {
        "key": key,
        "capacity": inner.get("max_tokens"),
        "kernel": outer.get("kernel"),
        "knobs": inner.get("knobs"),
        "default_us": outer.get("default_us"),
        "tuned_us": inner.get("p50_us"),
        "tuned_at": inner.get("tuned_at"),
    }


def _steps_json(
    document: Document, op: str | None, buckets: Sequence[int] | None
) -> Iterator[dict[str, Any]]:
    """The steps whose records `--op` and `--bucket` name, in the order in which a start runs them."""
    chosen = {question_of(record.key) for record in selected(document, op, buckets)}
    answered = set(map(question_of, document.records))
    for step in sorted(document.steps.values(), key=lambda step: _step_order(step.step)):
        if not chosen.intersection(map(question_of, step.keys)):
            continue
        missing = [key for key in step.keys if question_of(key) not in answered]
        yield {
            "step": step.step,
            "records": len(step.keys),
            "complete": not missing,
            "default_ms": step.default_ms,
            "tuned_ms": step.tuned_ms,
            "tuned_at": step.tuned_at,
        }


def _step_order(name: str) -> tuple[str, int, str]:
    """Decode from the smallest up, then prefill from the largest down; other names after them."""
    phase, _, size = name.replace(":", " ").partition(" ")
    if not size.isdecimal():
        return "~", 0, name
    return phase, int(size) if phase == "decode" else -int(size), name
