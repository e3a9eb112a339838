"""What `sglang autotune show` prints: files as a list by directory, or one file as tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import add_row, age, milliseconds, new_table, print_table
from sglang.srt.autotune.records.document import printable, read_json_object

_VERDICTS = {True: "would load here", False: "would NOT load here", None: "not compared with this machine"}


def print_listing(roots: Sequence[Path], described: list[dict[str, Any]]) -> None:
    """A heading for each directory, below it a line for each of its files."""
    if not described:
        print(f"No record files under {', '.join(map(str, roots))}.")
        return
    for root in roots:
        print(root)
    for directory, items in itertools.groupby(described, key=lambda item: Path(item["path"]).parent):
        print(f"\n{_short_name(directory, roots)}  {_engine(directory)}".rstrip())
        for item in items:
            print(f"  {Path(item['path']).name}  {_summary(item)}")
            for problem in item["problems"]:
                print(f"    {printable(problem)}")


def _summary(item: dict[str, Any]) -> str:
    """`16 records, tuned 3 min ago, would load here`."""
    entries = [*item["records"], *itertools.chain(*item.get("namespaces", {}).values())]
    times = [entry["tuned_at"] for entry in entries if isinstance(entry["tuned_at"], str)]
    known = age(max(times, default=None))
    words = [f"{len(entries)} record{'' if len(entries) == 1 else 's'}"]
    words += [f"tuned {known} ago"] * (known != "-")
    return ", ".join([*words, _VERDICTS[item["loads_here"]]])


def _short_name(directory: Path, roots: Sequence[Path]) -> str:
    for root in roots:
        if root.is_dir() and directory.is_relative_to(root):
            return str(directory.relative_to(root))
    return str(directory)


def _engine(directory: Path) -> str:
    """What identity.json says of the engine, e.g. `qwen3_moe bfloat16 tp1 pp1 ep1 portfolio`; empty without one."""
    for place in (directory, directory.parent.parent):  # a fresh run lies in runs/<id>/ beside it
        try:
            return printable(" ".join(_identity_words(read_json_object(place / "identity.json"))))
        except ValueError:
            continue
    return ""


def _identity_words(identity: dict[str, Any]) -> Iterator[str]:
    """Enough to tell the engines of one root apart; what is as usual is left out."""
    model, parallel, backends = (identity.get(name) for name in ("model", "parallel", "backends"))
    yield str(model.get("model_type")) if isinstance(model, dict) else "?"
    yield str(identity.get("dtype"))
    if identity.get("quantization"):
        yield str(identity["quantization"])
    if isinstance(parallel, dict):
        yield from (f"{name}{parallel[name]}" for name in ("tp", "pp", "ep") if name in parallel)
        if parallel.get("attn_dp", 1) != 1:
            yield f"attn_dp{parallel['attn_dp']}"
    if isinstance(backends, dict) and "moe" in backends:
        yield str(backends["moe"])
    if isinstance(skipped := identity.get("skip_ops"), list) and skipped:
        yield f"without {', '.join(map(str, skipped))}"


def print_file(item: dict[str, Any]) -> None:
    """Whether the file would load here and why not, then its records, its steps and what else it holds."""
    print(item["path"])
    print(_VERDICTS[item["loads_here"]])
    for line in _remarks(item):
        print(f"  {line}")
    if item["records"]:
        _print_records(item["records"])
    if item.get("steps"):
        _print_steps(item["steps"])
    shown = [name for name, entries in item.get("namespaces", {}).items() if entries]
    for name in shown:
        _print_namespace(name, item["namespaces"][name])
    if not item["records"] and not shown:
        total = item.get("total", 0)
        print(f"none of its {total} records matches --op and --bucket" if total else "no records")


def _remarks(item: dict[str, Any]) -> Iterator[str]:
    yield from item["problems"]
    yield from (f"left out: {bad['key']}: {bad['reason']}" for bad in item.get("rejected", ()))
    if item.get("edited_by_hand"):
        yield "edited since it was written"


def _print_records(records: list[dict[str, Any]]) -> None:
    timed = any(entry["default_ms"] is not None or entry["tuned_ms"] is not None for entry in records)
    times = ("default ms", "tuned ms") if timed else ()
    columns = ("op", "bucket", "runner", "tactic", "source", "policy", *times, "age")
    table = new_table("records", *columns, right=("bucket", *times, "age"))
    for entry in records:
        source = entry["source"] + (" (pinned)" if entry["pinned"] else "")
        choice = entry["op"], entry["bucket_words"], entry["runner"], entry["tactic_words"]
        measured = (milliseconds(entry["default_ms"]), milliseconds(entry["tuned_ms"])) if timed else ()
        add_row(table, *choice, source, entry["policy"], *measured, age(entry["tuned_at"]))
    print_table(table)


def _print_steps(steps: list[dict[str, Any]]) -> None:
    numbers = ("records", "default ms", "tuned ms", "age")
    table = new_table("steps", "step", *numbers, right=numbers)
    for step in steps:
        name = step["step"] + ("" if step["complete"] else " (incomplete)")
        times = milliseconds(step["default_ms"]), milliseconds(step["tuned_ms"])
        add_row(table, name, str(step["records"]), *times, age(step["tuned_at"]))
    print_table(table)


def _print_namespace(name: str, entries: list[dict[str, Any]]) -> None:
    """What a kernel that tunes itself keeps: a table in MegaMoE's form, keys in any other."""
    if any(entry["capacity"] is None for entry in entries):
        print(f"namespace {printable(name)}: {len(entries)} entries")
        for entry in entries:
            print(f"  {printable(entry['key'])}")
        return
    numbers = ("capacity", "default us", "tuned us", "age")
    table = new_table(f"namespace {printable(name)}", "kernel", *numbers, "knobs", right=numbers)
    for entry in sorted(entries, key=lambda entry: str(entry["capacity"]).rjust(20)):
        times = _number(entry["default_us"]), _number(entry["tuned_us"])
        knobs = json.dumps(entry["knobs"], separators=(", ", ": "))
        added = str(entry["capacity"]), *times, age(_text(entry["tuned_at"]))
        add_row(table, printable(str(entry["kernel"])), *added, printable(knobs))
    print_table(table)


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else "-"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
