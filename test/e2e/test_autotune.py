"""The whole story over HTTP: a cold start tunes, the next one does not, and the answers are the same throughout."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from sglang.srt.layers.moe.portfolio import OP_NAME

# Limits small enough that a cold start takes seconds.
QUICK = ("--max-running-requests", "16", "--chunked-prefill-size", "256")


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"12+7=19\n40-15=25\n{a}+{b}=" for a in range(3, 53, 5) for b in (4, 27, 58, 81, 90)]


def completions(server, prompts) -> list[str]:
    body = server.complete(prompts, max_tokens=6, temperature=0)
    return [choice["text"] for choice in sorted(body["choices"], key=lambda choice: choice["index"])]


def test_cold_warm_and_disabled_starts_answer_alike(start_server, prompts):
    cold = start_server(*QUICK, tiny=False).wait_ready()
    report = cold.info()["autotune"]
    assert report["status"] == "completed"
    assert report["profiles_tuned"] > 0 and report["fallbacks"] == 0
    assert report["records"]["tuned"] == report["profiles_tuned"]
    runners = {step["winners"][OP_NAME].split()[0] for step in report["steps"]}
    assert runners <= {"SortedMoE", "DenseMoE"}, "the report names who won each bucket"
    assert "Running FlashInfer autotune" in cold.log and "FlashInfer autotune completed in" in cold.log
    assert len(prompts) == 50
    answers = completions(cold, prompts)
    assert cold.stop() == 0

    warm = start_server(*QUICK, tiny=False).wait_ready()
    report = warm.info()["autotune"]
    assert report["profiles_tuned"] == 0 and report["fallbacks"] == 0
    assert report["records"]["user"] > 0
    assert {step["source"] for step in report["steps"]} == {"user"}
    assert completions(warm, prompts) == answers
    assert warm.stop() == 0

    disabled = start_server(*QUICK, "--disable-flashinfer-autotune", tiny=False).wait_ready()
    report = disabled.info()["autotune"]
    assert report["status"] == "skipped" and "--disable-flashinfer-autotune" in report["reason"]
    assert completions(disabled, prompts) == answers


def test_a_start_killed_while_tuning_resumes(start_server, tmp_path):
    first = start_server(*QUICK, tiny=False)
    first.wait_until("some steps are done", lambda: first.info()["autotune"].get("done", 0) >= 2, 60)
    for pid in first.worker_pids():
        subprocess.run(["kill", "-9", str(pid)], check=True)
    assert first.wait_exit() != 0
    (records,) = (tmp_path / "cache").rglob("rank_tp0_pp0_dp0.json")
    stored = [key for key in json.loads(records.read_text()) if not key.startswith("_")]
    assert stored
    second = start_server(*QUICK, tiny=False).wait_ready()
    report = second.info()["autotune"]
    assert report["status"] == "completed" and report["fallbacks"] == 0
    assert report["records"]["user"] == len(stored)
    assert report["profiles_tuned"] == len(report["steps"]) - len(stored)


def test_a_skipped_op_is_neither_tuned_nor_stored(start_server, tmp_path):
    server = start_server(*QUICK, "--flashinfer-autotune-skip-ops", OP_NAME).wait_ready()
    report = server.info()["autotune"]
    assert report["status"] == "skipped" and report["profiles_tuned"] == 0
    assert not list((tmp_path / "cache").rglob("rank_*.json"))


def test_run_eval_asks_200_questions_with_128_threads(start_server, tmp_path):
    server = start_server(*QUICK, tiny=False).wait_ready()
    output = tmp_path / "score.json"
    began = time.monotonic()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "sglang.test.run_eval",
            "--base-url",
            server.base_url,
            "--eval-name",
            "arithmetic",
        ]
        + ["--num-examples", "200", "--num-threads", "128", "--api", "completion", "--max-tokens", "8"]
        + ["--output-file", str(output)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(output.read_text())
    assert result["score"] > 0.90, f"{result} after {time.monotonic() - began:.0f} s"
    assert "Traceback" not in server.log and "Traceback" not in run.stderr
    assert server.get("/health").status_code == 200
