"""Servers of several ranks over HTTP: they answer rightly, cold and warm, and no rank is outlived by another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

# Limits small enough that a cold start takes seconds.
QUICK = ("--max-running-requests", "64", "--chunked-prefill-size", "512")

TP2_PP2 = ("--tp-size", "2", "--pp-size", "2")
DP4_EP4 = ("--tp-size", "4", "--attn-dp-size", "4", "--ep-size", "4")


def score(server, tmp_path) -> float:
    """The share of 160 questions, 128 at a time, that the server answers rightly."""
    output = tmp_path / "score.json"
    command = [sys.executable, "-m", "sglang.test.run_eval", "--base-url", server.base_url]
    command += ["--num-examples", "160", "--num-threads", "128", "--output-file", str(output)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=90, env=environment)
    return json.loads(output.read_text())["score"]


@pytest.mark.parametrize("layout", [TP2_PP2, DP4_EP4], ids=["TP2xPP2", "DP4xEP4"])
def test_four_ranks_answer_rightly_cold_and_warm(start_server, gone, tmp_path, layout):
    cold = start_server(*QUICK, *layout, tiny=False).wait_ready()
    ranks = cold.info()["autotune"]["ranks"]
    assert len(ranks) == 4 and all(rank["profiles_tuned"] > 0 for rank in ranks)
    assert score(cold, tmp_path) > 0.90
    assert cold.stop() == 0

    warm = start_server(*QUICK, *layout, tiny=False).wait_ready()
    assert [rank["profiles_tuned"] for rank in warm.info()["autotune"]["ranks"]] == [0] * 4
    assert score(warm, tmp_path) > 0.90
    states = warm.info()["internal_states"]
    assert len(states) == (4 if layout is DP4_EP4 else 1)
    assert [state["num_used_tokens"] for state in states] == [0] * len(states), (
        "aborts and ends free everything"
    )
    pids = warm.pids()
    assert warm.stop() == 0
    assert gone(pids)


def test_a_rank_that_is_killed_is_named_and_takes_all_others_with_it(start_server, gone):
    server = start_server("--tp-size", "2", "--disable-flashinfer-autotune").wait_ready()
    assert server.complete("alive", max_tokens=3)["choices"]
    pids = server.pids()
    os.kill(server.worker_pids()[1], signal.SIGKILL)
    assert server.wait_exit() == 1
    assert gone(pids)
    assert "The server stops: the worker of rank 1 ended with signal SIGKILL" in server.log
    assert "Traceback" not in server.log, "the other rank says in a line that it lost one"
