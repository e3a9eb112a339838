"""`sglang serve`: parse the flags, then hand over to the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.cli.errors import INTERRUPTED, START_ERROR, USAGE_ERROR, report_error
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.logs import setup_logging

PROG = "sglang serve"


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Serve until stopped. Returns 2 for a wrong flag, 1 when the start or a worker fails, 0 after a clean stop."""
    setup_logging()
    try:
        server_args = prepare_server_args(argv, prog)
    except ValueError as error:
        report_error(prog, error)
        return USAGE_ERROR
    setup_logging(server_args.log_level)

    from sglang.srt.entrypoints.http_server import launch_server  # after the flags: this imports much

    try:
        return int(launch_server(server_args) or 0)
    except (ValueError, OSError) as error:
        report_error(prog, error)
        return START_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
