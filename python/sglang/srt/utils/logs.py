"""Logging of a process: one format everywhere, with the rank where there are several."""

from __future__ import annotations

import logging
import sys

_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

# Their start-up and per-request lines drown what an operator looks for.
_CHATTY = ("httpx", "httpcore", "urllib3", "filelock", "transformers", "asyncio")

# Warns of every prompt above the model's length, with a wrong remedy; the server answers such a request itself.
_SILENT = ("transformers.tokenization_utils_base",)


class _Formatter(logging.Formatter):
    """`[time label] message`, with the level named from WARNING upwards."""

    def __init__(self, label: str) -> None:
        super().__init__(datefmt=_DATE_FORMAT)
        self._label = f" {label}" if label else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"[{self.formatTime(record, self.datefmt)}{self._label}] {level}{record.message}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Marks the handler that `setup_logging` owns, so that calling it again replaces that one only."""


def setup_logging(level: str = "info", label: str = "") -> None:
    """Log to stderr at `level` and above; `label` (e.g. "TP1") marks this process's lines.

    May be called again: the last call counts.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(_Formatter(label))
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other, _Handler)] + [handler]
    root.setLevel(level.upper())
    quiet = max(root.level, logging.WARNING) if root.level > logging.DEBUG else logging.INFO
    for name in _CHATTY:
        logging.getLogger(name).setLevel(quiet)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.ERROR if quiet > logging.INFO else quiet)
