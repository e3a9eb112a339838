"""`sglang autotune`: plan, run and manage autotune records without a server.

Each subcommand is a module with `parser()` and `main(argv) -> int`; only the one that is asked for is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sglang.cli.errors import USAGE_ERROR, report_error

PROG = "sglang autotune"

#: Subcommand -> what it does; its module has the same name with underscores.
COMMANDS = {
    "plan": "print what a start would tune; needs no GPU and no weights",
    "tune": "tune as a start would, keep the records and exit",
    "report": "show the report of a start, or write it as a page",
    "show": "show records: what was chosen, how it was measured, and whether it would load here",
    "diff": "compare two record files",
    "merge": "merge record files of one environment",
    "pin": "mark records that tuning must not replace",
    "export-seed": "make a seed from a record file",
}


def usage() -> str:
    lines = [f"usage: {PROG} COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<12} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", f"`{PROG} COMMAND --help` lists the options of one command."])


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns its exit code, 2 after a mistake in what was asked."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else USAGE_ERROR
    name, *rest = argv
    if name not in COMMANDS:
        print(f"{PROG}: error: unknown command {name!r}: one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    try:
        return int(importlib.import_module(f"{__name__}.{name.replace('-', '_')}").main(rest) or 0)
    except ValueError as error:
        report_error(f"{PROG} {name}", error)
        return USAGE_ERROR
