"""The `sglang` command: finds the subcommand and imports only that one, so that help and version stay instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main(argv) -> int` runs it, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("sglang.cli.serve", "tune the kernels, then serve a model over HTTP"),
    "autotune": Command("sglang.cli.autotune", "plan, run and manage autotune records without a server"),
    "version": Command("sglang.cli.version", "print the versions of sglang and what it runs on"),
}


def usage() -> str:
    lines = ["usage: sglang COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`sglang COMMAND --help` lists the options of one command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's by default) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        name = "version"
    if name not in COMMANDS:
        print(f"sglang: error: unknown command {name!r}: one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(COMMANDS[name].module).main(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
