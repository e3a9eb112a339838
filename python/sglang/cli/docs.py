"""Writes docs/cli.md and docs/compatibility.md from the code itself: `python -m sglang.cli.docs [DIRECTORY]`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang import bench_serving
from sglang.cli import autotune, compatibility
from sglang.srt.environ import EnvField, Envs
from sglang.srt.server_args import server_args_parser
from sglang.srt.unbuilt_flags import REFUSED, WARNED

DIRECTORY = Path(__file__).resolve().parents[3] / "docs"

_INTRODUCTION = """\
# Command line

This page is written by `make docs` from the flags and variables themselves; `sglang COMMAND --help` prints the same.

A wrong flag ends in one line that names it and exit code 2; a start that fails ends in one line and exit code 1.
`python -m sglang.launch_server` is another name of `sglang serve`. Names and meanings of its flags are SGLang's.
"""

_ENVIRONMENT = """\
## Environment variables

Switches accept `1 true yes on` and `0 false no off`. A value that cannot be read is an error that names the variable.
"""

_UNBUILT = """\
## Flags of SGLang that are not built here

Dropped with one warning, since they cannot change what is computed:

{warned}

Refused, since going on without them would be another server:

{refused}
"""


def parsers() -> list[argparse.ArgumentParser]:
    """The parsers of every command that has flags, in the page's order."""
    modules = [
        importlib.import_module(f"{autotune.__name__}.{name.replace('-', '_')}") for name in autotune.COMMANDS
    ]
    return [server_args_parser(), *[module.parser() for module in modules], bench_serving.parser()]


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for parser in parsers():
        parts += _parser_sections(parser)
    parts += [_ENVIRONMENT, _environment_table()]
    parts.append(_UNBUILT.format(warned=_names(WARNED), refused=_names(REFUSED)))
    return "\n".join(parts)


def _parser_sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A heading per command and a table per group; subcommands follow their command."""
    yield f"## {parser.prog}\n\n{parser.description or ''}\n"
    subcommands: list[argparse.ArgumentParser] = []
    for group in parser._action_groups:  # argparse has no public way to list what was declared
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                subcommands += action.choices.values()
            elif not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS:
                rows.append(_row(action))
        if rows:
            title = group.title or "options"
            yield "\n".join(
                [f"### {title[0].upper()}{title[1:]}", "", "| flag | meaning |", "|---|---|", *rows, ""]
            )
    for subcommand in subcommands:
        yield from _parser_sections(subcommand)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    meaning = (action.help or "").replace("%%", "%")
    if action.choices is not None:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in action.choices) + "."
    return f"| {names} | {_cell(meaning)} |"


def _environment_table() -> str:
    rows = [
        f"| `{name}` | {_cell(field.doc)} | {_env_default(field)} |" for name, field in Envs.fields().items()
    ]
    return "\n".join(["| variable | meaning | default |", "|---|---|---|", *rows, ""])


def _env_default(field: EnvField[Any]) -> str:
    # A default that is worked out differs by machine: the variable's doc says it in words.
    value = field.fixed_default()
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _names(table: dict[str, str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(table))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """The written pages by file name."""
    return {"cli.md": render(), "compatibility.md": compatibility.render()}


def main(argv: list[str]) -> int:
    directory = Path(argv[0]) if argv else DIRECTORY
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(f"wrote {directory / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
