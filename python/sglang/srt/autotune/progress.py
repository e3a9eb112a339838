"""What a person sees while the stage runs: one bar over steps on a terminal, a line now and then elsewhere.

Only rank 0 shows anything; every rank hands the same facts to the engine for ``/server_info``. A step may take
minutes where kernels are built first, so the lines come from a thread: silence would read as a hang.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from rich import box
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

from sglang.srt.autotune.report import StageReport, notes_of

logger = logging.getLogger(__name__)

#: Between two lines where there is no terminal.
LINE_INTERVAL_S = 10.0
#: Width of the table where there is no terminal to ask.
PLAIN_WIDTH = 100

Listener = Callable[[dict[str, Any]], None]


class StageProgress:
    """Counts steps (or what ``noun`` names) towards ``total``; use as a context manager around them.

    ``begin`` names what is being done, ``end`` counts it as done. ``listener`` hears both, on every rank.
    """

    def __init__(
        self,
        total: int,
        *,
        visible: bool,
        noun: str = "steps",
        listener: Listener | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_interval_s: float = LINE_INTERVAL_S,
    ) -> None:
        self.total, self.done, self.current, self._noun = total, 0, "", noun
        self._visible = visible and logger.isEnabledFor(logging.INFO)
        self._listener, self._clock = listener, clock
        self._line_interval_s = line_interval_s
        self._started = self._step_started = clock()
        self._console = console or Console(file=sys.stderr)
        self._stack = contextlib.ExitStack()
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
                refresh_per_second=4,  # the thread that draws runs beside what is measured
            )
            self._task = self._bar.add_task(self._noun, total=self.total, current="")
            self._stack.enter_context(self._bar)
            self._console.show_cursor()  # rich hides it, and a process that is killed cannot give it back
            self._stack.enter_context(_logs_above_the_bar())
        elif self._visible:
            self._stack.enter_context(_repeated(self._log_line, self._line_interval_s))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin(self, step: str) -> None:
        self.current, self._step_started = step, self._clock()
        if self._bar is not None:
            self._bar.update(self._task, current=step)
        self._tell()

    def end(self) -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        self._tell()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float:
        """At the pace so far; 0 before the first step is done."""
        return self.elapsed_s / self.done * (self.total - self.done) if self.done else 0.0

    def _log_line(self) -> None:
        logger.info(
            "FlashInfer autotune: %d of %d %s, %.0f s elapsed%s, %.0f s at %s",
            self.done,
            self.total,
            self._noun,
            self.elapsed_s,
            f", about {self.remaining_s:.0f} s left" if self.done else "",
            self._clock() - self._step_started,
            self.current or "its beginning",
        )

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


def step_table(report: StageReport, *, plain: bool = False) -> Table:
    """The steps as a table: what was chosen from where, and what it gains. ``plain`` draws no frame."""
    table = Table(
        title="FlashInfer autotune, one layer's MoE op",
        title_justify="left",
        box=None if plain else box.SIMPLE_HEAD,
    )
    for name in ("step", "default ms", "tuned ms", "speedup", "source"):
        table.add_column(name, justify="left" if name in ("step", "source") else "right", no_wrap=True)
    for step in report.steps:
        table.add_row(
            step.name,
            _number(step.default_ms, 3),
            _number(step.tuned_ms, 3),
            "" if step.speedup is None else f"{step.speedup:.2f}x",
            step.source + (" *" if step.note else ""),
        )
    return table


def print_table(report: StageReport, console: Console | None = None) -> None:
    """The table, and below it a line for every note of a step; nothing at a log level above info."""
    if not logger.isEnabledFor(logging.INFO):
        return
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH, no_color=True)
    console.print(step_table(report, plain=not console.is_terminal), highlight=False)
    for names, note in notes_of((step.phase, step.num_tokens, step.note) for step in report.steps):
        console.print(f"* {names}: {note}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _repeated(act: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call ``act`` every ``interval_s`` seconds, from a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            act()

    thread = threading.Thread(target=run, name="autotune-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _logs_above_the_bar() -> Iterator[None]:
    """Send log lines through the stream that rich put in place of stderr, so that they do not tear the bar."""
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
            moved.append((handler, handler.stream))
            handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
