"""Writes docs/cli.md from the flags and variables themselves: `python -m sglang.cli.docs [PATH]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang.srt.environ import EnvField, Envs
from sglang.srt.flags import default_text, flag_fields, flag_name
from sglang.srt.server_args import ServerArgs
from sglang.srt.unbuilt_flags import REFUSED, WARNED

DEFAULT_PATH = Path(__file__).resolve().parents[3] / "docs" / "cli.md"

_INTRODUCTION = """\
# Command line

This page is written by `make docs` from the flags and variables themselves.

`sglang COMMAND --help` prints the same. A wrong flag ends in one line that names it and exit code 2; a start that
fails ends in one line and exit code 1.

## sglang serve

`python -m sglang.launch_server` is the same command. Names and meanings are SGLang's.
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


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *_flag_tables(), _ENVIRONMENT, _environment_table()]
    parts.append(_UNBUILT.format(warned=_names(WARNED), refused=_names(REFUSED)))
    return "\n".join(parts)


def _flag_tables() -> Iterable[str]:
    groups: dict[str, list[str]] = {}
    for field, spec in flag_fields(ServerArgs):
        names = ", ".join(f"`{name}`" for name in (flag_name(field.name), *spec.aliases))
        choices = ", ".join(f"`{choice}`" for choice in spec.choices or ())
        meaning = f"{spec.help} One of {choices}." if choices else spec.help
        row = f"| {names} | {_cell(meaning)} | {_cell(default_text(field, spec))} |"
        groups.setdefault(spec.group, []).append(row)
    for group, rows in groups.items():
        yield "\n".join([f"### {group}", "", "| flag | meaning | default |", "|---|---|---|", *rows, ""])


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
    return text.replace("|", "\\|")


def main(argv: list[str]) -> int:
    path = Path(argv[0]) if argv else DEFAULT_PATH
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
