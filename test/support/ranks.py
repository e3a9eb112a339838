"""Several ranks as real processes, each bounded so that a hang is a failure within seconds.

Ranks are forked from a server that has torch and FlashInfer loaded: importing them in eight processes takes half a
minute on two cores, forking takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import inspect
import multiprocessing as mp
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_PRELOAD = ["pytest", "torch", "torch.distributed", "flashinfer", "flashinfer.autotuner", "support.tiny_host"]


@dataclass
class Outcome:
    """What became of one rank: its result, or the exception's text, or how its process ended."""

    result: Any = None
    error: str | None = None
    exit_code: int | None = None
    seconds: float = 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_gloo(rank: int, size: int, port: int, bound_s: float) -> dist.TCPStore:
    """Make the default gloo group, whose collectives wait up to `bound_s`; returns the store, which rank 0 holds."""
    store = dist.TCPStore(
        "127.0.0.1", port, size, rank == 0, timeout=datetime.timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=bound_s),
    )
    return store


def _context(fresh: bool) -> Any:
    if fresh:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _load(file: str, name: str) -> Callable[..., Any]:
    """A function of a test file, which pytest's importlib mode gives no importable name."""
    spec = importlib.util.spec_from_file_location("ranks_test_module", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _run_rank(
    rank: int,
    file: str,
    name: str,
    args: tuple[Any, ...],
    results: Any,
    all_done: Any,
    environ: dict[str, str],
) -> None:
    os.environ.update(environ)
    began = time.monotonic()
    outcome = Outcome()
    try:
        outcome.result = _load(file, name)(rank, *args)
    except BaseException as error:
        outcome.error = (
            "".join(traceback.format_exception_only(error)).strip() + "\n" + traceback.format_exc()
        )
    outcome.seconds = time.monotonic() - began
    results.put((rank, outcome))
    results.close()
    results.join_thread()
    all_done.wait(10)  # rank 0 holds the store that the others may still be reading
    os._exit(0)  # a broken process group must not delay the end


def run_ranks(
    num_ranks: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    fresh: bool = False,
) -> list[Outcome]:
    """Call ``target(rank, *args)`` in one process per rank and collect every outcome.

    ``target`` is a module-level function. A rank that is still running after ``timeout_s`` is killed and its
    outcome says so; nothing is left behind. With ``fresh`` the processes import everything themselves: on a GPU they
    must, since importing FlashInfer may initialise CUDA, which does not survive a fork.
    """
    context, file = _context(fresh), inspect.getfile(target)
    results, all_done = context.Queue(), context.Event()
    environ = {
        k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "OMP_", "TMPDIR", "FLASHINFER_"))
    }
    processes = [
        context.Process(
            target=_run_rank,
            args=(rank, file, target.__name__, args, results, all_done, environ),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            rank, outcome = results.get(timeout=0.05)
            outcomes[rank] = outcome
            continue
        ended = {rank for rank, process in enumerate(processes) if process.exitcode is not None}
        if len(outcomes.keys() | ended) == num_ranks:
            break
    all_done.set()
    for rank, process in enumerate(processes):
        hung = process.is_alive() and rank not in outcomes
        process.join(0.5)
        if process.is_alive():
            process.kill()
            process.join(5)
        if rank not in outcomes:
            error = (
                f"still running after {timeout_s:g} s" if hung else f"ended with exit code {process.exitcode}"
            )
            outcomes[rank] = Outcome(error=error)
        outcomes[rank].exit_code = process.exitcode
    return [outcomes[rank] for rank in range(num_ranks)]


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """The results, when every rank returned; else an assertion with every rank's error."""
    errors = {rank: o.error for rank, o in enumerate(outcomes) if o.error is not None}
    assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
    return [outcome.result for outcome in outcomes]
