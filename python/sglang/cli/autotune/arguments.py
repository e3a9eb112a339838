"""Sub-commands that take the flags of `sglang serve` and a few of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang.srt.flags import FlagParser
from sglang.srt.server_args import ServerArgs, prepare_server_args

_SERVE_FLAGS = "Every flag of `sglang serve` is accepted too and means the same: see `sglang serve --help`."


def own_parser(prog: str, description: str) -> FlagParser:
    """A parser for the flags that only this sub-command has."""
    return FlagParser(
        prog=prog,
        usage="%(prog)s [SERVE FLAGS] [OPTIONS]",
        description=f"{description} {_SERVE_FLAGS}",
    )


def split_arguments(parser: FlagParser, argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """The sub-command's own flags and the server's; raises `ValueError` that names the flag and the remedy."""
    own, serve_flags = parser.parse_known_args(list(argv))
    return own, prepare_server_args(serve_flags, parser.prog)
