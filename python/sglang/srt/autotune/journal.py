"""A note of the step in progress, so that a start learns from the one that died.

The note is written before each step and removed after it. A step that failed by an error that the next start
would meet again (out of memory, a poisoned CUDA context) is left out by the next start; one during which
the process merely vanished is tried once more, since the likeliest cause is an operator's kill.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

#: Deaths without an error during one step before it is left out.
MAX_VANISHED = 2


@dataclass(frozen=True)
class LeftOut:
    """A step that earlier starts could not finish, and why."""

    step: str
    reason: str


class Journal:
    """The file ``<records>.journal``; without a path, or where it cannot be written, it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._state: dict[str, dict] = self._read()
        if open_step := self._state.pop("open", None):
            entry = self._state.setdefault(open_step["step"], {"vanished": 0, "error": None})
            entry["vanished"] += 1
            self._write()

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
        return found

    def begin(self, step: str) -> None:
        self._write(open={"step": step})

    def done(self, step: str) -> None:
        self._state.pop(step, None)
        self._write()

    def failed(self, step: str, error: str) -> None:
        self._state[step] = {"vanished": 0, "error": error[:500]}
        self._write()

    def _read(self) -> dict:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_text())
            entries = {s: e for s, e in content.items() if isinstance(e, dict)}
            opened = entries.pop("open", None)
            state = {
                str(s): {"vanished": int(e.get("vanished", 0)), "error": e.get("error")}
                for s, e in entries.items()
            }
            if opened and isinstance(opened.get("step"), str):
                state["open"] = {"step": opened["step"]}
            return state
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # a note that cannot be read tells nothing

    def _write(self, **extra: dict) -> None:
        if self.path is None:
            return
        try:
            if not self._state and not extra:
                self.path.unlink(missing_ok=True)
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            scratch.write_text(json.dumps({**self._state, **extra}))
            os.replace(scratch, self.path)
        except OSError:
            self.path = None  # the store has already warned that this root cannot be written
