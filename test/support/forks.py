"""Forked processes that a test may kill, starve or take the rights of root from; each is waited for within a bound."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

NOBODY = 65534


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked process that exits non-zero when it raises; returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def join(pid: int, timeout_s: float = 60.0) -> int:
    """Wait for a forked process; returns its exit code, negative for a signal."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the process did not end in time")


def run_as_ordinary_user(work: Callable[[], None], uid: int = NOBODY) -> None:
    """Run `work` in a process on which file modes bind, which they do not on root."""

    def dropped() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        work()

    assert join(fork(dropped)) == 0
