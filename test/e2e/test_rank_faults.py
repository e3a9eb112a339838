"""Ranks of a server that are killed at every stage, and servers whose ranks several processes start."""

from __future__ import annotations

import os
import re
import signal
import sys

import httpx
import pytest

from sglang.srt.utils.network import free_port

pytestmark = pytest.mark.faults

FLAGS = ("--tp-size", "2", "--pp-size", "2")
STAGES = {1: "spawning workers", 0: "joining process groups", 3: "loading the model", 2: "autotune"}


def has_reached(info: dict, stage: str) -> bool:
    """Whether a start is at `stage`, or past it where it was over between two looks."""
    order = list(STAGES.values())
    now = info.get("stage")
    return info.get("status") == "ready" or (now in order and order.index(now) >= order.index(stage))


@pytest.mark.parametrize(("victim", "stage"), STAGES.items())
def test_a_rank_that_is_killed_in_the_start_is_named_and_takes_all_others_with_it(
    start_server, gone, victim, stage
):
    server = start_server(*FLAGS, tiny=False)
    server.wait_until("the ranks are there", lambda: len(server.worker_pids()) == 4, 60)
    server.wait_until(stage, lambda: has_reached(server.info(), stage), 60)
    pids = server.pids()
    os.kill(server.worker_pids()[victim], signal.SIGKILL)
    assert server.wait_exit() == 1
    assert gone(pids)
    assert f"The server stops: the worker of rank {victim} ended with signal SIGKILL" in server.log


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_under_load_is_named_and_its_clients_are_told(start_server, gone, victim):
    server = start_server(*FLAGS, "--disable-flashinfer-autotune", tiny=False).wait_ready()
    body = {"prompt": "12+7=", "max_tokens": 900, "n": 32, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        pids = server.pids()
        os.kill(server.worker_pids()[victim], signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert "error" in last, "the stream ends with what happened"
    assert server.wait_exit() == 1
    assert gone(pids)
    assert f"The server stops: the worker of rank {victim} ended with signal SIGKILL" in server.log


def two_nodes(start_server, *flags):
    """A server on two "machines", which are this one twice."""
    together = (*flags, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    return start_server(*together, "--node-rank", "0"), start_server(*together, "--node-rank", "1")


def test_two_machines_serve_together_and_stop_together(start_server, gone):
    first, second = two_nodes(start_server, *FLAGS, "--disable-flashinfer-autotune")
    first.wait_ready()
    assert len(first.worker_pids()) == len(second.worker_pids()) == 2
    assert first.complete("together", max_tokens=5)["choices"]
    pids = first.pids() + second.pids()
    assert first.stop() == 0
    assert second.wait_exit() == 0, "the other machine ends by itself"
    assert gone(pids)
    assert "Ready: ranks 2 to 3" in second.log
    assert "Traceback" not in first.log + second.log


def test_a_rank_of_another_machine_that_is_killed_ends_both(start_server, gone):
    first, second = two_nodes(start_server, *FLAGS, "--disable-flashinfer-autotune")
    first.wait_ready()
    pids = first.pids() + second.pids()
    os.kill(second.worker_pids()[1], signal.SIGKILL)
    assert second.wait_exit() == 1
    assert "the worker of rank 3 ended with signal SIGKILL" in second.log
    assert first.wait_exit() == 1
    assert re.search(
        r"the worker of rank [01] lost another rank, which has not ended on this machine", first.log
    )
    assert gone(pids)


def test_under_torchrun_each_process_has_a_rank_and_the_first_serves(start_server, gone):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    launcher += ("--master-port", str(free_port()))
    server = start_server("--tp-size", "2", "--disable-flashinfer-autotune", launcher=launcher).wait_ready()
    assert len(server.worker_pids()) == 2
    assert server.complete("together", max_tokens=5)["choices"]
    pids = server.pids()
    server.process.send_signal(signal.SIGTERM)
    server.wait_exit()
    assert gone(pids)
    assert "Stopping" in server.log


def test_a_rank_that_hangs_ends_all_within_the_bound(start_server, gone):
    server = start_server(
        "--tp-size", "2", "--disable-flashinfer-autotune", "--dist-timeout", "5"
    ).wait_ready()
    pids = server.pids()
    os.kill(server.worker_pids()[1], signal.SIGSTOP)
    assert server.wait_exit() == 1, "far sooner than without the flag"
    assert "the worker of rank 0 lost another rank" in server.log
    assert gone(pids)


# Python imports a module of this name when it starts: here rank 1 runs out of memory in one method.
OUT_OF_MEMORY = """
import multiprocessing
import torch
from {module} import {owner}
whole = {owner}.{method}
def short_of_memory(self, *args, **kwargs):
    if multiprocessing.current_process().name == "sglang-rank1" and {when}:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB, on purpose")
    return whole(self, *args, **kwargs)
{owner}.{method} = short_of_memory
"""


def out_of_memory(directory, module, owner, method, when="True"):
    """Environment in which rank 1 runs out of memory in `owner.method` of `module`."""
    text = OUT_OF_MEMORY.format(module=module, owner=owner, method=method, when=when)
    (directory / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}


def test_a_rank_that_runs_out_of_memory_while_it_serves_is_named(start_server, gone, tmp_path):
    environment = out_of_memory(tmp_path, "sglang.srt.managers.executor", "ModelExecutor", "launch")
    server = start_server("--tp-size", "2", "--disable-flashinfer-autotune", **environment).wait_ready()
    pids = server.pids()
    assert server.post("/v1/completions", json={"prompt": "more"}).status_code == 500
    assert server.wait_exit() == 1
    assert gone(pids)
    assert "The server stops: the worker of rank 1 failed" in server.log
    assert "worker of rank 0 lost another rank" in server.log


def test_a_rank_that_runs_out_of_memory_in_a_step_is_named_and_the_next_start_leaves_the_step_out(
    start_server, gone, tmp_path
):
    environment = out_of_memory(
        tmp_path,
        "sglang.srt.model_executor.autotune_host",
        "ModelRunnerHost",
        "dummy_forward",
        when="args[0].op_tokens == 4",
    )
    quick = ("--tp-size", "2", "--max-running-requests", "8", "--chunked-prefill-size", "16")
    server = start_server(*quick, **environment)
    server.wait_until("the ranks are there", lambda: len(server.worker_pids()) == 2, 60)
    pids = server.pids()
    assert server.wait_exit(90) == 1
    assert gone(pids)
    assert "rank 1 failed in autotune step decode 4" in server.log
    assert "The server stops: the worker of rank 1 failed" in server.log

    report = start_server(*quick).wait_ready().info()["autotune"]
    assert [left["step"] for left in report["left_out"]] == ["decode 4"]
    assert report["status"] == "completed" and report["fallbacks"] == 0
