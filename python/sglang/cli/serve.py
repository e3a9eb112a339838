"""`sglang serve`: parse the flags, then hand over to the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.cli.errors import INTERRUPTED, START_ERROR, USAGE_ERROR, report_error
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.logs import setup_logging

PROG = "sglang serve"


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Serve until stopped. Returns 2 for a flag that is wrong in itself or for this model or machine, 1 when the start
    or a worker fails, 0 after a clean stop.
    """
    setup_logging()
    try:
        server_args = prepare_server_args(argv, prog)
    except ValueError as error:
        report_error(prog, error)
        return USAGE_ERROR
    setup_logging(server_args.log_level)

    # After the flags: this imports much.
    from sglang.srt.entrypoints.http_server import launch_server, prepare_launch

    refused = USAGE_ERROR
    try:
        model_config, plan = prepare_launch(server_args)
        refused = START_ERROR  # the flags are right; a port, say, may be free at the next attempt
        return int(launch_server(server_args, model_config, plan) or 0)
    except (ValueError, OSError) as error:
        report_error(prog, error)
        return refused
    except KeyboardInterrupt:
        return INTERRUPTED
