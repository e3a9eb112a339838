"""One rank of the server: a process that builds a model runner and schedules requests on it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune.agreement import AgreementError
from sglang.srt.autotune.failures import is_peer_failure
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.executor import ModelExecutor
from sglang.srt.managers.io_struct import Fatal, Ready, StartupProgress
from sglang.srt.managers.ipc import Endpoints, WorkerChannel
from sglang.srt.managers.process_life import Watchdog
from sglang.srt.managers.rank_sync import RankSync
from sglang.srt.managers.request_memory import RequestMemory
from sglang.srt.managers.schedule_policy import PrefillLimits
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.device import resolved_device
from sglang.srt.utils.logs import setup_logging

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker stands: its global rank, its GPU on this machine, and where the ranks meet."""

    rank: int
    gpu_id: int
    init_method: str


def run_worker(server_args: ServerArgs, place: WorkerPlace, endpoints: Endpoints) -> None:
    """The life of a worker process up to its exit code: 0 after a `Shutdown`, else 1."""
    setup_logging(server_args.log_level, rank_label(server_args, place.rank))
    channel = WorkerChannel(endpoints, receives=place.rank == 0)
    try:
        _serve(server_args, place, channel)
        exit_code = 0
    except Exception as error:
        lost_peer = _lost_peer(error)
        text = _last_words(error, lost_peer)
        verb = "lost another rank" if lost_peer else "failed"
        logger.error("The worker of rank %d %s:%s%s", place.rank, verb, "\n" if "\n" in text else " ", text)
        channel.send(Fatal(place.rank, text, lost_peer))
        exit_code = 1
    channel.close()
    sys.stderr.flush()
    # Threads of libraries (NCCL, compilers) must not keep a finished worker alive.
    os._exit(exit_code)


def _last_words(error: Exception, lost_peer: bool) -> str:
    """One line for a mistake of the user's that this tree found and for a rank that is gone, else the traceback."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if lost_peer or (isinstance(error, ValueError) and Path(raised_in).is_relative_to(_PACKAGE)):
        return " ".join(str(error).split())
    return traceback.format_exc()


def _lost_peer(error: BaseException | None) -> bool:
    """Whether `error` is that of another rank, which ended or does not answer."""
    while error is not None:
        if isinstance(error, AgreementError) or (isinstance(error, Exception) and is_peer_failure(error)):
            return True
        error = error.__cause__
    return False


def rank_label(server_args: ServerArgs, rank: int) -> str:
    """`TP1`, or `PP0 TP1` with pipeline stages: the log's name for a rank."""
    stage, tp_rank = divmod(rank, server_args.tp_size)
    return f"PP{stage} TP{tp_rank}" if server_args.pp_size > 1 else f"TP{tp_rank}"


def _serve(server_args: ServerArgs, place: WorkerPlace, channel: WorkerChannel) -> None:
    def progress(stage: str, detail: dict[str, Any] | None = None) -> None:
        channel.send(StartupProgress(place.rank, stage, detail or {}))

    device_name = resolved_device(server_args.device)
    device = torch.device(device_name, place.gpu_id) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        take_gpu(device)
    progress("joining process groups")
    model_config = read_model_config(server_args, device_name)
    parallel = parallel_state.initialize(server_args, place.rank, place.init_method, device)
    progress("loading the model")
    runner = ModelRunner(server_args, model_config, parallel, place.gpu_id, progress=progress)
    scheduler = create_scheduler(runner, channel)
    parallel.world.barrier(server_args.dist_timeout)
    channel.send(Ready(place.rank, _server_info(runner, device_name)))
    scheduler.run()


def create_scheduler(runner: ModelRunner, channel: WorkerChannel) -> Scheduler:
    """The scheduler of one rank over its `runner`; only the first rank uses `channel`."""
    args, parallel = runner.server_args, runner.parallel
    runner.moe_runner.freeze()  # nothing tunes any more
    sync = RankSync(parallel, channel)
    overlap = args.overlaps_schedule_on(runner.device.type)
    if runner.device.type == "cuda" and not overlap and not args.disable_overlap_schedule:
        logger.info(
            "Overlap of scheduling and forwards is off: it is not for pipeline stages and attention DP"
        )
    return Scheduler(
        executor=ModelExecutor(runner, Watchdog(args.watchdog_timeout), overlap),
        memory=RequestMemory(
            runner.req_to_token_pool, runner.allocator, RadixCache() if args.uses_radix_cache else None
        ),
        limits=PrefillLimits(
            max_tokens=runner.limits.prefill_ceiling,
            max_running_requests=runner.max_running_requests,
            chunked=args.chunked_prefill_size_on(runner.device.type) is not None,
        ),
        context_len=runner.model_config.context_length,
        eos_token_ids=runner.model_config.eos_token_ids,
        receive=sync.receive,
        send=sync.send,
        stream_interval=args.stream_interval,
        num_micro_batches=min(parallel.pp.size, runner.max_running_requests),
        share_load=sync.share_load if sync.shares_load else None,
        overlap=overlap,
    )


def take_gpu(device: torch.device) -> None:
    """Make `device` the one that everything in this process means by default, before anything touches a
    GPU. Raises `ValueError` when this machine has fewer GPUs.
    """
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ValueError(
            f"--tp-size x --pp-size puts a rank on GPU {device.index} and this machine has {count}: lower them, or "
            "spread the ranks over machines with --nnodes"
        )
    torch.cuda.set_device(device)


def _server_info(runner: ModelRunner, device_name: str) -> dict[str, Any]:
    return {
        "device": device_name,
        "max_total_num_tokens": runner.max_total_num_tokens,
        "max_running_requests": runner.max_running_requests,
        "autotune": runner.autotune_report,
    }
