"""A note of the step in progress, so that a start learns from the one that died.

The note is written before each step and removed after it. A step that failed by an error that the next start
would meet again (out of memory, a poisoned CUDA context) is left out by the next start; one during which
the process merely vanished is tried once more, since the likeliest cause is an operator's kill. One during which the
process was asked to stop is no worse for that; but a step that hangs is stopped again and again by whoever probes the
server, so that this has an end too.

Engines of one configuration share a journal. The one that holds its lock notes steps; an open note that it finds is
therefore of a process that is gone. The others, who cannot tell, only add their failures.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.records.document import printable, read_json_object
from sglang.srt.autotune.records.files import remove_stale_temporaries, replace_file

#: Deaths without an error during one step before it is left out.
MAX_VANISHED = 2
#: Stops that were asked for during one step before it is left out.
MAX_STOPPED = 5
#: A journal has a handful of entries; one with more was not written here.
MAX_ENTRIES = 1000


@dataclass(frozen=True)
class LeftOut:
    """A step that earlier starts could not finish, and why."""

    step: str
    reason: str
    remedy: str = ""


class Journal:
    """The file ``<records>.journal``; without a path, or where it cannot be written, it does nothing.

    Use it as a context manager, or ``close`` it: until then other engines leave the noting to this one.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._can_write = path, path is not None
        self._lock: int | None = None
        self._takes_notes = self._take_lock()
        self._writing = threading.Lock()
        #: What became of steps, and the step that is in progress.
        self._state, self._open = self._read()
        if self._open is not None and self._takes_notes:
            self._count("vanished")
        if self._takes_notes:
            _NOTING.add(self)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another engine take the notes."""
        _NOTING.discard(self)
        if self._lock is not None:
            os.close(self._lock)
        self._lock, self._takes_notes = None, False

    def left_out(self) -> list[LeftOut]:
        """Steps to leave out now, each with its reason in words."""
        found = []
        for step, entry in self._state.items():
            if entry["error"]:
                found.append(LeftOut(step, f"an earlier start failed there: {entry['error']}"))
            elif entry["vanished"] >= MAX_VANISHED:
                found.append(
                    LeftOut(step, f"{entry['vanished']} earlier starts ended there without an error")
                )
            elif entry["stopped"] >= MAX_STOPPED:
                found.append(LeftOut(step, f"{entry['stopped']} earlier starts were stopped there"))
        return found

    def begin(self, step: str) -> None:
        if self._takes_notes:
            with self._writing:
                self._write(step)

    def done(self, step: str) -> None:
        if self._takes_notes:
            with self._writing:
                self._state.pop(step, None)
                self._write(None)

    def failed(self, step: str, error: str) -> None:
        open_step = None
        with self._writing:
            if not self._takes_notes:  # the engine that does may have written since
                self._state, open_step = self._read()
            self._state[step] = {**_entry({}), "error": printable(error, 500)}
            self._write(open_step)

    def stop(self) -> None:
        """Note that the process ends now because it was asked to. From then on nothing else is noted by it."""
        if self._writing.acquire(timeout=1.0) and self._open is not None:
            self._count("stopped")

    def _count(self, what: str) -> None:
        """Turn the open note into one more of `what` in its step's entry."""
        assert self._open is not None, "there is a note to turn into a count"
        self._state.setdefault(self._open, _entry({}))[what] += 1
        self._write(None)

    def _take_lock(self) -> bool:
        """Whether this process is to take notes; also true where the file system has no locks."""
        if self.path is None:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(self.path)
            name = self.path.with_name(f"{self.path.name}.lock")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock = os.open(name, flags, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._lock is not None and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._lock)
                self._lock = None
                return False
        return True

    def _read(self) -> tuple[dict[str, dict[str, Any]], str | None]:
        if self.path is None:
            return {}, None
        try:
            content = read_json_object(self.path)
            entries = {step: entry for step, entry in content.items() if isinstance(entry, dict)}
            open_step = entries.pop("open", {}).get("step")
            if len(entries) > MAX_ENTRIES:
                return {}, None
            state = {step: _entry(entry) for step, entry in entries.items() if step.isprintable()}
        except (ValueError, TypeError, OverflowError):
            return {}, None  # a note that cannot be read tells nothing
        return state, open_step if isinstance(open_step, str) and open_step.isprintable() else None

    def _write(self, open_step: str | None) -> None:
        self._open = open_step
        if self.path is None or not self._can_write:
            return
        try:
            if not self._state and open_step is None:
                self.path.unlink(missing_ok=True)
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {**self._state, **({"open": {"step": open_step}} if open_step else {})}
            replace_file(self.path, json.dumps(content).encode(), durable=False)
        except OSError:
            self._can_write = False  # the store has already warned that this root cannot be written


def left_out_by_any(agreement: Agreement, journal: Journal, question: str) -> dict[str, LeftOut]:
    """Steps that some rank's journal leaves out, by name; the same on every rank, the files to delete in ``remedy``."""
    mine = {left.step: left.reason for left in journal.left_out()}
    answers = agreement.gather(question, [str(journal.path), mine])
    found: dict[str, LeftOut] = {}
    for step in {step: None for _, theirs in answers.values() for step in theirs}:
        ranks = [rank for rank, (_, theirs) in answers.items() if step in theirs]
        path, theirs = answers[ranks[0]]
        others = f" and the journal of rank {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
        found[step] = LeftOut(step, theirs[step], f"delete {path}{others} to try it again")
    return found


#: Journals of this process that take notes.
_NOTING: set[Journal] = set()


def note_stop() -> None:
    """For the last moment of a process that was asked to end: what it was at is not to blame. From any thread."""
    for journal in list(_NOTING):
        journal.stop()


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    error = entry.get("error")
    error = printable(error, 500) if isinstance(error, str) else None
    counts = {name: max(0, int(entry.get(name, 0))) for name in ("vanished", "stopped")}
    return {**counts, "error": error}
