"""Tactics that gave wrong results here, kept so that no later start chooses them.

The file is FlashInfer's own format: its tuner leaves the listed tactics out before it measures. It carries the
environment in which they failed, since another FlashInfer numbers its tactics differently.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Blocklist:
    """The file ``tactics_blocklist.json``; one that cannot be read is treated as empty and set aside on writing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, list[Any]]:
        """``"op::Runner" -> [tactic, ...]``."""
        return self._content().get("invalid_tactics", {})

    def is_usable(self) -> bool:
        """Whether FlashInfer may be pointed at it: a malformed file would break its tuner."""
        return bool(self.read())

    def add(
        self, tactics: Iterable[tuple[str, str, Any]], reason: str, environment: Mapping[str, str]
    ) -> None:
        """Add ``(op, runner, tactic in JSON form)`` entries; failing to write is a warning, never fatal."""
        invalid = self.read()
        reasons = self._content().get("reasons", {})
        for op, runner, tactic in tactics:
            listed = invalid.setdefault(f"{op}::{runner}", [])
            if tactic not in listed:
                listed.append(tactic)
            reasons[f"{op}::{runner}::{tactic}"] = reason
        content = {"_metadata": dict(environment), "invalid_tactics": invalid, "reasons": reasons}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            scratch.write_text(json.dumps(content, indent=2) + "\n")
            os.replace(scratch, self.path)
        except OSError as error:
            logger.warning("FlashInfer autotune cannot note a wrong tactic in %s: %s", self.path, error)

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        lists = content.get("invalid_tactics") if isinstance(content, dict) else None
        if not isinstance(lists, dict) or not all(isinstance(value, list) for value in lists.values()):
            return {}
        if not isinstance(content.get("reasons", {}), dict):
            content["reasons"] = {}
        return content
