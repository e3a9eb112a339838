"""Piece `serving`: real servers under load, untuned, tuned, and with the portfolio."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang.srt.autotune.bench.geometry import write_config, write_tokenizer
from sglang.srt.autotune.bench.load import Load, run_load
from sglang.srt.utils.network import free_port

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
READY_WITHIN_S = 280.0
LOAD_WITHIN_S = 280.0
STOP_WITHIN_S = 30.0

#: FlashInfer alone untuned and tuned, and what a start without flags takes in bfloat16 on Hopper.
ARMS: dict[str, list[str]] = {
    "default": ["--moe-runner-backend", "flashinfer_cutlass", "--disable-flashinfer-autotune"],
    "tuned": ["--moe-runner-backend", "flashinfer_cutlass"],
    "portfolio": ["--moe-runner-backend", "portfolio"],
}


@dataclass(frozen=True)
class Traffic:
    """What clients ask: random prompts of `input_len` tokens and answers of `output_len`.

    Each concurrency sends `requests_per_client` times as many requests, at least four; that and the lengths are what is
    cut to make all of it fit into minutes.
    """

    requests_per_client: int = 2
    input_len: int = 512
    output_len: int = 128

    def load(self, concurrency: int, vocab_size: int) -> Load:
        num_requests = max(4, self.requests_per_client * concurrency)
        return Load(concurrency, num_requests, self.input_len, self.output_len, vocab_size)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def measure_serving(
    config: dict[str, Any],
    concurrencies: Sequence[int],
    requests_per_client: int = 2,
    input_len: int = 512,
    output_len: int = 128,
    flags: Sequence[str] = (),
    log_folder: Path | None = None,
) -> dict[str, Any]:
    """Start a server for each arm, with records of its own, and load it at each concurrency."""
    traffic = Traffic(requests_per_client, input_len, output_len)
    arms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        model = write_config(Path(folder, "model"), config)
        write_tokenizer(model, config["vocab_size"])
        for arm, arm_flags in ARMS.items():
            command = [
                *("--model-path", str(model), "--load-format", "dummy"),
                *("--context-length", str(max(1024, input_len + output_len)), *flags, *arm_flags),
            ]
            log_path = (log_folder or Path(folder)) / f"server-{arm}.log"
            environment = {"SGLANG_CACHE_DIR": str(Path(folder, "cache", arm))}
            measured = measure_arm(
                arm, command, concurrencies, traffic, config["vocab_size"], log_path, environment
            )
            arms[arm] = {"backend": arm_flags[arm_flags.index("--moe-runner-backend") + 1], **measured}
    return {**traffic.to_json(), "arms": arms}


def measure_arm(
    arm: str,
    command: list[str],
    concurrencies: Sequence[int],
    traffic: Traffic,
    vocab_size: int,
    log_path: Path,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Start one server with the flags of `command`, load it at each concurrency, and stop it."""
    began = time.monotonic()
    with server(command, log_path, environment) as port:
        result: dict[str, Any] = {"start_s": time.monotonic() - began, "command": command}
        info = httpx.get(f"http://{HOST}:{port}/server_info", timeout=30.0, trust_env=False).json()
        result["autotune"] = info.get("autotune")
        run_load(HOST, port, Load(1, 1, traffic.input_len, 8, vocab_size), LOAD_WITHIN_S)
        result["rows"] = rows = []
        for concurrency in concurrencies:
            row = run_load(HOST, port, traffic.load(concurrency, vocab_size), LOAD_WITHIN_S)
            logger.info(
                "%s at %d: %.0f tokens/s, TTFT %.0f ms, ITL %.2f ms",
                arm,
                concurrency,
                row["output_tokens_per_s"],
                row["ttft_ms"],
                row["itl_ms"],
            )
            rows.append(row)
    return result


@contextlib.contextmanager
def server(flags: Sequence[str], log_path: Path, environment: dict[str, str]) -> Iterator[int]:
    """A ready server; gives its port and stops it, whatever happens inside.

    Raises:
        RuntimeError: it ended or was not ready in time; the message holds the end of its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        _wait_ready(process, f"http://{HOST}:{port}/health", log_path)
        yield port
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{_tail(log_path)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready in {READY_WITHIN_S:g} s:\n{_tail(log_path)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; kill its whole process group when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log_path: Path) -> str:
    return log_path.read_text(errors="replace")[-3000:]
