"""The stage with FlashInfer's real tuner in two processes on one GPU, over gloo.

    python test/native/two_ranks_one_gpu.py [--out report.json]

Both ranks run FlashInfer's fused MoE and tune it together: cold, warm, with files missing, damaged and edited on one
rank, and with too little memory on one rank. Prints a table and one verdict for each start; exit status 1 when a check
fails or a start hangs. NCCL cannot join two ranks on one GPU, so forwards are reduced over gloo through copies on the
CPU; FlashInfer reduces its timings over a CPU group anyway. `--device cpu` runs the same with the in-tree tuner.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.identity import EngineIdentity, Topology
from sglang.srt.autotune.plan import Limits, Shape
from sglang.srt.layers.moe.base import ExpertWeights, MoEShape
from sglang.srt.layers.moe.flashinfer_cutlass import FlashInferCutlassMoERunner
from sglang.srt.layers.moe.topk import typical_topk_ids
from sglang.srt.managers.worker_environment import prepare_environment
from support.tiny_host import TinyHost, start

NUM_RANKS = 2
WAIT_S = 25.0
"""Bound of every vote; a start that hangs fails within it."""
TOTAL_S = 110.0
LIMITS = Limits((1, 2, 4), 4, 16)
HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 8, 2
Reports = list[dict[str, Any]]


class CutlassHost(TinyHost):
    """One layer of FlashInfer's fused MoE on the GPU, and a reduction over gloo in every forward."""

    def __init__(self, topology: Topology, group: Any, reduce: Callable[[torch.Tensor], None]) -> None:
        super().__init__(LIMITS, topology)
        self.device = torch.device("cuda", 0)
        self.capability = torch.cuda.get_device_capability(self.device)
        self.identity = EngineIdentity(
            model={"hidden_size": HIDDEN}, applies={"model_type": "tiny"}, dtype="bfloat16"
        )
        self.moe_backend = "flashinfer_cutlass"
        self.probe_dtype = torch.bfloat16
        shape = MoEShape(HIDDEN, INNER, EXPERTS, EXPERTS, TOP_K, torch.bfloat16, self.limits.max_op_tokens)
        self.runner = FlashInferCutlassMoERunner.create(shape, self.device)
        self.op_names = self.runner.op_names
        self.tuned_ops = ()
        self.timing_group = group
        self.reduce = reduce
        weights = torch.Generator(self.device).manual_seed(3)
        options = {"device": self.device, "dtype": torch.bfloat16, "generator": weights}
        self.w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, **options) / HIDDEN**0.5
        self.w2 = torch.randn(EXPERTS, HIDDEN, INNER, **options) / INNER**0.5

    def dummy_forward(self, shape: Shape, *, every_layer: bool = True) -> None:
        self.reduce(self.op_probe(shape.op_tokens).run().cpu().float())

    def op_probe(self, num_tokens: int) -> CutlassProbe:
        return CutlassProbe(self, num_tokens)


class CutlassProbe:
    def __init__(self, host: CutlassHost, num_tokens: int) -> None:
        device = host.device
        generator = torch.Generator(device).manual_seed(num_tokens)
        self._host = host
        self._hidden = torch.randn(
            num_tokens, HIDDEN, device=device, dtype=torch.bfloat16, generator=generator
        )
        self._ids = typical_topk_ids(num_tokens, TOP_K, EXPERTS, device)
        self._weights = torch.full((num_tokens, TOP_K), 1 / TOP_K, device=device)

    def run(self) -> torch.Tensor:
        host = self._host
        return host.runner.run(self._hidden, self._ids, self._weights, host.w13, host.w2)

    def reference(self, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(min(max_rows, self._hidden.shape[0]), device=self._hidden.device)
        experts, shape = ExpertWeights(self._host.w13, self._host.w2), self._host.runner.shape
        results = []
        for row in rows.tolist():
            outputs = [experts.float32_expert(shape, e, self._hidden[row]) for e in self._ids[row].tolist()]
            results.append(torch.stack(outputs).mul(1 / TOP_K).sum(0))
        return rows, torch.stack(results)


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, port: int, device: str, root: Path) -> None:
        self.rank, self.root, self.device = rank, root, device
        bound = datetime.timedelta(seconds=WAIT_S)
        self.store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, rank == 0, timeout=bound)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self.store),
            rank=rank,
            world_size=NUM_RANKS,
            timeout=bound,
        )
        self.timing_group = dist.new_group(range(NUM_RANKS), timeout=bound, backend="gloo")
        ranks = tuple(range(NUM_RANKS))
        self.topology = Topology(rank=rank, world_size=NUM_RANKS, tp_rank=rank, coupled=ranks, alike=ranks)
        self.num_forwards = self.num_starts = 0
        self.host = self._make_host()

    def _make_host(self) -> TinyHost:
        if self.device == "cuda":
            torch.cuda.set_device(0)
            return CutlassHost(self.topology, self.timing_group, self._reduce)
        return TinyHost(LIMITS, self.topology, between=lambda shape: self._reduce(torch.ones(1)))

    def _reduce(self, tensor: torch.Tensor) -> None:
        self.num_forwards += 1
        dist.all_reduce(tensor)

    def start(self) -> dict[str, Any]:
        """One start, as of a fresh process; its report with the winners in force and the forwards it took."""
        self.num_starts += 1
        store = dist.PrefixStore(f"votes{self.num_starts}", self.store)
        self.num_forwards, began = 0, time.monotonic()
        report = start(self.root, self.host, Agreement(store, self.rank, range(NUM_RANKS), WAIT_S)).to_json()
        winners = {key: str(entry[:2]) for key, entry in flashinfer_api.stored_entries().items()}
        seconds = round(time.monotonic() - began, 2)
        return {**report, "forwards": self.num_forwards, "winners": winners, "wall_seconds": seconds}


def files(root: Path) -> list[Path]:
    """The record files of both ranks, in rank order."""
    return sorted(root.rglob("rank_tp*_pp0_dp0.json"))


def edit(root: Path, change: Callable[[dict[str, Any], str], None]) -> None:
    """Change one record in the file of rank 1."""
    path = files(root)[1]
    document = json.loads(path.read_text())
    document.pop("_generation", None)
    change(document, next(key for key in document if not key.startswith("_")))
    path.write_text(json.dumps(document))


def remove_all(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def remove_file_of_rank_1(root: Path) -> None:
    files(root)[1].unlink()


def cut_file_of_rank_1(root: Path) -> None:
    path = files(root)[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_one(root: Path) -> None:
    edit(root, lambda document, key: document.pop(key))


def rename_one(root: Path) -> None:
    edit(root, lambda document, key: document.update({key.replace("(", "(7, ", 1): document.pop(key)}))


def nothing(root: Path) -> None:
    pass


def same(reports: Reports, key: str) -> bool:
    return reports[0][key] == reports[1][key]


def winners_agree(reports: Reports) -> bool:
    """Rank 1 chose as rank 0 did; what only rank 1 has is a record that nobody asks for."""
    first, second = (report["winners"] for report in reports)
    return all(second.get(key) == choice for key, choice in first.items())


def tuned_all(reports: Reports) -> bool:
    return all(report["profiles_tuned"] == len(report["winners"]) > 0 for report in reports)


def tuned_none(reports: Reports) -> bool:
    return all(report["profiles_tuned"] == 0 for report in reports)


def tuned_one_step(reports: Reports) -> bool:
    tuned = [[s["num_tokens"] for s in report["steps"] if s["profiles_tuned"]] for report in reports]
    return tuned[0] == tuned[1] and len(tuned[0]) == 1


def left_out_step_4(reports: Reports) -> bool:
    lefts = [report["left_out"] for report in reports]
    return all(
        [left["step"] for left in report] == ["decode 4"] and "rank 1 has" in report[0]["reason"]
        for report in lefts
    )


@dataclass(frozen=True)
class Case:
    """`prepare` is done to the records by rank 0, `check` says whether the reports are as they should be."""

    name: str
    prepare: Callable[[Path], None]
    check: Callable[[Reports], bool]
    little_memory: bool = False


CASES = (
    Case("cold", nothing, tuned_all),
    Case("warm", nothing, tuned_none),
    Case("only rank 0's file", remove_file_of_rank_1, tuned_all),
    Case("warm after it", nothing, tuned_none),
    Case("one record of rank 1 gone", remove_one, tuned_one_step),
    Case("one record of rank 1 renamed", rename_one, tuned_one_step),
    Case("file of rank 1 cut in half", cut_file_of_rank_1, tuned_all),
    Case("cold, little memory on rank 1", remove_all, left_out_step_4, little_memory=True),
    Case("memory is back", nothing, tuned_one_step),
    Case("warm at the end", nothing, tuned_none),
)


def run_rank(rank: int, port: int, device: str, root: str, results: Connection) -> None:
    me = Rank(rank, port, device, Path(root))
    for case in CASES:
        if rank == 0:
            case.prepare(me.root)
        dist.barrier()
        little = case.little_memory and rank == 1
        me.host.free_memory_bytes = lambda little=little: 1 << 30 if little else 1 << 40
        me.host.step_memory_bytes = lambda shape: 1 << 34 if shape.op_tokens == 4 else 1 << 20
        reports: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(reports, me.start())
        if rank == 0:
            results.send((case.name, reports))
    results.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without the end of CUDA's and gloo's threads, which is no part of this


def problems(case: Case, reports: Reports) -> list[str]:
    """What is wrong with one start, in words."""
    checks = {
        "status": all(report["status"] == "completed" for report in reports),
        "expected tuning": case.check(reports),
        "same forwards": same(reports, "forwards"),
        "same winners": winners_agree(reports),
        "no fallbacks": all(report["fallbacks"] == 0 for report in reports),
    }
    return [name for name, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the reports as JSON")
    args = parser.parse_args()
    prepare_environment()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    root, began = tempfile.mkdtemp(prefix="two-ranks-"), time.monotonic()
    ranks = [
        context.Process(target=run_rank, args=(rank, port, args.device, root, sender), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    document: dict[str, Any] = {"device": args.device, "cases": {}}
    num_failed = 0
    try:
        for process in ranks:
            process.start()
        sender.close()
        print(f"{'start':32} {'seconds':>8} {'profiles':>9} {'forwards':>9} {'winners':>8}  verdict")
        for case in CASES:
            left_s = TOTAL_S - (time.monotonic() - began)
            name, reports = "", []
            with contextlib.suppress(EOFError):
                if receiver.poll(max(0.0, left_s)):
                    name, reports = receiver.recv()
            if name != case.name:
                print(f"{case.name:32} FAILED: no answer; the ranks hang or ended, see above")
                num_failed += 1
                break
            wrong = problems(case, reports)
            num_failed += bool(wrong)
            columns = [
                "/".join(str(report[key]) for report in reports)
                for key in ("wall_seconds", "profiles_tuned", "forwards")
            ]
            verdict = f"FAILED: {', '.join(wrong)}" if wrong else "ok"
            print(
                f"{name:32} {columns[0]:>8} {columns[1]:>9} {columns[2]:>9} {len(reports[0]['winners']):>8}  {verdict}"
            )
            document["cases"][name] = {"failed_checks": wrong, "ranks": reports}
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
        shutil.rmtree(root, ignore_errors=True)
    document["seconds"] = round(time.monotonic() - began, 1)
    print(f"{len(document['cases'])} of {len(CASES)} starts, {num_failed} failed, {document['seconds']} s")
    if args.out:
        args.out.write_text(json.dumps(document, indent=1))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
