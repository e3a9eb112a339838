"""Where the server stands between its first moment and its last, as `/health` and `/server_info` tell it."""

from __future__ import annotations

import time
from typing import Any, Literal

from sglang.srt.managers.io_struct import Ready, StartupProgress

AUTOTUNE_STAGE = "autotune"
"""The stage whose progress is shown under `autotune`, where its report will stand."""


class EngineStatus:
    """`phase` moves from starting to ready or failed, and to stopping when the server is asked to end."""

    def __init__(self, num_workers: int) -> None:
        self.phase: Literal["starting", "ready", "stopping", "failed"] = "starting"
        self._num_workers = num_workers
        self._stage = "spawning workers"
        self._detail: dict[str, Any] = {}
        self._autotune: dict[str, Any] = {"status": "pending"}
        self._info: dict[int, dict[str, Any]] = {}
        self._has_tokenizer = False
        self._started_s = time.monotonic()
        self._startup_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    @property
    def max_total_num_tokens(self) -> int:
        """KV slots of the rank that has fewest."""
        return min(info["max_total_num_tokens"] for info in self._info.values())

    def on_progress(self, message: StartupProgress) -> None:
        """The first rank speaks for all: coupled ranks go through the stages together."""
        if message.rank != 0:
            return
        self._stage, self._detail = message.stage, message.detail
        if message.stage == AUTOTUNE_STAGE:
            self._autotune = {"status": "running", **message.detail}

    def on_worker_ready(self, message: Ready) -> None:
        self._info[message.rank] = message.info
        self._become_ready()

    def on_tokenizer(self) -> None:
        self._has_tokenizer = True
        self._become_ready()

    def _become_ready(self) -> None:
        if self.phase == "starting" and self._has_tokenizer and len(self._info) == self._num_workers:
            self.phase = "ready"
            self._startup_s = time.monotonic() - self._started_s

    def as_dict(self) -> dict[str, Any]:
        """The status part of `/server_info`; `startup_seconds` counts on until the server is ready."""
        startup_s = self._startup_s if self._startup_s is not None else time.monotonic() - self._started_s
        status: dict[str, Any] = {
            "status": self.phase,
            "startup_seconds": round(startup_s, 3),
            "autotune": self._autotune,
        }
        if 0 in self._info:
            status.update(self._info[0])
        if self.phase == "starting":
            status.update(stage=self._stage, stage_detail=self._detail)
        return status
