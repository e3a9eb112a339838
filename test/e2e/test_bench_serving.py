"""The load generator and the server, as two processes that know each other's HTTP only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def bench(server, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "sglang.bench_serving",
        "--port",
        str(server.port),
        "--disable-tqdm",
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_run_counts_exactly_the_tokens_that_it_asked_for(server, tmp_path):
    out = tmp_path / "runs.jsonl"
    done = bench(
        server,
        *(
            "--backend",
            "sglang-oai",
            "--num-prompts",
            "12",
            "--max-concurrency",
            "4",
            "--random-range-ratio",
            "1",
        ),
        *("--random-input-len", "20", "--random-output-len", "9", "--output-file", str(out)),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (
        12,
        240,
        108,
    )
    assert 1.0 < result["concurrency"] <= 4.0
    assert 0 < result["median_ttft_ms"] < result["median_e2e_latency_ms"]
    assert "Successful requests:" in done.stdout


def test_a_prompt_that_the_server_refuses_ends_the_run(server):
    done = bench(
        server,
        *("--backend", "sglang-oai", "--num-prompts", "2", "--random-range-ratio", "1"),
        *("--random-input-len", "4000", "--random-output-len", "9"),
    )
    assert done.returncode == 1
    assert "HTTP 400" in done.stderr and "Traceback" not in done.stderr
