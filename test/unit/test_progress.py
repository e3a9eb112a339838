"""What is shown while steps are tuned: a bar on a terminal, lines elsewhere, nothing on quiet ranks."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest
from rich.console import Console

from sglang.srt.autotune.progress import StageProgress, print_table
from sglang.srt.autotune.report import StageReport, StepReport

WAIT_S = 30.0


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


class HeardLines(logging.Handler):
    """Collects log lines and lets a test wait for a number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.lines.append(record.getMessage())
            self._more.notify()

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= count, WAIT_S)


LOGGER = logging.getLogger("sglang.srt.autotune.progress")


@pytest.fixture(autouse=True)
def at_info():
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield
    LOGGER.setLevel(level)


@pytest.fixture
def heard():
    handler = HeardLines()
    LOGGER.addHandler(handler)
    yield handler
    LOGGER.removeHandler(handler)


def test_without_a_terminal_lines_come_even_while_one_step_takes_long(heard):
    with StageProgress(3, visible=True, console=pipe(), line_interval_s=0.01) as progress:
        progress.begin("decode 1")
        heard.wait_for(2)
        progress.end()
        progress.begin("prefill 512")
        heard.wait_for(len(heard.lines) + 2)
    assert "0 of 3 steps" in heard.lines[0] and heard.lines[0].endswith("at decode 1")
    assert "1 of 3 steps" in heard.lines[-1] and "left" in heard.lines[-1]
    assert heard.lines[-1].endswith("at prefill 512")


def test_lines_count_what_they_are_told_to_count(heard):
    with StageProgress(3, visible=True, noun="MegaMoE capacities", console=pipe(), line_interval_s=0.01):
        heard.wait_for(1)
    assert "0 of 3 MegaMoE capacities" in heard.lines[0]


def test_no_thread_outlives_the_steps():
    with StageProgress(1, visible=True, console=pipe()) as progress:
        progress.begin("decode 1")
    assert "autotune-progress" not in {thread.name for thread in threading.enumerate()}


def test_on_a_terminal_a_bar_shows_the_step_and_leaves_nothing_behind(heard):
    console = terminal()
    with StageProgress(2, visible=True, console=console, line_interval_s=0.01) as progress:
        progress.begin("decode 8")
        progress._bar.refresh()
        shown = console.file.getvalue()
        progress.end()
    assert "FlashInfer autotune" in shown and "0/2" in shown and "decode 8" in shown
    assert console.file.getvalue().endswith("\x1b[2K")  # the bar's line is erased
    assert heard.lines == []


def test_a_process_that_is_killed_leaves_the_terminal_its_cursor():
    console = terminal()
    with StageProgress(1, visible=True, console=console):
        shown = console.file.getvalue()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_log_lines_do_not_tear_the_bar(monkeypatch):
    terminal_file = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", terminal_file)
    monkeypatch.setattr(sys, "stderr", terminal_file)
    handler = logging.StreamHandler(terminal_file)
    logging.getLogger().addHandler(handler)
    try:
        console = Console(file=terminal_file, force_terminal=True, width=100)
        with StageProgress(1, visible=True, console=console):
            assert handler.stream is sys.stderr is not terminal_file
        assert handler.stream is terminal_file
    finally:
        logging.getLogger().removeHandler(handler)


def test_quiet_ranks_show_nothing_but_tell_their_engine(heard):
    console, told = pipe(), []
    times = iter(range(100))
    progress = StageProgress(
        4, visible=False, listener=told.append, console=console, clock=lambda: float(next(times))
    )
    with progress:
        progress.begin("decode 1")
        progress.end()
    assert console.file.getvalue() == "" and heard.lines == []
    assert [(told["done"], told["total"], told["current"]) for told in told] == [
        (0, 4, "decode 1"),
        (1, 4, "decode 1"),
    ]
    assert told[0]["remaining_s"] == 0 and told[1]["remaining_s"] == pytest.approx(
        3 * told[1]["elapsed_s"], rel=1
    )


def report() -> StageReport:
    return StageReport(
        steps=[
            StepReport("decode", 8, "tuned", default_ms=0.5, tuned_ms=0.125),
            StepReport("prefill", 512, "left out", note="out of [memory]: 1 GiB"),
        ]
    )


@pytest.mark.parametrize("console", [terminal(), pipe()], ids=["terminal", "pipe"])
def test_the_table_has_times_speedup_source_and_notes_below(console):
    print_table(report(), console)
    text = console.file.getvalue()
    for words in ("decode 8", "0.500", "0.125", "4.00x", "tuned", "left out *"):
        assert words in text
    assert "* prefill 512: out of [memory]: 1 GiB" in text


def test_the_table_is_plain_text_where_there_is_no_terminal():
    console = pipe()
    print_table(report(), console)
    assert console.file.getvalue().isascii()


def test_a_higher_log_level_silences_bar_lines_and_table(heard):
    LOGGER.setLevel(logging.WARNING)
    console = terminal()
    with StageProgress(1, visible=True, console=console) as progress:
        progress.begin("decode 1")
    print_table(report(), console)
    assert console.file.getvalue() == ""
