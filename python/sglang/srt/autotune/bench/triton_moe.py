"""Every configuration of the Triton MoE kernels, timed: `python -m sglang.srt.autotune.bench.triton_moe --out FILE`.

It is for whoever changes the kernels or their lists of candidates: it compiles them in threads, checks each result,
times each product's configurations inside the whole op (graph replay, cold L2), and writes all times. A candidate
that fails is noted and passed over.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune.bench.bounds import Bounds, measure_bounds, moe_work
from sglang.srt.autotune.bench.geometry import QWEN3_30B_A3B, WIDE_SHARE, shape_of
from sglang.srt.autotune.bench.one_layer import OneLayer, tune
from sglang.srt.autotune.bench.results import provenance
from sglang.srt.autotune.bench.tables import ratio, table
from sglang.srt.autotune.failures import describe
from sglang.srt.autotune.timer import OpTimer
from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.layers.moe.triton_grouped import Space, TritonGroupedMoE
from sglang.srt.layers.moe.triton_grouped.launches import Inputs, Planner
from sglang.srt.utils.logs import setup_logging

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
#: Small enough for Triton's interpreter on a CPU: it tries this script, and measures nothing of interest.
TINY = {
    **QWEN3_30B_A3B,
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GEOMETRIES: dict[str, dict[str, Any]] = {"a": QWEN3_30B_A3B, "b": WIDE_SHARE, "tiny": TINY}
#: A result further than this from torch's, in relative norm, is reported as wrong.
TOLERANCE = 1.5e-2
NUM_CHECKED_ROWS = 4

logger = logging.getLogger("bench")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang.srt.autotune.bench.triton_moe", description=__doc__
    )
    result.add_argument("--geometry", choices=list(GEOMETRIES), default="a")
    result.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N")
    result.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="Where all times are written."
    )
    result.add_argument("--limit", type=int, help="Configurations of each product and method. Default: all.")
    result.add_argument("--threads", type=int, default=16, help="Threads that compile. Default: 16.")
    result.add_argument(
        "--repeats", type=int, default=7, help="Replays of a candidate; the best one gets 30. Default: 7."
    )
    result.add_argument(
        "--budget-s", type=float, default=100.0, help="Start no token count after this. Default: 100."
    )
    result.add_argument("--no-flashinfer", action="store_true", help="Leave out FlashInfer's tuned op.")
    return result


class Bench:
    """One geometry's weights, and what is measured on them. `document` grows as it goes and is written each time."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.began = args, device, time.monotonic()
        config = GEOMETRIES[args.geometry]
        self.shape: MoEShape = shape_of(config, max(args.tokens))
        self.bounds: Bounds = measure_bounds(device)
        self.grouped = create_moe_runner("torch_grouped", self.shape, device=device)
        self.layer = OneLayer(self.shape, self.grouped, device)
        self.moe = TritonGroupedMoE(self.shape, device)
        self.timer = OpTimer(device, repeats=args.repeats)
        self.document: dict[str, Any] = {
            "provenance": provenance(),
            "geometry": args.geometry,
            "bounds": self.bounds.to_json(),
            "rows": [],
        }

    def inputs(self, num_tokens: int) -> list[torch.Tensor]:
        hidden, ids, weights = self.layer.inputs(num_tokens)
        return [hidden, ids, weights, self.layer.weights.w13, self.layer.weights.w2]

    def spaces(self, inputs: list[torch.Tensor]) -> list[Space]:
        most = self.args.limit
        return [
            Space(space.method, space.first[:most], space.second[:most])
            for space in self.moe.tactic_space(inputs)
        ]

    def write(self) -> None:
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.document, indent=1) + "\n")

    def compile_all(self) -> None:
        """Each distinct kernel once, in threads; how well they overlap is part of the result."""
        jobs: dict[Any, Any] = {}
        for num_tokens in self.args.tokens:
            inputs = self.inputs(num_tokens)
            tactics = [tactic for space in self.spaces(inputs) for tactic in space.tactics()]
            for job in self.moe.compile_jobs(inputs, tactics):
                jobs.setdefault(job.key, job)  # type: ignore[attr-defined]
        errors: dict[str, str] = {}

        def compiled(job: Any) -> float:
            began = time.monotonic()
            try:
                job()
            except Exception as error:  # whatever Triton, ptxas or the driver raise: the candidate is out
                errors[repr(job)] = describe(error)
            return time.monotonic() - began

        began = time.monotonic()
        with ThreadPoolExecutor(self.args.threads) as pool:
            seconds = list(pool.map(compiled, jobs.values()))
        self.document["compile"] = {
            "kernels": len(jobs),
            "threads": self.args.threads,
            "wall_s": time.monotonic() - began,
            "sum_s": sum(seconds),
            "errors": errors,
        }
        logger.info(
            "compiled %d kernels in %.1f s with %d threads (%.1f s in all jobs)",
            *(self.document["compile"][name] for name in ("kernels", "wall_s", "threads", "sum_s")),
        )
        for name, error in errors.items():
            logger.warning("does not compile: %s: %s", name, error)

    def measure_us(self, run: Callable[[], object], repeats: int | None = None) -> float:
        self.timer.repeats = repeats or self.args.repeats
        return 1e3 * self.timer.measure_ms(run)

    def clean_us(self, run: Callable[[], object], repeats: int = 30) -> float | None:
        """As `measure_us`, but the L2 is filled by reading: what the flush wrote need not go to memory meanwhile."""
        if self.device.type != "cuda":
            return None
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        others = torch.zeros(4 * l2_bytes // 8, dtype=torch.int64, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        events = []
        for _ in range(repeats):
            others.max()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)

    def row(self, num_tokens: int) -> dict[str, Any]:
        inputs = self.inputs(num_tokens)
        touched, num_bytes, flops = moe_work(self.shape, inputs[1])
        checked = Checked(self, inputs)
        row: dict[str, Any] = {
            "tokens": num_tokens,
            "experts": touched,
            "bound_us": self.bounds.us(num_bytes, flops),
            "times": checked.times,
            "errors": checked.errors,
        }
        best: list[tuple[float, Any]] = []
        for space in self.spaces(inputs):
            first = checked.search([space.tactic(i, 0) for i in range(len(space.first))])
            if first is None:
                continue
            i = space.first.index(first[1])
            second = checked.search([space.tactic(i, j) for j in range(len(space.second))])
            if second is not None:
                best.append((checked.us(second), second))
        if not best:
            row["failed"] = "no candidate ran"
            return row
        _, tactic = min(best)
        inputs_of = Inputs(*inputs)
        row["tactic"] = tactic
        row["error"] = checked.float32_error(tactic)
        row["best_of_method"] = {winner[0]: us for us, winner in best}
        row["us"] = self.measure_us(partial(self.moe.forward, inputs, tactic), 30)
        row["no_overlap_us"] = self.measure_us(
            partial(_run, Planner(self.shape, overlaps=False), inputs_of, tactic), 30
        )
        row["clean_us"] = self.clean_us(partial(self.moe.forward, inputs, tactic))
        row["floor_us"] = self.measure_us(partial(inputs[2][:1].mul_, 1), 30)
        launches, out = Planner(self.shape, overlaps=False).plan(inputs_of, tactic)
        row["parts_us"] = [(launch.kernel.__name__, self.measure_us(launch.run, 30)) for launch in launches]
        del out
        row["torch_grouped_us"] = self.measure_us(partial(self.layer.run, self.layer.inputs(num_tokens)), 15)
        return row

    def add_flashinfer(self) -> None:
        """FlashInfer's op, tuned by the stage, at the token counts that were measured."""
        try:
            runner = create_moe_runner("flashinfer_cutlass", self.shape, device=self.device)
        except ValueError as error:
            self.document["flashinfer"] = str(error)
            return
        layer = OneLayer(self.shape, runner, self.device)
        with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
            report = tune(layer, self.shape.max_num_tokens, Path(folder))
        self.document["flashinfer"] = report.status
        for row in self.document["rows"]:
            row["flashinfer_us"] = self.measure_us(partial(layer.run, layer.inputs(row["tokens"])), 30)


class Checked:
    """Times tactics on some inputs, each once and after a look at its result."""

    def __init__(self, bench: Bench, inputs: list[torch.Tensor]) -> None:
        self._bench, self._inputs = bench, inputs
        self.times: list[tuple[Any, float]] = []
        self.errors: list[tuple[Any, str]] = []
        self._wanted = bench.layer.run((inputs[0], inputs[1], inputs[2])).float()

    def us(self, tactic: Any) -> float:
        return next(us for known, us in self.times if known == tactic)

    def search(self, tactics: Sequence[Any]) -> Any | None:
        """The fastest of `tactics` that is right; None where there is none."""
        for tactic in tactics:
            if all(tactic != known for known, _ in [*self.times, *self.errors]):
                self._time(tactic)
        timed = [(us, tactic) for tactic, us in self.times if tactic in tactics]
        return min(timed)[1] if timed else None

    def _time(self, tactic: Any) -> None:
        run = partial(self._bench.moe.forward, self._inputs, tactic)
        try:
            out = run().float()
            distance = float((out - self._wanted).norm() / self._wanted.norm())
            if not distance < TOLERANCE:
                raise ArithmeticError(f"{100 * distance:.2f}% from torch_grouped")
            self.times.append((tactic, self._bench.measure_us(run)))
        except Exception as error:  # one candidate's failure is a line of the result
            self.errors.append((tactic, describe(error)))
            logger.warning("%d tokens: %s: %s", self._inputs[0].shape[0], tactic, describe(error))

    def float32_error(self, tactic: Any) -> float:
        """Distance of some rows of the result from float32, in relative norm."""
        x, ids, weights = self._inputs[:3]
        out = self._bench.moe.forward(self._inputs, tactic)
        rows = sorted({row * (len(x) - 1) // max(1, NUM_CHECKED_ROWS - 1) for row in range(NUM_CHECKED_ROWS)})
        expected = torch.zeros(len(rows), out.shape[1], device=out.device)
        for place, row in enumerate(rows):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                expected[place] += weight * self._bench.layer.weights.float32_expert(
                    self._bench.shape, expert, x[row]
                )
        return float((out[rows].float() - expected).norm() / expected.norm())


def _run(planner: Planner, inputs: Inputs, tactic: Any) -> torch.Tensor:
    launches, out = planner.plan(inputs, tactic)
    for launch in launches:
        launch.run()
    return out


def _three_best(row: dict[str, Any], place: int, method: str) -> str:
    """The three fastest configurations of one product of a method."""
    by_config: dict[Any, float] = {}
    for tactic, us in row["times"]:
        if tactic[0] == method:
            by_config[tactic[place]] = min(us, by_config.get(tactic[place], us))
    best = sorted(by_config.items(), key=lambda item: item[1])[:3]
    return ", ".join(f"{'/'.join(map(str, config))} {us:.1f}" for config, us in best)


def tables(document: dict[str, Any]) -> str:
    head = [
        "tokens",
        "experts",
        "bound us",
        "us",
        "us / bound",
        "error",
        "tactic",
        "no overlap",
        "clean L2",
        "floor",
    ]
    head += ["parts alone", "torch_grouped us", "flashinfer us"]
    rows, lines = [], []
    for row in document["rows"]:
        if "tactic" not in row:
            rows.append([row["tokens"], row["experts"], row["bound_us"], row.get("failed"), *[None] * 9])
            continue
        parts = " + ".join(f"{name} {us:.1f}" for name, us in row["parts_us"])
        rows.append(
            [
                *(row["tokens"], row["experts"], row["bound_us"], f"{row['us']:.1f}"),
                ratio(row["us"], row["bound_us"]),
                f"{100 * row['error']:.2f}%",
                " ".join(
                    "/".join(map(str, part)) if isinstance(part, tuple) else part for part in row["tactic"]
                ),
                *(row[name] and f"{row[name]:.1f}" for name in ("no_overlap_us", "clean_us", "floor_us")),
                parts,
                row["torch_grouped_us"],
                row.get("flashinfer_us"),
            ]
        )
        for method, us in row["best_of_method"].items():
            lines.append(f"{row['tokens']} tokens, {method}: {us:.1f} us")
            lines += [
                f"  {name}: {_three_best(row, place, method)}"
                for place, name in ((1, "first"), (2, "second"))
            ]
    return "\n".join([*lines, "", table(head, rows)])


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    setup_logging()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(args, device)
    logger.info("set up in %.1f s", time.monotonic() - bench.began)
    if device.type == "cuda":
        bench.compile_all()
    # A capture collects garbage first; what is here already need not be looked at each time.
    gc.collect()
    gc.freeze()
    for num_tokens in args.tokens:
        spent = time.monotonic() - bench.began
        if spent > args.budget_s:
            logger.warning("%.0f s are spent: %d tokens and what follows are left out", spent, num_tokens)
            break
        row = bench.row(num_tokens)
        bench.document["rows"].append(row)
        bench.write()
        logger.info(
            "%5d tokens: bound %.1f, %.1f us, %s (%d timed, %d failed, %.1f s)",
            *(num_tokens, row["bound_us"], row.get("us", float("nan")), row.get("tactic")),
            *(len(row["times"]), len(row["errors"]), time.monotonic() - bench.began - spent),
        )
    print(tables(bench.document), flush=True)
    if not args.no_flashinfer:
        bench.add_flashinfer()
        bench.write()
        print(tables(bench.document), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
