"""`sglang autotune report`: what a start did, from its report file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.cli.autotune.common import print_table
from sglang.srt.autotune.report import notes_of, read_report
from sglang.srt.environ import envs
from sglang.srt.flags import FlagParser


def parser() -> FlagParser:
    """The flags of this sub-command."""
    own = FlagParser(
        prog="sglang autotune report",
        description="Print the report of a start, or write it as one HTML page that needs no other file.",
    )
    own.add_argument(
        "path",
        nargs="?",
        type=_path,
        metavar="PATH",
        help="A report, or a directory whose newest report.json is taken. Default: the autotune directory under "
        "SGLANG_CACHE_DIR.",
    )
    own.add_argument(
        "--html", type=Path, metavar="OUT", help="Write the page to this file and print nothing else."
    )
    return own


def _path(text: str) -> Path | None:
    """None for an empty one, as an unset variable gives it: that is no reason to search the current directory."""
    return Path(text) if text else None


def main(argv: Sequence[str]) -> int:
    """Print or write; raises `ValueError` that names the file when there is no report or no place to write."""
    own = parser().parse_strictly(argv)
    report = read_report(own.path or Path(envs.SGLANG_CACHE_DIR.get(), "flashinfer", "autotune"))
    if own.html is None:
        print_report(report)
        return 0
    from sglang.srt.autotune.page import render_page

    try:
        own.html.write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html {own.html} cannot be written: {error.strerror}") from error
    print(f"wrote {own.html}")
    return 0


def print_report(report: dict[str, Any]) -> None:
    """The report on stdout: outcome, steps, records, and whatever needs a look."""
    records, engine = report["records"], report.get("engine") or {}
    gpu = report.get("environment", {}).get("gpu", "unknown")
    print(f"FlashInfer autotune {report['status']} in {report['seconds']:.2f} s: {report['reason']}")
    if engine.get("model"):
        device = gpu if gpu != "unknown" else engine.get("device")
        print(f"for {engine['model'].get('model_type')}, {engine.get('dtype')}, on {device}")
    if report["steps"]:
        print_table(_steps(report["steps"]))
    if report["steps"] or report.get("megamoe"):
        counts = ", ".join(f"{records[name]} {name}" for name in ("seeded", "user", "given", "tuned"))
        print(
            f"records: {counts}; {len(records['rejected'])} rejected; kept at {report['cache_path'] or 'memory only'}"
        )
    for line in [*_megamoe(report.get("megamoe")), *_notes(report)]:
        print(line)
    sys.stdout.flush()


def _steps(steps: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("step", "default ms", "tuned ms", "speedup", "source", "seconds"):
        table.add_column(name, justify="left" if name in ("step", "source") else "right", no_wrap=True)
    for step in steps:
        default, tuned = step["default_ms"], step["tuned_ms"]
        table.add_row(
            f"{step['phase']} {step['num_tokens']}",
            "" if default is None else f"{default:.3f}",
            "" if tuned is None else f"{tuned:.3f}",
            f"{default / tuned:.2f}x" if default and tuned else "",
            step["source"],
            f"{step['seconds']:.2f}",
        )
    return table


def _megamoe(whole: dict[str, Any] | None) -> list[str]:
    """A line per capacity, and what went wrong."""
    if not whole:
        return []
    lines = [f"MegaMoE {whole['kernel']} in {whole['seconds']:.1f} s:"]
    for capacity, winner in whole["winners"].items():
        time_us, default_us = winner["time_us"], winner["default_us"]
        times = f", {time_us:.1f} us" if time_us else ""
        times += f" against {default_us:.1f} us" if time_us and default_us else ""
        lines.append(f"  capacity {capacity}: {winner['source']}{times}")
    lines += [f"  {problem}" for problem in whole["problems"]]
    return lines + [f"  record {bad['key']} is not used: {bad['reason']}" for bad in whole["rejected"]]


def _notes(report: dict[str, Any]) -> list[str]:
    steps = [(step["phase"], step["num_tokens"], step.get("note")) for step in report["steps"]]
    notes = [f"{names}: {note}" for names, note in notes_of(steps)]
    notes += [f"rejected: {item['reason']}" for item in report["records"]["rejected"]]
    notes += [f"unused: {words}" for words in report["records"].get("unused", [])]
    notes += [
        f"seed {s['name']} not used: {'; '.join(s['reasons'])}" for s in report["seeds"] if not s["used"]
    ]
    notes += [f"fallback at {f['step']}: {f['op']} {f['shapes']}" for f in report["fallback_details"]]
    notes += [f"rank {d['rank']} took another rank's choice for {d['key']}" for d in report["disagreements"]]
    never = report["skipped_ops"]["never_asked"]
    notes += [f"no forward asked for the skipped op {op}: is it spelled right?" for op in never]
    return notes + list(report["warnings"])
