"""An error in one line of a log."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of what `error` says, or its type's name; at most 300 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
