"""A worker ends with its parent, and a forward that never ends is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from sglang.srt.managers.process_life import begin_worker_life
begin_worker_life(os.getppid())
print(os.getpid(), os.getpgrp(), flush=True)
time.sleep(60)
'''])
time.sleep(60)
"""

STUCK = """
import time
from sglang.srt.managers.process_life import Watchdog
watchdog = Watchdog(0.2)
with watchdog.guard():
    pass
time.sleep(0.5)
print("idle is no reason to end", flush=True)
with watchdog.guard():
    time.sleep(60)
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_worker_leads_its_own_group_and_ends_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    pid, group = map(int, parent.stdout.readline().split())
    assert pid == group
    parent.kill()
    parent.wait()
    for _ in range(600):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the worker outlives its parent")


def test_the_watchdog_ends_a_stuck_block_with_its_stack():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert done.returncode == 1
    assert "idle is no reason to end" in done.stdout
    assert "--watchdog-timeout" in done.stderr
    assert 'File "<string>", line 10' in done.stderr
