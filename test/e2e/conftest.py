"""Real servers for the end-to-end tests: `sglang serve` as a subprocess, spoken to over HTTP only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang.srt.utils.network import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 120.0
EXIT_WITHIN_S = 60.0

TINY_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 264,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}


class ServerProcess:
    """One `sglang serve`; `base_url` is where it listens, `log` what it has written so far."""

    def __init__(
        self,
        arguments: list[str],
        log_path: Path,
        environment: dict[str, str],
        launcher: tuple[str, ...] = (sys.executable,),
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        command = [*launcher, "-m", "sglang.cli.main", "serve", "--port", str(self.port), *arguments]
        python_path = os.pathsep.join(
            filter(None, [str(REPOSITORY / "python"), os.environ.get("PYTHONPATH")])
        )
        defaults = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        with open(log_path, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **defaults, **environment},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def log_tail(self) -> str:
        return self.log[-4000:]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base_url + path, timeout=30.0)

    def post(self, path: str, **keywords) -> httpx.Response:
        return httpx.post(self.base_url + path, timeout=60.0, **keywords)

    def info(self) -> dict:
        return self.get("/server_info").json()

    def complete(self, prompt, **parameters) -> dict:
        """The body of a completion that succeeds."""
        response = self.post("/v1/completions", json={"prompt": prompt, **parameters})
        assert response.status_code == 200, response.text
        return response.json()

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        """Poll `holds` until it is true; fails with the log when the process ends or the time is up first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if holds():
                    return
            if self.process.poll() is not None:
                pytest.fail(
                    f"the server ended with {self.process.returncode} before {what}:\n{self.log_tail}"
                )
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {timeout_s} s: {what}\n{self.log_tail}")
            time.sleep(0.1)

    def wait_ready(self) -> ServerProcess:
        self.wait_until("ready", lambda: self.get("/health").status_code == 200, READY_WITHIN_S)
        return self

    def wait_exit(self, timeout_s: float = EXIT_WITHIN_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not end within {timeout_s} s:\n{self.log_tail}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; gives the exit code."""
        self.process.send_signal(number)
        return self.wait_exit()

    def pids(self) -> list[int]:
        """The server's process and everything below it, the server first."""
        pids = [self.process.pid]
        for pid in pids:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    pids += [int(child) for child in children.read_text().split()]
        return pids

    def worker_pids(self) -> list[int]:
        """Processes that run a rank (multiprocessing has a helper of its own beside them)."""
        return [pid for pid in self.pids()[1:] if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill(self) -> None:
        """End everything, whatever state it is in."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(EXIT_WITHIN_S)


def are_gone(pids: list[int], within_s: float = 30.0) -> bool:
    """Whether none of `pids` runs any more (a zombie does not run) at some moment of the next seconds."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline_s = time.monotonic() + within_s
    while any(runs(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model directory without weights, for `--load-format dummy`: one byte is one token, and it says gibberish."""
    directory = tmp_path_factory.mktemp("tiny-model")
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)} | {"<|end|>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    return directory


@contextlib.contextmanager
def _servers(directory: Path, tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(
        *arguments: str,
        tiny: bool = True,
        launcher: tuple[str, ...] = (sys.executable,),
        **environment: str,
    ) -> ServerProcess:
        """Start a server on the CPU; `tiny` serves `tiny_model`, else `arguments` or the default say what."""
        model = ["--model-path", str(tiny_model), "--load-format", "dummy"] if tiny else []
        defaults = {"SGLANG_CACHE_DIR": str(directory / "cache")}
        log_path = directory / f"server{len(started)}.log"
        flags = ["--device", "cpu", *model, *arguments]
        server = ServerProcess(flags, log_path, defaults | environment, launcher)
        started.append(server)
        return server

    try:
        yield start
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def start_server(tmp_path, tiny_model) -> Iterator[Callable[..., ServerProcess]]:
    """`start_server(*flags, tiny=True, launcher=..., **environment)` starts a server; all end with the test.

    The servers of one test share one fresh `SGLANG_CACHE_DIR`.
    """
    with _servers(tmp_path, tiny_model) as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory, tiny_model) -> Iterator[ServerProcess]:
    """A server of the tiny model that many tests share: none may stop it or leave work behind."""
    directory = tmp_path_factory.mktemp("shared-server")
    with _servers(directory, tiny_model) as start:
        yield start("--disable-flashinfer-autotune").wait_ready()


@pytest.fixture(scope="session")
def builtin_server(tmp_path_factory, tiny_model) -> Iterator[ServerProcess]:
    """A server of the built-in model, which can add and chat, that many tests share: see `server`."""
    directory = tmp_path_factory.mktemp("builtin-server")
    with _servers(directory, tiny_model) as start:
        yield start("--disable-flashinfer-autotune", "--enable-metrics", tiny=False).wait_ready()


@pytest.fixture
def gone() -> Callable[..., bool]:
    """`gone(pids)`: whether none of the processes runs any more within a few seconds."""
    return are_gone
