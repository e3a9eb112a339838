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

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.records.document import printable, read_json_object
from sglang.srt.autotune.records.files import file_lock, free_name, replace_file
from sglang.srt.autotune.records.record import tactic_from_json

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 10.0
#: More than any GPU has bad tactics; a longer file was not written here.
MAX_TACTICS = 10_000


class Blocklist:
    """The file ``tactics_blocklist.json``; one that cannot be read counts as empty and is set aside on writing.

    Without a path it is empty and keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
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
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks and engines find the same wrong tactic at the same time.
            with file_lock(self.path.with_name(f"{self.path.name}.lock"), _LOCK_TIMEOUT_S):
                self._add(self.path, list(tactics), reason, dict(environment))
        except OSError as error:
            logger.warning("FlashInfer autotune cannot note a wrong tactic in %s: %s", self.path, error)

    def _add(
        self, path: Path, tactics: list[tuple[str, str, Any]], reason: str, environment: dict[str, str]
    ) -> None:
        content = self._content()
        if content.get("_metadata") != environment:
            # Other builds number their tactics differently: what they found says nothing here.
            content = {}
            if os.path.lexists(path):
                os.rename(path, free_name(path, "old"))
        invalid = content.get("invalid_tactics", {})
        reasons = content.get("reasons", {})
        for op, runner, tactic in tactics:
            listed = invalid.setdefault(f"{op}::{runner}", [])
            if tactic not in listed:
                listed.append(tactic)
            reasons[f"{op}::{runner}::{tactic}"] = printable(reason, 500)
        content = {"_metadata": environment, "invalid_tactics": invalid, "reasons": reasons}
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())

    def _content(self) -> dict[str, Any]:
        """The file when all of it is as it should be, else nothing."""
        if self.path is None:
            return {}
        try:
            content = read_json_object(self.path)
            lists = content.get("invalid_tactics")
            if not isinstance(lists, dict) or not isinstance(content.get("_metadata", {}), dict):
                return {}
            if sum(len(listed) for listed in lists.values()) > MAX_TACTICS:
                return {}
            for listed in lists.values():
                for tactic in listed if isinstance(listed, list) else [{}]:
                    tactic_from_json(tactic)
        except (ValueError, TypeError):
            return {}
        if not isinstance(content.get("reasons", {}), dict):
            content["reasons"] = {}
        return content


def put_in_force(own: Blocklist) -> None:
    """Choose the list that FlashInfer's tuner leaves out, before the tuner exists: the user's, else ``own``.

    FlashInfer raises when its tuner is created over a malformed list, so such a one is told and passed over.
    """
    named = flashinfer_api.blocklist_in_force()
    if named is not None and not Blocklist(named).is_usable():
        if named != own.path:
            logger.warning(
                "%s=%s lists no usable tactics and is ignored", flashinfer_api.BLOCKLIST_VARIABLE, named
            )
        flashinfer_api.use_blocklist(None)
        named = None
    if named is None and own.is_usable():
        flashinfer_api.use_blocklist(own.path)
        logger.info("FlashInfer autotune leaves out the tactics listed in %s", own.path)
