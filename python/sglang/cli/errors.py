"""How a command ends when something is wrong: one line on stderr and an exit code, never a traceback for a mistake."""

from __future__ import annotations

import sys

USAGE_ERROR = 2
START_ERROR = 1
INTERRUPTED = 130


def report_error(prog: str, error: BaseException) -> None:
    """Print `prog: error: ...` as one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"{prog}: error: {message}", file=sys.stderr, flush=True)
