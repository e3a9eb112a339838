"""Starts one worker process per rank of this launch, watches them, and ends them all."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from sglang.srt.managers.ipc import Endpoints
from sglang.srt.managers.launch_plan import LaunchPlan, plan_launch
from sglang.srt.managers.process_life import begin_worker_life
from sglang.srt.managers.worker_environment import keep_bars_in_this_process, prepare_environment, share_cores
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class WorkerGroup:
    """The worker processes of this launch; `processes` maps ranks to them."""

    def __init__(self) -> None:
        self.processes: dict[int, BaseProcess] = {}

    def start(
        self,
        server_args: ServerArgs,
        endpoints: Any,
        target: Callable[..., None] | None = None,
        plan: LaunchPlan | None = None,
    ) -> None:
        """Spawn the workers of `plan`. To be called on the main thread: a worker dies with the thread that started it.

        `target` is what a worker runs, by default a rank of the server; `endpoints` is handed to it.
        """
        spawn = multiprocessing.get_context("spawn")
        plan = plan or plan_launch(server_args)
        for gpu_id, rank in enumerate(plan.ranks, plan.first_gpu):
            process = spawn.Process(
                target=_enter,
                args=(
                    plan.ranks_on_machine,
                    target or _run_worker,
                    (server_args, rank, gpu_id, plan.init_method, endpoints, os.getpid()),
                ),
                name=f"sglang-rank{rank}",
            )
            process.start()
            self.processes[rank] = process

    def on_exit(
        self, watch_fd: Callable[[int, Callable[[], None]], None], died: Callable[[int], None]
    ) -> None:
        """Have `died(rank)` called when a worker ends; `watch_fd` is an event loop's `add_reader`."""
        for rank, process in self.processes.items():
            watch_fd(process.sentinel, partial(died, rank))

    def wait(self, timeout_s: float) -> bool:
        """Whether all workers have ended within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
        return not any(process.is_alive() for process in self.processes.values())

    def stop(self, timeout_s: float) -> None:
        """End all workers and what they started: SIGTERM first, SIGKILL after `timeout_s`."""
        for process in self.processes.values():
            if process.is_alive():
                process.terminate()
        if not self.wait(timeout_s):
            logger.warning("Workers did not end within %g s and are killed", timeout_s)
        for process in self.processes.values():
            # The group of a worker may outlive it: compilers that it had started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                assert process.pid is not None, "it was started"
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _enter(ranks_on_machine: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    share_cores(ranks_on_machine)  # before torch is imported, which reads it once
    target(*args)


def _run_worker(
    server_args: ServerArgs,
    rank: int,
    gpu_id: int,
    init_method: str,
    endpoints: Endpoints,
    parent_pid: int,
) -> None:
    begin_worker_life(parent_pid)
    prepare_environment()
    keep_bars_in_this_process()
    # Imported in the worker only: it pulls in torch, which the main process can do without.
    from sglang.srt.managers.worker import WorkerPlace, run_worker

    run_worker(server_args, WorkerPlace(rank, gpu_id, init_method), endpoints)
