"""MegaMoE served over HTTP on several GPUs (or one): right answers in FP8, and load untuned, tuned, and started warm.

    python test/native/megamoe_serving.py --gpus 2 [--out report.json] [--pieces eval load] [--layers 48]

`eval` serves the built-in model, its experts quantised to FP8, tuned and untuned, under `run_eval`. `load` serves the
geometry of Qwen3-30B-A3B with dummy weights under `bench_serving`, with `--disable-flashinfer-autotune` and tuned. Both
then start the tuned server once more on its records. Exit status 1 when a server does not come up, a score is 0.90 or
below, a request fails, or a warm start tunes. Where the GPUs have no NVLink multicast, set the NVSHMEM variables that
`docs/megamoe.md` names. `--device cpu --pieces eval` runs the same over gloo with the reference kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import httpx

from sglang.srt.autotune.bench.geometry import QWEN3_30B_A3B, write_config, write_tokenizer
from sglang.srt.utils.network import free_port

PYTHON_PATH = sys.path[0]
BACKENDS = {"cuda": "flashinfer_megamoe", "cpu": "reference_megamoe"}
ARMS = {"untuned": ["--disable-flashinfer-autotune"], "tuned": [], "warm": []}
RECORDS = {"untuned": "untuned", "tuned": "tuned", "warm": "tuned"}
"""Arm to the folder of records that it starts on."""
READY_WITHIN_S, CLIENT_WITHIN_S, STOP_WITHIN_S = 540.0, 200.0, 60.0
INPUT_LEN, OUTPUT_LEN = 512, 128


class Servers:
    """Starts servers one after the other on the same GPUs, each arm with records of its own."""

    def __init__(self, num_ranks: int, device: str, root: Path) -> None:
        self.root = root
        self.flags = ["--device", device, "--moe-runner-backend", BACKENDS[device]]
        for flag in ("tp-size", "attn-dp-size", "ep-size"):
            self.flags += [f"--{flag}", str(num_ranks)]

    def environment(self, records: str) -> dict[str, str]:
        python_path = os.pathsep.join(filter(None, [PYTHON_PATH, os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "PYTHONPATH": python_path,
            "SGLANG_CACHE_DIR": str(self.root / "cache" / records),
        }

    @contextlib.contextmanager
    def serving(self, piece: str, arm: str, *flags: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """A ready server's port, and what is known of its start.

        Raises:
            RuntimeError: it ended, was not ready in time or tuned though warm; the message holds the end of its log.
        """
        name, port, began = f"{piece}-{arm}", free_port(), time.monotonic()
        log = self.root / f"server-{name}.log"
        command = [sys.executable, "-m", "sglang.cli.main", "serve", "--port", str(port), *self.flags]
        command += [*flags, *ARMS[arm]]
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=self.environment(f"{piece}-{RECORDS[arm]}")
            )
        try:
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() - began > READY_WITHIN_S:
                    raise RuntimeError(f"{name}: not ready:\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.3)
            start_s = time.monotonic() - began
            report = httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=30).json()["autotune"]
            if arm == "warm" and report["profiles_tuned"] + report["megamoe"]["tuned"]:
                raise RuntimeError(f"{name}: tuned again:\n{log.read_text(errors='replace')[-4000:]}")
            yield port, {"start_s": round(start_s, 1), "autotune": report}
        finally:
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def client(self, module: str, port: int, *words: str) -> dict[str, Any]:
        """Run a client module against `port` and give what it wrote: a document, or the last of several lines.

        Raises:
            RuntimeError: it failed; the message holds its output.
        """
        out = self.root / f"{module}-{port}.json"
        command = [sys.executable, "-m", module, "--port", str(port), "--output-file", str(out), *words]
        finished = subprocess.run(
            command, env=self.environment("client"), timeout=CLIENT_WITHIN_S, capture_output=True, text=True
        )
        if finished.returncode:
            raise RuntimeError(f"{module} failed: {finished.stdout[-2000:]}{finished.stderr[-2000:]}")
        text = out.read_text().strip()
        return json.loads(text if module.endswith("run_eval") else text.splitlines()[-1])


def is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    return False


def evaluate(servers: Servers, arms: Sequence[str]) -> list[dict[str, Any]]:
    """Scores of the built-in model in FP8."""
    rows = []
    sizes = ["--max-running-requests", "16", "--chunked-prefill-size", "512", "--max-total-tokens", "32768"]
    for arm in arms:
        with servers.serving("eval", arm, *sizes) as (port, row):
            answers = servers.client("sglang.test.run_eval", port, "--num-examples", "200")
            rows.append({"arm": arm, **row, "score": answers["score"], "failed": answers["score"] <= 0.90})
        print(f"eval {arm:8} ready {row['start_s']:6.1f} s  score {rows[-1]['score']:.3f}", flush=True)
    return rows


def load(
    servers: Servers, arms: Sequence[str], layers: int, concurrencies: list[int]
) -> list[dict[str, Any]]:
    """Throughput and latencies of dummy weights in Qwen3-30B-A3B's geometry."""
    model = write_config(servers.root / "model", QWEN3_30B_A3B, num_hidden_layers=layers)
    write_tokenizer(model, QWEN3_30B_A3B["vocab_size"])
    sizes = ["--max-running-requests", str(max(concurrencies)), "--chunked-prefill-size", "2048"]
    sizes += ["--context-length", "1024", "--model-path", str(model), "--load-format", "dummy"]
    rows = []
    for arm in arms:
        with servers.serving("load", arm, *sizes) as (port, start):
            print(f"load {arm:8} ready {start['start_s']:6.1f} s", flush=True)
            for concurrency in concurrencies:
                words = ["--num-prompts", str(max(4, 2 * concurrency)), "--max-concurrency", str(concurrency)]
                words += ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
                figures = servers.client("sglang.bench_serving", port, *words, "--random-range-ratio", "1")
                rows.append({"arm": arm, "concurrency": concurrency, **figures, "start": start})
                print(
                    f"load {arm:8} at {concurrency:4}: "
                    f"{figures['output_throughput']:8.0f} tokens/s  TTFT {figures['median_ttft_ms']:7.1f} ms  "
                    f"TPOT {figures['median_tpot_ms']:6.2f} ms",
                    flush=True,
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, default=2, help="ranks, each with a GPU of its own unless on the CPU"
    )
    parser.add_argument("--device", choices=tuple(BACKENDS), default="cuda")
    parser.add_argument("--pieces", nargs="+", choices=("eval", "load"), default=["eval", "load"])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(ARMS),
        default=list(ARMS),
        help="a warm start needs a tuned one before it",
    )
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B["num_hidden_layers"])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "gpus": args.gpus,
        "device": args.device,
        "layers": args.layers,
        "problems": [],
    }
    with tempfile.TemporaryDirectory(prefix="megamoe-serving-") as folder:
        servers = Servers(args.gpus, args.device, Path(folder))
        for piece in args.pieces:
            try:
                if piece == "eval":
                    results[piece] = evaluate(servers, args.arms)
                else:
                    results[piece] = load(servers, args.arms, args.layers, args.concurrencies)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"FAILED {piece}: {error}", flush=True)
                results["problems"].append(f"{piece}: {error}")
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
    return 1 if results["problems"] or any(row["failed"] for row in results.get("eval", [])) else 0


if __name__ == "__main__":
    sys.exit(main())
