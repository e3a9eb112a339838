"""Which ranks a process starts, on which GPUs, with how many threads, and where the requests go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import tqdm

from sglang.srt.managers.dispatch import Dispatcher
from sglang.srt.managers.launch_plan import plan_launch
from sglang.srt.managers.worker_environment import keep_bars_in_this_process, share_cores
from sglang.srt.server_args import ServerArgs

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
}


def test_one_machine_starts_all_ranks_on_gpus_from_0():
    plan = plan_launch(ServerArgs(tp_size=2, pp_size=2), {})
    assert (list(plan.ranks), plan.first_gpu, plan.ranks_on_machine) == ([0, 1, 2, 3], 0, 4)
    assert plan.serves_http
    assert plan.init_method.startswith("tcp://127.0.0.1:")


def test_each_of_several_machines_starts_its_share():
    args = ServerArgs(tp_size=8, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000")
    plan = plan_launch(args, {})
    assert (list(plan.ranks), plan.first_gpu, plan.ranks_on_machine) == ([4, 5, 6, 7], 0, 4)
    assert not plan.serves_http
    assert plan.init_method == "tcp://10.0.0.1:5000"


def test_under_torchrun_a_process_has_one_rank_on_the_gpu_of_its_local_rank():
    plan = plan_launch(ServerArgs(tp_size=8), TORCHRUN)
    assert (list(plan.ranks), plan.first_gpu, plan.ranks_on_machine) == ([5], 1, 4)
    assert not plan.serves_http
    assert plan.init_method == "env://"
    assert plan_launch(ServerArgs(tp_size=8), {**TORCHRUN, "RANK": "0"}).serves_http


def test_torchrun_and_the_flags_must_agree():
    with pytest.raises(ValueError, match="torchrun starts 8 processes.*--tp-size x --pp-size asks for 4"):
        plan_launch(ServerArgs(tp_size=4), TORCHRUN)
    args = ServerArgs(tp_size=8, nnodes=2, dist_init_addr="10.0.0.1:5000")
    with pytest.raises(ValueError, match="--nnodes"):
        plan_launch(args, TORCHRUN)


def test_ranks_of_a_machine_share_its_cores_unless_the_user_has_said_how_many():
    environ: dict[str, str] = {}
    share_cores(1, environ)
    assert int(environ["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))
    environ = {}
    share_cores(10**6, environ)
    assert environ["OMP_NUM_THREADS"] == "1"
    environ = {"OMP_NUM_THREADS": "3"}
    share_cores(2, environ)
    assert environ["OMP_NUM_THREADS"] == "3"


def test_a_request_goes_to_the_replica_with_the_least_to_do():
    dispatcher = Dispatcher(3)
    assert [dispatcher.assign(f"r{i}", tokens) for i, tokens in enumerate([100, 10, 10, 10, 10])] == [
        0,
        1,
        2,
        1,
        2,
    ]
    dispatcher.release("r0")
    assert dispatcher.assign("r5", 15) == 0
    assert dispatcher.assign("r6", 1) == 0
    assert dispatcher.assign("r7", 50) == 0
    assert dispatcher.assign("r8", 1) == 1


def test_a_workers_bars_leave_no_semaphore_behind():
    code = (
        "from sglang.srt.managers.worker_environment import keep_bars_in_this_process as keep; keep();"
        "import tqdm; list(tqdm.tqdm(range(2), disable=False)); import os; os._exit(0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "leaked" not in run.stderr
    keep_bars_in_this_process()
    assert isinstance(tqdm.tqdm.get_lock(), type(threading.RLock()))
