"""MegaMoE on one GPU: the harness's checks, and the built-in model served in FP8, tuned and untuned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from sglang.srt.utils.network import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).with_name("megamoe_harness.py")
MAX_STARTUP_S = 240


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not is_hopper(), reason="the FP8 kernel is for compute capability 9.0")


def environment(cache_dir: Path) -> dict[str, str]:
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY / "python"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": python_path, "SGLANG_CACHE_DIR": str(cache_dir)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("geometry", ["small", "builtin"])
def test_profiles_are_tuned_opened_captured_and_closed(geometry, tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(HARNESS), "lifecycle", "--geometry", geometry, "--out", str(out)]
    finished = subprocess.run(command, env=environment(tmp_path), timeout=380)
    checks = json.loads(out.read_text())["checks"]
    failed = {name: check["detail"] for name, check in checks.items() if not check["passed"]}
    assert finished.returncode == 0 and not failed


@pytest.mark.timeout(600)
def test_the_builtin_model_answers_rightly_in_fp8_tuned_and_untuned(tmp_path):
    scores = {}
    for name, flags in (("tuned", ()), ("untuned", ("--disable-flashinfer-autotune",))):
        with Server(tmp_path / f"{name}.log", environment(tmp_path), *flags) as server:
            report = server.info()["autotune"]
            if name == "tuned":
                assert report["megamoe"]["tuned"] == len(report["megamoe"]["capacities"])
            scores[name] = server.score(tmp_path / f"{name}.json")
    assert min(scores.values()) > 0.90, scores


class Server:
    """`sglang serve` with the built-in model through MegaMoE."""

    def __init__(self, log: Path, env: dict[str, str], *flags: str) -> None:
        self.port, self.log, self.env = free_port(), log, env
        command = [sys.executable, "-m", "sglang.cli.main", "serve", "--port", str(self.port), *flags]
        command += ["--moe-runner-backend", "flashinfer_megamoe", "--max-running-requests", "16"]
        command += ["--chunked-prefill-size", "512", "--max-total-tokens", "32768"]
        with open(log, "wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + MAX_STARTUP_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self._get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.3)
        self.process.kill()
        pytest.fail(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def __exit__(self, *exc_info: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=20)

    def info(self) -> dict:
        return self._get("/server_info").json()

    def score(self, out: Path) -> float:
        command = [sys.executable, "-m", "sglang.test.run_eval", "--eval-name", "arithmetic"]
        command += ["--port", str(self.port), "--num-examples", "200", "--output-file", str(out)]
        finished = subprocess.run(command, env=self.env, timeout=120, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
        return float(json.loads(out.read_text())["score"])
