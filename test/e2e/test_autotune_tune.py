"""`sglang autotune tune`: tunes without serving, and its exit code tells what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TUNE_WITHIN_S = 120.0
#: Five steps only.
SMALL = ["--max-running-requests", "4", "--chunked-prefill-size", "16"]


@pytest.fixture
def sglang(tiny_model, tmp_path):
    """`sglang(*arguments, **environment)` runs a command on the tiny model to its end."""

    def run(command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line(command, tiny_model, *arguments),
            capture_output=True,
            text=True,
            timeout=TUNE_WITHIN_S,
            env=variables(tmp_path, **environment),
        )

    return run


def command_line(command: str, model: Path, *arguments: str) -> list[str]:
    flags = ["--device", "cpu", "--model-path", str(model), "--load-format", "dummy", *SMALL, *arguments]
    return [sys.executable, "-m", "sglang.cli.main", "autotune", command, *flags]


def variables(directory: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "SGLANG_CACHE_DIR": str(directory / "cache"), **more}


def test_a_second_start_finds_what_tune_has_kept_and_the_log_has_only_our_own_lines(sglang, tmp_path):
    cold = sglang("tune", "--flashinfer-autotune-report", str(tmp_path / "cold.json"))
    assert cold.returncode == 0, cold.stderr
    assert "sglang autotune tune: done in" in cold.stdout
    assert "Running FlashInfer autotune" in cold.stderr and "FlashInfer autotune completed" in cold.stderr
    for chatter in ("%|", "[Autotuner]", "[AutoTuner]", "flashinfer.jit", "Warning", "WARNING", "Traceback"):
        assert chatter not in cold.stderr

    plan = json.loads(sglang("plan", "--json").stdout)
    assert plan["todo"] == [] and plan["records"]["ranks"][0]["exists"]

    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "sglang.cli.main",
            "autotune",
            "show",
            plan["records"]["ranks"][0]["path"],
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=TUNE_WITHIN_S,
        env=variables(tmp_path),
    )
    records = json.loads(shown.stdout)["files"][0]["records"]
    winners = {
        step["num_tokens"]: step["winners"]
        for step in json.loads((tmp_path / "cold.json").read_text())["steps"]
    }
    for record in records:
        assert winners[record["bucket"]] == {"sglang::moe": f"{record['runner']} {record['tactic_words']}"}
    assert len(records) == len(winners)

    warm = sglang(
        "tune", "--flashinfer-autotune-report", str(tmp_path / "warm.json"), "--log-level", "warning"
    )
    assert (warm.returncode, warm.stderr) == (0, "")
    reports = [json.loads((tmp_path / name).read_text()) for name in ("cold.json", "warm.json")]
    assert reports[0]["profiles_tuned"] > 0 == reports[1]["profiles_tuned"]


def test_two_ranks_tune_together_and_one_of_them_speaks(sglang):
    result = sglang("tune", "--tp-size", "2")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("FlashInfer autotune completed") == 1
    plan = json.loads(sglang("plan", "--tp-size", "2", "--json").stdout)
    assert [rank["exists"] for rank in plan["records"]["ranks"]] == [True, True] and plan["todo"] == []


def test_steps_left_over_by_the_budget_are_exit_code_3(sglang):
    result = sglang("tune", "--flashinfer-autotune-budget", "0.001")
    assert result.returncode == 3
    assert "incomplete: " in result.stderr and "steps left out" in result.stderr


def test_a_start_that_would_skip_is_exit_code_3_with_the_reason(sglang):
    result = sglang("tune", "--enable-deterministic-inference")
    assert result.returncode == 3
    assert "nothing was tuned: --enable-deterministic-inference" in result.stderr


def test_records_that_cannot_be_kept_are_a_failure(sglang, tmp_path):
    (tmp_path / "file").touch()
    result = sglang("tune", SGLANG_CACHE_DIR=str(tmp_path / "file"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("set SGLANG_CACHE_DIR to a writable directory")


def test_a_mistake_is_one_line_and_exit_code_2(sglang):
    result = sglang("tune", "--disable-flashinfer-autotune")
    assert (result.returncode, result.stderr) == (
        2,
        "sglang autotune tune: error: --disable-flashinfer-autotune leaves nothing to do here: leave it out\n",
    )


def test_weights_that_are_missing_are_a_failure_in_words(sglang):
    result = sglang("tune", "--load-format", "safetensors")
    assert result.returncode == 1
    assert "sglang autotune tune: failed: --model-path" in result.stderr and "Traceback" not in result.stderr


def test_an_interrupt_ends_all_ranks_in_words_and_impatience_changes_nothing(tiny_model, tmp_path, gone):
    process = subprocess.Popen(
        command_line("tune", tiny_model, "--tp-size", "2"),
        stderr=subprocess.PIPE,
        text=True,
        env=variables(tmp_path),
        start_new_session=True,
    )
    try:
        ranks = wait_for_ranks(process)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 130
        assert errors.endswith("\nsglang autotune tune: interrupted; what was tuned is kept\n")
        assert "Traceback" not in errors
        assert gone(ranks)
    finally:
        process.kill()
        process.wait()


def wait_for_ranks(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of both ranks, once they run."""
    deadline_s = time.monotonic() + TUNE_WITHIN_S
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")
