"""A worker process of the sweep: builds candidates while others do, and times them while nobody else does.

A worker shares the GPU with the engine and its fellow workers but has a context of its own, so its compilations run
beside theirs and its crash is its own. It ends when its pipe closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.autotune.megamoe.kernels.base import BenchSpec, Knobs


@dataclass(frozen=True)
class Job:
    """`kind`: `screen` (prepare, check, time), `again` (time what was screened before) or `drop` (forget it)."""

    kind: str
    number: int
    capacity: int = 0
    knobs: Knobs | None = None
    repeats: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a job gave: the median time and the relative error, or why there is neither."""

    number: int
    time_us: float | None = None
    error: float | None = None
    prepare_s: float = 0.0
    problem: str | None = None


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is started with. `device` is the GPU's index, None on CPU; `lock_path` the timing lock's file."""

    bench: BenchSpec
    environment: dict[str, str]
    device: int | None
    lock_path: str


def work(connection: Any, setup: WorkerSetup) -> None:
    """The life of a worker: ready, then one outcome for each job until the pipe closes."""
    os.environ.update(setup.environment)
    try:
        bench = _create_bench(setup)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error)[:500]}")
        return
    import torch

    connection.send("ready")
    prepared: dict[int, Any] = {}
    # The grad mode of serving: tensors made in one mode may not be updated in the other.
    with torch.inference_mode(), contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            if job.kind == "drop":
                bench.release(prepared.pop(job.number))
                continue
            connection.send(_run(bench, setup.lock_path, job, prepared))


def _create_bench(setup: WorkerSetup) -> Any:
    if setup.device is not None:
        import torch

        torch.cuda.set_device(setup.device)
    module, name = setup.bench.factory.split(":")
    return getattr(importlib.import_module(module), name)(**setup.bench.arguments)


def _run(bench: Any, lock_path: str, job: Job, prepared: dict[int, Any]) -> Outcome:
    started = time.monotonic()
    try:
        if job.kind == "screen":
            assert job.knobs is not None
            candidate = bench.prepare(job.capacity, job.knobs)
            prepare_s = time.monotonic() - started
            prepared[job.number] = candidate
            with exclusive(lock_path):
                error = bench.error(candidate)
                return Outcome(job.number, bench.time_us(candidate, job.repeats), error, prepare_s)
        with exclusive(lock_path):
            return Outcome(job.number, bench.time_us(prepared[job.number], job.repeats))
    except Exception as error:  # a candidate that cannot run here loses
        return Outcome(job.number, problem=f"{type(error).__name__}: {str(error)[:300]}")


@contextlib.contextmanager
def exclusive(lock_path: str) -> Iterator[None]:
    """Hold the timing lock. It is a file lock, which the system drops when its holder dies."""
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
