"""How a worker process lives and dies with its server: never longer, and never hanging."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when the process `parent_pid`, which started it, ends in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # It ended before the line above.
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def begin_worker_life(parent_pid: int) -> None:
    """What a worker does first, before it imports anything large.

    It becomes one process group with all that it will start (compilers, say), which can be killed as one. A Ctrl-C in
    the terminal is the server's to answer; SIGTERM ends a worker at once, wherever it is, but for a word in the journal
    of its start.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_by_sigterm()
    # A session leader leads a group of its own already.
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)


def _end_by_sigterm() -> None:
    """Have SIGTERM end this process with a note that it was asked to.

    A handler in Python waits for the main thread, which may be in a kernel or a compiler for minutes. So the signal
    wakes a thread, through the file descriptor that the interpreter writes to at once.
    """
    libc = ctypes.CDLL(None)
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)

    def end() -> None:
        while signal.SIGTERM not in os.read(wakes, 64):
            pass
        try:
            # Where it was never imported there is no journal, and the main thread may hold the lock of imports.
            if (journal := sys.modules.get("sglang.srt.autotune.journal")) is not None:
                journal.note_stop()
        finally:
            libc.signal(signal.SIGTERM, None)  # SIG_DFL, which `signal.signal` sets in the main thread only
            os.kill(os.getpid(), signal.SIGTERM)

    def forget_in_a_fork() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    threading.Thread(target=end, name="sigterm", daemon=True).start()
    os.register_at_fork(after_in_child=forget_in_a_fork)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)


class Watchdog:
    """Ends the process when one guarded block takes longer than `timeout_s`, with all stacks on stderr."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started_s: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        self._started_s = time.monotonic()
        try:
            yield
        finally:
            self._started_s = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout_s / 10))
            started_s = self._started_s
            if started_s is not None and time.monotonic() - started_s > self._timeout_s:
                logger.error("A forward runs for more than %g s (--watchdog-timeout)", self._timeout_s)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(1)
