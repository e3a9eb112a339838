"""Several GPUs: every layout answers as one GPU does, and its ranks tune together, over NCCL.

    torchrun --nproc-per-node 2 test/native/multi_gpu.py [--out report.json]

For tensor parallelism and for attention DP with expert parallelism, on all GPUs: a cold start, a warm one, one with
only rank 0's records left, and a warm one again, each in fresh processes; then real servers under `run_eval`. Prints a
table with a verdict for each; exit status 1 when a check fails. With a number of GPUs that is no power of two the
largest one below it is used. `--device cpu` runs the same over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import msgspec
import torch
import torch.distributed as dist

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.records.record import question_of
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.distributed.parallel_state import ParallelState, initialize
from sglang.srt.managers.io_struct import BatchTokenOutput, Shutdown, TokenizedRequest, WorkerMessage
from sglang.srt.managers.worker import create_scheduler
from sglang.srt.managers.worker_environment import prepare_environment
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.arithmetic import few_shot_prompt, held_out_questions

NUM_QUESTIONS, NUM_SHOTS, NUM_TOKENS = 96, 8, 6
NEWLINE = 10
MAX_NEAR_TIES = 0.04
"""Share of answers that may differ: rounding to BF16 in another order turns the choice where two tokens nearly tie."""
START_S, SERVER_S = 240.0, 240.0
FLAGS: dict[str, Any] = {
    "max_running_requests": 64,
    "chunked_prefill_size": 1024,
    "max_total_tokens": 16384,
    "dist_timeout": 120.0,
}
TORCHRUN_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def layouts(num_gpus: int) -> dict[str, dict[str, int]]:
    """What is run on `num_gpus`, a power of two; the built-in model has four heads."""
    tp = {"tp_size": num_gpus, "attn_dp_size": max(1, num_gpus // 4)}
    return {
        f"TP{num_gpus}" + (f" DP{num_gpus // 4}" if num_gpus > 4 else ""): tp,
        f"DP{num_gpus} EP{num_gpus}": {
            "tp_size": num_gpus,
            "attn_dp_size": num_gpus,
            "ep_size": num_gpus,
        },
    }


def free_port() -> int:
    """A port that nothing listens on, outside of the range from which the system gives ports to connections.

    Between this and the rank that listens on it lie seconds, in which the many connections of other starts come and go.
    """
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Client:
    """Stands where the main process would: all requests at once, and a shutdown when they have finished."""

    def __init__(self, requests: list[TokenizedRequest]) -> None:
        self.to_come, self.unfinished = requests, {request.rid for request in requests}
        self.tokens: dict[str, list[int]] = {request.rid: [] for request in requests}

    def receive(self, may_wait: bool) -> list[Any]:
        arrived, self.to_come = self.to_come, []
        return arrived or ([] if self.unfinished else [Shutdown()])

    def receive_raw(self, may_wait: bool) -> list[msgspec.Raw]:
        return [msgspec.Raw(msgspec.msgpack.encode(message)) for message in self.receive(may_wait)]

    def send(self, message: WorkerMessage) -> None:
        assert isinstance(message, BatchTokenOutput)
        for output in message.outputs:
            self.tokens[output.rid] += output.token_ids
            if output.finish_reason is not None:
                self.unfinished.discard(output.rid)

    def send_raw(self, message: Any) -> None:
        self.send(msgspec.msgpack.decode(message, type=WorkerMessage))


def make_requests(num_replicas: int) -> list[TokenizedRequest]:
    """Greedy questions of the built-in model's task, whose tokens are bytes."""
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [
        TokenizedRequest(
            str(i), list(few_shot_prompt(*question).encode()), sampling, replica=i % num_replicas
        )
        for i, question in enumerate(held_out_questions(NUM_QUESTIONS, NUM_SHOTS, seed=11))
    ]


def run_start(sizes: dict[str, int], rank: int, port: int, device: str, tunes: bool) -> dict[str, Any]:
    """One rank of one start, in a process of its own: what it answered and what its stage did."""
    prepare_environment()
    args = ServerArgs(device=device, disable_flashinfer_autotune=not tunes, **FLAGS, **sizes)
    torch_device = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    else:
        torch.set_num_threads(1)
    parallel = ParallelState.single()
    if args.world_size > 1:
        parallel = initialize(args, rank, f"tcp://127.0.0.1:{port}", torch_device)
    runner = ModelRunner(args, read_model_config(args, device), parallel, rank)
    client = Client(make_requests(args.attn_dp_size))
    create_scheduler(runner, client).run()  # type: ignore[arg-type]
    if args.world_size > 1:
        parallel.world.barrier(60)
    report = runner.autotune_report.to_json()
    winners = {question_of(key): str(entry[:2]) for key, entry in flashinfer_api.stored_entries().items()}
    answers = [answer(client.tokens[str(i)]) for i in range(NUM_QUESTIONS)] if rank == 0 else []
    return {"answers": answers, "winners": winners, "report": report}


def answer(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NEWLINE)] if NEWLINE in tokens else tokens


@dataclass
class Row:
    """One line of the table."""

    name: str
    seconds: float
    profiles: list[int] = field(default_factory=list)
    detail: str = ""
    failed: list[str] = field(default_factory=list)

    def print(self) -> None:
        verdict = f"FAILED: {', '.join(self.failed)}" if self.failed else "ok"
        profiles = "/".join(map(str, self.profiles)) or "-"
        print(f"{self.name:34} {self.seconds:>7.1f} {profiles:>18} {self.detail:>26}  {verdict}", flush=True)


class Conductor:
    """One torchrun process: takes its part in every start, and rank 0 judges them."""

    def __init__(self, device: str) -> None:
        self.rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.num_gpus = 1 << (num_ranks.bit_length() - 1)
        self.device = device
        self.store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=3 * START_S)))
        self.num_starts = 0
        self.rows: list[Row] = []
        if self.rank == 0:
            self.store.set("root", tempfile.mkdtemp(prefix="multi-gpu-"))
        self.root = Path(self.store.get("root").decode())

    def start(self, name: str, sizes: dict[str, int], tunes: bool = True) -> list[dict[str, Any]] | None:
        """Run one start over `tp_size` ranks; their results on rank 0, None elsewhere and after a failure."""
        self.num_starts += 1
        key, num_ranks = f"start{self.num_starts}", sizes.get("tp_size", 1)
        if self.rank == 0:
            self.store.set(f"{key}/port", str(free_port()))
        if self.rank < num_ranks:
            port, out = self.store.get(f"{key}/port").decode(), self.root / f"{key}-{self.rank}.json"
            words = [name, json.dumps(sizes), str(self.rank), port, str(int(tunes)), str(out)]
            command = [sys.executable, __file__, "--device", self.device, "--one-rank", *words]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=self.environment(), timeout=START_S, check=False)
            self.store.set(f"{key}/done{self.rank}", "1")
        if self.rank > 0:
            return None
        for rank in range(num_ranks):
            self.store.get(f"{key}/done{rank}")
        outs = [self.root / f"{key}-{rank}.json" for rank in range(num_ranks)]
        return [json.loads(out.read_text()) for out in outs] if all(map(Path.exists, outs)) else None

    def environment(self) -> dict[str, str]:
        """For processes that torchrun has nothing to do with."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_VARIABLES)}
        python_path = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
        return {
            **kept,
            "SGLANG_CACHE_DIR": str(self.root / "cache"),
            "PYTHONPATH": python_path,
            "TQDM_DISABLE": "1",
        }

    def add(self, row: Row) -> None:
        self.rows.append(row)
        row.print()

    def judged_start(
        self, name: str, sizes: dict[str, int], tunes_all: bool, expected: list[list[int]] | None
    ) -> None:
        """A start whose answers must be `expected` and which tunes everything or nothing."""
        began = time.monotonic()
        results = self.start(name, sizes)
        if self.rank > 0:
            return
        row = Row(name, time.monotonic() - began)
        if results is None:
            row.failed.append("a rank failed or did not end in time")
            return self.add(row)
        reports = [result["report"] for result in results]
        row.profiles = [report["profiles_tuned"] for report in reports]
        answers = results[0]["answers"]
        num_different = sum(a != b for a, b in zip(answers, expected or [], strict=False))
        row.detail = f"{len(answers) - num_different} of {len(answers)} answers equal"
        checks = {
            "status": all(report["status"] == "completed" for report in reports),
            "fallbacks": not any(report["fallbacks"] for report in reports),
            "profiles": all(row.profiles) if tunes_all else not any(row.profiles),
            "winners differ between ranks": all(agree(results[0], result) for result in results),
            "disagreements": not any(report["disagreements"] for report in reports),
            "answers": expected is not None and num_different <= MAX_NEAR_TIES * len(answers),
        }
        row.failed = [what for what, holds in checks.items() if not holds]
        self.add(row)

    def server(self, sizes: dict[str, int]) -> None:
        """A real server of these sizes under `run_eval`; rank 0 only."""
        port, began = free_port(), time.monotonic()
        flags = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
        row = Row(f"sglang serve {' '.join(flags)}", 0.0)
        command = [sys.executable, "-m", "sglang.cli.main", "serve", "--port", str(port), *flags]
        score = self.root / "score.json"
        evaluate = [sys.executable, "-m", "sglang.test.run_eval", "--port", str(port), "--num-threads", "128"]
        with open(self.root / "server.log", "ab") as log:
            options = {"stdout": log, "stderr": log, "env": self.environment()}
            process = subprocess.Popen([*command, "--device", self.device], **options)
            try:
                if wait_ready(process, port, SERVER_S):
                    words = [*evaluate, "--num-examples", "200", "--output-file", str(score)]
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        subprocess.run(words, timeout=SERVER_S, check=False, **options)
            finally:
                process.terminate()
                exit_code = process.wait(60)
        row.seconds = time.monotonic() - began
        right = json.loads(score.read_text())["score"] if score.exists() else 0.0
        score.unlink(missing_ok=True)
        row.detail = f"score {right:.3f}"
        row.failed = ["score"] * (right <= 0.90) + ["exit code"] * (exit_code != 0)
        if row.failed:
            print((self.root / "server.log").read_text()[-4000:])
        self.add(row)

    def run(self) -> int:
        """The whole story; the exit status."""
        if self.rank == 0:
            print(f"{'start':34} {'seconds':>7} {'profiles':>18}")
        began = time.monotonic()
        alone = self.start("one GPU", {}, tunes=False)
        expected = alone[0]["answers"] if alone else None
        if self.rank == 0:
            failed = [] if alone else ["it failed or did not end in time"]
            self.add(Row("one GPU, untuned", time.monotonic() - began, failed=failed))
        for name, sizes in layouts(self.num_gpus).items():
            self.judged_start(f"{name}, cold", sizes, True, expected)
            self.judged_start(f"{name}, warm", sizes, False, expected)
            if self.rank == 0:
                self.keep_records_of_rank_0()
            self.judged_start(f"{name}, only rank 0's records", sizes, True, expected)
            self.judged_start(f"{name}, warm again", sizes, False, expected)
        if self.rank == 0:
            for sizes in layouts(self.num_gpus).values():
                self.server(sizes)
            self.store.set("end", str(sum(bool(row.failed) for row in self.rows)))
            shutil.rmtree(self.root, ignore_errors=True)
        num_failed = int(self.store.get("end"))
        self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)  # the store may live in this process
        return 1 if num_failed else 0

    def keep_records_of_rank_0(self) -> None:
        for path in (self.root / "cache").rglob("rank_tp*_pp0_dp*.json"):
            if not path.name.startswith("rank_tp0_"):
                path.unlink()


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks chose alike wherever both were asked."""
    shared = one["winners"].keys() & other["winners"].keys()
    return bool(shared) and all(one["winners"][key] == other["winners"][key] for key in shared)


def wait_ready(process: subprocess.Popen[bytes], port: int, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return True
        time.sleep(0.2)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the table as JSON")
    parser.add_argument("--one-rank", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        _, sizes, rank, port, tunes, out = args.one_rank
        result = run_start(json.loads(sizes), int(rank), int(port), args.device, bool(int(tunes)))
        Path(out).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # without the end of CUDA's and NCCL's threads, which is no part of this
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node NUM_GPUS")
    conductor = Conductor(args.device)
    code = conductor.run()
    if args.out and conductor.rank == 0:
        args.out.write_text(json.dumps([asdict(row) for row in conductor.rows], indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
