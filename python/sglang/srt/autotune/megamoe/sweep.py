"""The sweep of a whole ladder by worker processes on the same device.

Compilation overlaps in as many workers as memory and cores allow; timing is exclusive. Workers run while the caller
opens the workspaces that are decided already. Whatever happens to a worker costs candidates, never the start.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.autotune.megamoe.kernels.base import BenchSpec, MegaMoEError, MegaMoEKernel
from sglang.srt.autotune.megamoe.sweep_search import Choice, LadderSearch
from sglang.srt.autotune.megamoe.sweep_worker import Job, Outcome, WorkerSetup, work

logger = logging.getLogger(__name__)

MAX_WORKERS = 16
#: Bounds: a worker's start (imports, context, weights), one job, and the whole sweep.
START_TIMEOUT_S, JOB_TIMEOUT_S, SWEEP_TIMEOUT_S = 120.0, 120.0, 600.0
_MAX_RESTARTS = 3
#: Imported once by the server that workers are forked from. FlashInfer is not among them: with CuTe DSL installed its
#: import initialises CUDA, and a process that is forked after that cannot use the GPU.
PRELOADED = ["torch", "sglang.srt.autotune.megamoe.sweep_worker"]


def preload_workers() -> None:
    """Start the process that workers are forked from, so that its imports run beside whatever the caller does next."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()


def num_workers(
    kernel: MegaMoEKernel,
    free_bytes: int | None,
    *,
    num_jobs: int = MAX_WORKERS,
    num_cores: int | None = None,
) -> int:
    """Workers that fit into `free_bytes` of device memory (None: not a limit) and the cores left beside the caller."""
    cores = num_cores if num_cores is not None else len(os.sched_getaffinity(0))
    fits = MAX_WORKERS if free_bytes is None else free_bytes // max(1, kernel.worker_bytes())
    return max(0, min(MAX_WORKERS, max(1, cores - 1), fits, num_jobs))


def sweep_reserve_bytes(kernel: MegaMoEKernel, num_cores: int | None = None) -> int:
    """Device memory that a sweep with all the workers it can use takes; to be free when the stage runs."""
    return num_workers(kernel, None, num_cores=num_cores) * kernel.worker_bytes()


@dataclass
class _Worker:
    number: int
    process: Any
    connection: Any
    since: float
    job: Job | None = None
    is_ready: bool = False


class WorkerSweep:
    """One sweep; iterate over `run` once.

    Args:
        environment: variables of the workers, on top of this process's own.
        exhaustive: try every candidate at every capacity.
    """

    def __init__(
        self,
        kernel: MegaMoEKernel,
        capacities: Sequence[int],
        workers: int,
        *,
        environment: dict[str, str] | None = None,
        exhaustive: bool = False,
        timeout_s: float = SWEEP_TIMEOUT_S,
        spec: BenchSpec | None = None,
    ) -> None:
        spec = spec or kernel.bench()
        assert spec is not None and workers > 0, f"{kernel.name} has no bench for worker processes"
        self.search = LadderSearch(kernel, capacities, exhaustive=exhaustive)
        self._spec, self._num_workers, self._timeout_s = spec, workers, timeout_s
        self._environment = {**kernel.required_environment(), **(environment or {})}
        self._device = kernel.device.index if kernel.device.type == "cuda" else None
        self._workers: dict[int, _Worker] = {}
        self._started = 0
        self._directory = tempfile.TemporaryDirectory(prefix="sglang-sweep-")
        self.problems: list[str] = []
        self.seconds: dict[str, float] = {"ready": 0.0, "prepare": 0.0, "total": 0.0}

    def run(self) -> Iterator[Choice]:
        """The decided capacities, as they are decided; all of them in the end."""
        decided: queue.Queue[Choice | BaseException | None] = queue.Queue()
        stop = threading.Event()
        thread = threading.Thread(
            target=self._conduct, args=(decided, stop), name="megamoe-sweep", daemon=True
        )
        thread.start()
        try:
            while (item := self._next(decided)) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join(timeout=10)
            self._directory.cleanup()

    def _next(self, decided: queue.Queue[Choice | BaseException | None]) -> Choice | BaseException | None:
        """The next item. The conductor bounds itself; that it says nothing for longer means that it hangs."""
        bound_s = self._timeout_s + JOB_TIMEOUT_S
        try:
            return decided.get(timeout=bound_s)
        except queue.Empty:
            raise MegaMoEError(f"the MegaMoE sweep did not go on within {bound_s:g} s") from None

    # conducting: everything below runs in the sweep's own thread ------------------------------------------

    def _conduct(self, decided: queue.Queue[Choice | BaseException | None], stop: threading.Event) -> None:
        started = time.monotonic()
        try:
            for _ in range(self._num_workers):
                self._start_worker()
            while not self.search.is_done and not stop.is_set():
                if time.monotonic() - started > self._timeout_s:
                    self._note(f"the sweep was ended after {self._timeout_s:g} s")
                    self.search.give_up("the sweep ran out of time")
                elif not self._workers:
                    self.search.give_up("no worker process is left")
                else:
                    self._hand_out()
                    self._listen(started)
                for choice in self.search.take_choices():
                    self._drop(choice.capacity)
                    decided.put(choice)
            self.seconds["total"] = time.monotonic() - started
            decided.put(None)
        except BaseException as error:
            decided.put(error)
        finally:
            for worker in list(self._workers.values()):
                self._end(worker)

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        lock = str(Path(self._directory.name, "timing.lock"))
        setup = WorkerSetup(self._spec, self._environment, self._device, lock)
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()
        self._workers[self._started] = _Worker(self._started, process, ours, time.monotonic())
        self._started += 1

    def _hand_out(self) -> None:
        for worker in list(self._workers.values()):
            if worker.is_ready and worker.job is None:
                job = self.search.take(worker.number)
                if job is not None:
                    worker.job, worker.since = job, time.monotonic()
                    self._send(worker, job)

    def _listen(self, started: float) -> None:
        by_connection = {worker.connection: worker for worker in self._workers.values()}
        for connection in multiprocessing.connection.wait(list(by_connection), timeout=0.2):
            self._hear(by_connection[connection], started)
        for worker in list(self._workers.values()):
            bound = JOB_TIMEOUT_S if worker.is_ready else START_TIMEOUT_S
            if (worker.job is not None or not worker.is_ready) and time.monotonic() - worker.since > bound:
                self._lose(worker, f"it did not answer within {bound:g} s")

    def _hear(self, worker: _Worker, started: float) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=1)
            self._lose(worker, f"it ended with exit code {worker.process.exitcode}")
            return
        if isinstance(message, Outcome):
            worker.job = None
            self.seconds["prepare"] += message.prepare_s
            self.search.report(message)
        elif message == "ready":
            worker.is_ready = True
            self.seconds["ready"] = max(self.seconds["ready"], time.monotonic() - started)
        else:
            self._lose(worker, f"it could not start: {message}", restart=False)

    def _lose(self, worker: _Worker, why: str, *, restart: bool = True) -> None:
        """A worker is gone; another takes its place a few times, since a bad candidate may have killed it."""
        self._note(f"worker {worker.number} was lost: {why}")
        self._end(worker)
        self.search.lost(worker.number)
        if restart and self._started < self._num_workers + _MAX_RESTARTS:
            self._start_worker()

    def _drop(self, capacity: int) -> None:
        """Let workers free the candidates of a decided capacity."""
        for worker in list(self._workers.values()):
            for number in self.search.held_by(worker.number, capacity):
                self._send(worker, Job("drop", number))

    def _send(self, worker: _Worker, job: Job) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is listened to
            worker.connection.send(job)

    def _end(self, worker: _Worker) -> None:
        self._workers.pop(worker.number, None)
        worker.connection.close()
        worker.process.terminate()
        worker.process.join(timeout=5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(timeout=5)

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        logger.warning("MegaMoE sweep: %s", problem)
