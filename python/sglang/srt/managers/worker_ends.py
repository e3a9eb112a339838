"""Whom to name when workers end.

Ranks wait for each other, so one that ends takes the others with it, and the word of a victim may come first. The
one that ended without having lost anybody is the one to name.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from sglang.srt.managers.io_struct import Fatal

SIGNAL_LAG_S = 1.0
"""How much later than a worker the main process may notice a signal that was sent to both."""

VICTIM_LAG_S = 3.0
"""How much later than its victims the worker that they lost may be found to have ended."""


class WorkerEnds:
    """The workers of this machine that have ended or said that they will."""

    def __init__(self) -> None:
        self._last_words: dict[int, Fatal] = {}
        self._exit_codes: dict[int, int | None] = {}

    def add_last_words(self, message: Fatal) -> None:
        self._last_words[message.rank] = message

    def add_exit(self, rank: int, exit_code: int | None) -> None:
        self._exit_codes[rank] = exit_code

    def wait_s(self) -> float:
        """How long to wait for other ends before one is named."""
        if self._exit_codes and set(self._exit_codes.values()) <= {-signal.SIGTERM}:
            return SIGNAL_LAG_S
        if not any(self._culprits()):
            return VICTIM_LAG_S
        # A worker that fails sends its last words before it ends, and they take another way.
        return 0.1

    def words(self) -> str:
        """The end to name, in words."""
        if culprit := next(self._culprits(), None):
            return culprit
        victims = [message for message in self._last_words.values() if message.lost_peer]
        if victims:
            rank, text = victims[0].rank, victims[0].traceback
            return f"the worker of rank {rank} lost another rank, which has not ended on this machine: {text}"
        rank, exit_code = next(iter(self._exit_codes.items()))
        return f"the worker of rank {rank} ended with {exit_words(exit_code)}"

    def _culprits(self) -> Iterator[str]:
        for rank, exit_code in sorted(self._exit_codes.items()):
            if exit_code != 0 and rank not in self._last_words:
                yield f"the worker of rank {rank} ended with {exit_words(exit_code)}"
        for rank, message in sorted(self._last_words.items()):
            if not message.lost_peer:
                yield f"the worker of rank {rank} failed: its reason is above"


def exit_words(exit_code: int | None) -> str:
    """`exit_code` of a process as a person would say it."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ", as when the machine runs out of memory" if exit_code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-exit_code).name}{hint}"
