"""A worker ends with its parent, and a forward that never ends is ended."""

from __future__ import annotations

import json
import os
import signal
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

STOPPED = """
import hashlib, os, pathlib, sys
from sglang.srt.managers.process_life import begin_worker_life
begin_worker_life(os.getppid())
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    os.kill(os.getpid(), 15)  # ends the fork alone
    os._exit(1)
from sglang.srt.autotune.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
journal.begin("decode 8")
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in which no handler in Python runs
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


def test_a_worker_that_is_stopped_ends_by_the_signal_wherever_it_is_and_its_step_is_not_blamed(tmp_path):
    path = tmp_path / "journal"
    worker = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert worker.stdout.readline() == "begun\n"
    worker.terminate()
    assert worker.wait(30) == -signal.SIGTERM
    assert json.loads(path.read_text()) == {"decode 8": {"vanished": 0, "stopped": 1, "error": None}}


def test_the_watchdog_ends_a_stuck_block_with_its_stack():
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert done.returncode == 1
    assert "idle is no reason to end" in done.stdout
    assert "--watchdog-timeout" in done.stderr
    assert 'File "<string>", line 10' in done.stderr
