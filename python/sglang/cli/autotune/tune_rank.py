"""One rank of `sglang autotune tune`: the start of a server's rank, up to the end of the autotune stage."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection

from sglang.srt.managers.process_life import begin_worker_life
from sglang.srt.managers.worker_environment import keep_bars_in_this_process, prepare_environment
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def run_rank(
    server_args: ServerArgs,
    rank: int,
    gpu_id: int,
    init_method: str,
    results: dict[int, Connection],
    parent_pid: int,
) -> None:
    """The life of the process: sends its report, or `{"error": words}`, and ends."""
    begin_worker_life(parent_pid)
    prepare_environment()
    keep_bars_in_this_process()
    from sglang.srt.utils.logs import setup_logging

    setup_logging(server_args.log_level)
    try:
        answer = _tune(server_args, rank, gpu_id, init_method)
    except Exception as error:
        words = str(error)  # of a mistake of the user, which says what to do
        if not isinstance(error, ValueError):
            logger.error("rank %d failed:\n%s", rank, traceback.format_exc())
            words = f"{type(error).__name__}: {error}"
        answer = {"error": words}
    results[rank].send(answer)
    results[rank].close()
    sys.stderr.flush()
    # Threads of libraries (NCCL, compilers) must not keep a finished rank alive.
    os._exit(1 if "error" in answer else 0)


def _tune(server_args: ServerArgs, rank: int, gpu_id: int, init_method: str) -> dict:
    import torch

    from sglang.srt.configs.served_model import read_model_config
    from sglang.srt.distributed import parallel_state
    from sglang.srt.managers.worker import rank_label, take_gpu
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.utils.device import resolved_device
    from sglang.srt.utils.logs import setup_logging

    setup_logging(server_args.log_level, rank_label(server_args, rank))
    device_name = resolved_device(server_args.device)
    device = torch.device(device_name, gpu_id) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        take_gpu(device)
    config = read_model_config(server_args, device_name)
    parallel = parallel_state.initialize(server_args, rank, init_method, device)
    runner = ModelRunner(server_args, config, parallel, gpu_id)
    # The votes go through a store of the first rank: it must not leave before all have read.
    parallel.world.barrier(server_args.dist_timeout)
    return runner.autotune_report.to_json()
