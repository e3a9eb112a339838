"""What a person sees while the stage runs: one bar over steps on a terminal, a line now and then elsewhere.

Only rank 0 shows anything; every rank hands the same facts to the engine for ``/server_info``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sglang.srt.autotune.report import StageReport

logger = logging.getLogger(__name__)

#: Between two lines where there is no terminal.
LINE_INTERVAL_S = 10.0

Listener = Callable[[dict[str, Any]], None]


class StageProgress:
    """Counts steps towards ``total``; use as a context manager around them."""

    def __init__(
        self,
        total: int,
        *,
        visible: bool,
        listener: Listener | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done, self.current = total, 0, ""
        self._visible, self._listener, self._clock = visible, listener, clock
        self._started = self._last_line = clock()
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None

    def __enter__(self) -> StageProgress:
        if self._visible and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("FlashInfer autotune"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[current]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("steps", total=self.total, current="")
            self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, step: str) -> None:
        self.current = step
        if self._bar is not None:
            self._bar.update(self._task, current=step)
        self._tell()

    def end(self) -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self._visible and self._clock() - self._last_line >= LINE_INTERVAL_S and self.done < self.total:
            self._last_line = self._clock()
            logger.info(
                "FlashInfer autotune: %d of %d steps, %.0f s elapsed, about %.0f s left (now %s)",
                self.done,
                self.total,
                self.elapsed_s,
                self.remaining_s,
                self.current,
            )
        self._tell()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float:
        """At the pace so far; 0 before the first step is done."""
        return self.elapsed_s / self.done * (self.total - self.done) if self.done else 0.0

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(
                {
                    "done": self.done,
                    "total": self.total,
                    "current": self.current,
                    "elapsed_s": round(self.elapsed_s, 3),
                    "remaining_s": round(self.remaining_s, 3),
                }
            )


def step_table(report: StageReport) -> Table:
    """The steps as a table: what was chosen from where, and what it gains."""
    table = Table(title="FlashInfer autotune", title_justify="left")
    for name in ("step", "default ms", "tuned ms", "speedup", "source"):
        table.add_column(name, justify="left" if name in ("step", "source") else "right")
    for step in report.steps:
        table.add_row(
            f"{step.phase} {step.num_tokens}",
            _number(step.default_ms, 3),
            _number(step.tuned_ms, 3),
            "" if step.speedup is None else f"{step.speedup:.2f}x",
            step.source + (f" ({step.note})" if step.note else ""),
        )
    return table


def print_table(report: StageReport, console: Console | None = None) -> None:
    (console or Console(file=sys.stderr)).print(step_table(report))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
