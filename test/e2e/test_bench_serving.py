"""The load generator and the server, as two processes that know each other's HTTP only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def bench(server, flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang.bench_serving", "--port", str(server.port), "--disable-tqdm"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *flags.split()], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_a_run_counts_exactly_the_tokens_that_it_asked_for(builtin_server, tmp_path, backend):
    out = tmp_path / "runs.jsonl"
    lengths = "--random-input-len 20 --random-output-len 9 --random-range-ratio 1"
    done = bench(
        builtin_server,
        f"--backend {backend} --num-prompts 12 --max-concurrency 4 {lengths} --flush-cache --output-file {out}",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 108)
    if backend == "sglang-oai-chat":
        assert result["total_input_tokens"] > 240, "the template adds some"
    else:
        assert (result["total_input_tokens"], result["total_cached_tokens"]) == (240, 0)
    assert 1.0 < result["concurrency"] <= 4.0
    assert 0 < result["median_ttft_ms"] < result["median_e2e_latency_ms"]
    assert "Successful requests:" in done.stdout


def test_a_prompt_that_the_server_refuses_ends_the_run(server):
    lengths = "--random-input-len 4000 --random-output-len 9 --random-range-ratio 1"
    done = bench(server, f"--backend sglang-oai --num-prompts 2 {lengths}")
    assert done.returncode == 1
    assert "HTTP 400" in done.stderr and "Traceback" not in done.stderr
