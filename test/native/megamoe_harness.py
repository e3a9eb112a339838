"""FlashInfer's MegaMoE on real GPUs, piece by piece, each printing a table and one JSON document.

    python test/native/megamoe_harness.py lifecycle --geometry small
    python test/native/megamoe_harness.py ladder --geometry qwen3-30b-a3b --native 64 1024
    torchrun --nproc-per-node 2 test/native/megamoe_harness.py lifecycle --geometry small

`lifecycle` stages a short ladder cold and warm and proves what serving relies on; `ladder` times the sweep of a whole
ladder and its winners against FlashInfer's heuristic and its own search, in one run. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch
import torch.distributed as dist

from sglang.srt.autotune import flashinfer_api, flashinfer_moe_ep
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe.bench import ReplayTimer
from sglang.srt.autotune.megamoe.context import TuningContext, collective_reference
from sglang.srt.autotune.megamoe.env_guard import environment, scratch_knob_cache
from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels.base import (
    CapacityExceeded,
    Geometry,
    Knobs,
    MegaInputs,
    MegaMoEKernel,
)
from sglang.srt.autotune.megamoe.kernels.flashinfer import HopperFp8MegaMoE
from sglang.srt.autotune.megamoe.kernels.fp8_bench import random_weights
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.kernels.reference_layer import pooled_workspace_refcount
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.staging import MegaMoEReport, stage_profiles
from sglang.srt.autotune.megamoe.tuning import tune
from sglang.srt.autotune.records.files import replace_file
from sglang.srt.autotune.records.store import RecordStore

GEOMETRIES = {"small": (1024, 512, 8, 2), "qwen3-30b-a3b": (2048, 768, 128, 8), "builtin": (128, 128, 8, 2)}
NATIVE_WITHIN_S = 400.0
LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


class Records:
    """A record file as the stage sees it."""

    def __init__(self, path: Path) -> None:
        self.store = RecordStore(path, flashinfer_api.environment())

    def namespace(self, name: str) -> Mapping[str, Any]:
        return self.store.load().namespaces.get(name, {})

    def commit_namespace(self, name: str, entries: Mapping[str, Any]) -> None:
        self.store.commit(namespaces={name: entries})


class Bench:
    """The kernel, the ranks and what was found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.on_gpu = not args.cpu
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        group, self.agreement = None, Agreement.alone()
        if self.world > 1:
            backend = "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"
            device_id = self.device if self.on_gpu else None
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120), device_id=device_id)
            group = dist.group.WORLD
            store = dist.distributed_c10d._get_default_store()
            self.agreement = Agreement(store, self.rank, range(self.world), timeout_s=300)
        self.geometry = Geometry(*args.sizes, self.world, self.rank)
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.kernel: MegaMoEKernel = (
            HopperFp8MegaMoE(self.geometry, self.device, MegaMoEOptions(), group)
            if self.on_gpu
            else ReferenceMegaMoE(self.geometry, group)
        )
        self.timer = ReplayTimer(self.device)
        self.results: dict[str, Any] = {
            "kernel": self.kernel.name,
            "gpu": torch.cuda.get_device_name(self.device) if self.on_gpu else None,
            "world_size": self.world,
            "geometry": dict(zip(("hidden", "intermediate", "experts", "top_k"), args.sizes, strict=True)),
            "flashinfer": flashinfer_api.version(),
            "torch": torch.__version__,
            "checks": {},
        }

    def check(self, name: str, passed: bool, detail: Any = None) -> None:
        self.results["checks"][name] = {"passed": bool(passed), "detail": detail}
        self.say(f"{'ok  ' if passed else 'FAIL'} {name}" + (f"  ({detail})" if detail is not None else ""))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def inputs(self, num_tokens: int, seed: int = 0) -> MegaInputs:
        return routed_inputs(num_tokens, self.geometry, self.dtype, self.device, seed)

    def free_bytes(self) -> int | None:
        """What sweep workers may take."""
        return max(0, torch.cuda.mem_get_info(self.device)[0] - (4 << 30)) if self.on_gpu else None

    def references(self, workspace: Any) -> int:
        if self.on_gpu:
            return flashinfer_moe_ep.pool_references(workspace)
        return pooled_workspace_refcount(workspace.buffers)

    def profiles(self, weights: list[Any]) -> MegaMoEProfiles:
        profiles = MegaMoEProfiles(self.kernel, self.args.bootstrap)
        for prepared in weights:
            profiles.add_owner(prepared)
        return profiles

    def stage(
        self, profiles: MegaMoEProfiles, capacities: list[int], records: Records, policy: str
    ) -> MegaMoEReport:
        report = stage_profiles(
            profiles,
            capacities,
            records,
            self.agreement,
            dtype=self.dtype,
            policy=policy,
            free_bytes=self.free_bytes,
            on_capacity=lambda capacity: self.say(f"     capacity {capacity} is open"),
        )
        self.say(
            f"     staged in {report.seconds:.1f} s: {report.tuned} tuned, {report.cached} cached, {report.timings}"
        )
        return report

    def canonical_weights(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device=self.device).manual_seed(seed + 100 * self.rank)
        geometry = self.geometry
        experts, hidden, inner = geometry.num_local_experts, geometry.hidden_size, geometry.intermediate_size
        shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
        w13, w2 = (
            (torch.randn(shape, generator=generator, device=self.device) * shape[-1] ** -0.5).to(self.dtype)
            for shape in shapes
        )
        return w13, w2


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20))


# lifecycle --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def lifecycle(bench: Bench) -> None:
    """Cold and warm staging of a short ladder, results, capture, references and refusals."""
    capacities, kernel = bench.args.capacities or [1, 2, 4, 8, 16], bench.kernel
    started = time.monotonic()
    weights = [kernel.prepare_weights(*bench.canonical_weights(seed)) for seed in (0, 1)]
    kernel.synchronize()
    bench.results["prepare_s"] = round((time.monotonic() - started) / 2, 2)
    records = Records(Path(bench.args.directory, f"rank{bench.rank}.json"))

    before = dict(os.environ)
    profiles = bench.profiles(weights)
    cold = bench.stage(profiles, capacities, records, bench.args.policy)
    bench.results["cold"] = cold.to_json()
    bench.check("cold: every capacity was tuned", cold.tuned == len(capacities), cold.tuned)
    bench.check("the environment is as before", before == dict(os.environ))
    results = check_results(bench, profiles, weights)
    if bench.on_gpu:
        check_direct(bench, profiles)
        check_capture(bench, profiles)
    check_overflow(bench, profiles)
    check_references(bench, profiles)

    warm_profiles = bench.profiles(weights)
    warm = bench.stage(warm_profiles, capacities, records, bench.args.policy)
    bench.results["warm"] = warm.to_json()
    bench.check("warm: nothing was tuned", warm.tuned == 0 and warm.cached == len(capacities), warm.tuned)
    again = check_results(bench, warm_profiles, weights, quiet=True)
    same = all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    bench.check("warm results are those of the cold start, bit by bit", same)
    warm_profiles.close()

    default = bench.profiles(weights)
    with scratch_knob_cache(kernel.required_environment()):
        for capacity in capacities:
            default.create(capacity, None)
            default.warm(capacity, bench.inputs(capacity))
    default.freeze(tuned=False)
    fixed = check_results(bench, default, weights, quiet=True)
    worst = max(relative_error(a, b) for a, b in zip(results, fixed, strict=True))
    bench.check(
        "tuned results are those of FlashInfer's heuristic up to summation order",
        worst < 0.01,
        f"{worst:.1e}",
    )
    default.close()


def counts_of(bench: Bench, capacities: list[int]) -> list[list[int]]:
    """Token counts per rank to try: full, partial, and with idle ranks where there are several."""
    if bench.world == 1:
        return [[n] for n in (1, 2, 3, 5, 8, 11, capacities[-1])]
    top = capacities[-1]
    pattern = [[0, 1], [1, 2], [3, 7], [8, 8], [4, top], [1, 0], [2, 3], [top, 0]]
    return [[row[rank % 2] for rank in range(bench.world)] for row in pattern]


def check_results(
    bench: Bench, profiles: MegaMoEProfiles, weights: list[Any], *, quiet: bool = False
) -> list[torch.Tensor]:
    """Outputs of both owners for all counts; compared with the float reference unless `quiet`."""
    outputs, errors = [], []
    for index, counts in enumerate(counts_of(bench, list(profiles.capacities))):
        inputs = bench.inputs(counts[bench.rank], seed=10 + index)
        for owner in range(len(weights)):
            result = profiles.forward(owner, inputs, max(counts)).clone()
            bench.kernel.synchronize()
            outputs.append(result)
            if not quiet and bench.world == 1:
                expected = bench.kernel.float_reference(weights[owner], inputs)
                errors.append(relative_error(result, expected))
    if errors:
        worst = max(errors)
        bench.check(
            "results match the quantised float reference", worst < bench.kernel.tolerance, f"{worst:.1e}"
        )
    if not quiet and bench.world > 1:
        padded = bench.inputs(profiles.capacities[-1], seed=77)
        context = TuningContext(profiles, bench.agreement, lambda n: padded, Path())
        expected = collective_reference(context, padded)
        error = relative_error(profiles.forward(0, padded, padded.num_tokens), expected)
        bench.check(
            "results match the quantised float reference", error < bench.kernel.tolerance, f"{error:.1e}"
        )
    return outputs


def check_direct(bench: Bench, profiles: MegaMoEProfiles) -> None:
    """Every workspace was found to give the same directly as by FlashInfer's forward, bit by bit."""
    spaces = ((owner, space) for i, owner in enumerate(profiles.owners) for space in profiles.workspaces(i))
    direct = [owner.launches_directly(space) for owner, space in spaces]
    bench.check("every workspace is launched directly", all(direct), len(direct))


def check_capture(bench: Bench, profiles: MegaMoEProfiles) -> None:
    """A captured forward replays what eager gives, twice and after its inputs changed."""
    capacity = profiles.capacities[-1]
    inputs, others = bench.inputs(capacity, seed=3), bench.inputs(capacity, seed=4)
    eager = [profiles.forward(0, which, capacity).clone() for which in (inputs, others)]
    static = MegaInputs(inputs.hidden_states.clone(), inputs.topk_ids.clone(), inputs.topk_weights.clone())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = profiles.forward(0, static, capacity)
        try:
            profiles.owners[0].create_workspace(3)
            refused = None
        except Exception as error:  # whatever it is: it must not be created in a capture
            refused = type(error).__name__
    for name, which, expected in (("first", inputs, 0), ("second", inputs, 0), ("mutated", others, 1)):
        static.hidden_states.copy_(which.hidden_states)
        static.topk_ids.copy_(which.topk_ids)
        static.topk_weights.copy_(which.topk_weights)
        graph.replay()
        torch.cuda.synchronize()
        bench.check(f"graph replay, {name}: equal to eager bit by bit", torch.equal(output, eager[expected]))
    bench.check("no workspace is created inside a capture", refused is not None, refused)


def check_overflow(bench: Bench, profiles: MegaMoEProfiles) -> None:
    most = profiles.capacities[-1]
    try:
        profiles.forward(0, bench.inputs(1), most + 1)
        message = ""
    except CapacityExceeded as error:
        message = str(error)
    bench.check("overflow is refused with both numbers", str(most) in message and str(most + 1) in message)
    calls = 20000
    started = time.perf_counter()
    for _ in range(calls):
        profiles.select(most)
    each_us = 1e6 * (time.perf_counter() - started) / calls
    bench.check("selecting a workspace takes less than 1 us", each_us < 1, f"{each_us:.2f} us")


def check_references(bench: Bench, profiles: MegaMoEProfiles) -> None:
    """Both owners share every workspace's buffers, which go with the last of them."""
    handles = [profiles.workspaces(owner)[0] for owner in (0, 1)]
    counts = [bench.references(handles[0])]
    profiles.owners[1].destroy()
    counts.append(bench.references(handles[0]))
    profiles.close()
    bench.check(
        "pool references go 2, 1 and to nothing", counts == [2, 1] and handles[0].is_destroyed, counts
    )


def one_layer(bench: Bench) -> list[Any]:
    """Prepared weights of one layer."""
    if bench.on_gpu:
        return [random_weights(bench.geometry, bench.device)]
    return [bench.kernel.prepare_weights(*bench.canonical_weights(0))]


# ladder -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def ladder(bench: Bench) -> None:
    """Seconds of the sweep, cold and warm, and the winners' times beside the heuristic's and native winners'."""
    capacities, kernel = bench.args.capacities or list(LADDER), bench.kernel
    weights = one_layer(bench)
    records = Records(Path(bench.args.directory, f"ladder{bench.rank}.json"))
    profiles = bench.profiles(weights)
    cold = bench.stage(profiles, capacities, records, "sweep")
    bench.results["cold"] = cold.to_json()
    profiles.close()
    profiles = bench.profiles(weights)
    warm = bench.stage(profiles, capacities, records, "sweep")
    bench.results["warm"] = warm.to_json()
    profiles.close()
    bench.check("cold: every capacity was tuned", cold.tuned == len(capacities), f"{cold.seconds:.1f} s")
    bench.check("cold within 90 s", cold.seconds <= 90, f"{cold.seconds:.1f} s")
    bench.check(
        "warm: nothing tuned, within 30 s", warm.tuned == 0 and warm.seconds <= 30, f"{warm.seconds:.1f} s"
    )

    native = tune_natively(bench, weights, bench.args.native) | native_elsewhere(bench)
    rows = []
    bench.say(f"{'capacity':>9} {'heuristic us':>13} {'sweep us':>9} {'native us':>10}  (graph replay)")
    for capacity in capacities:
        choices: dict[str, Knobs | None] = {
            "heuristic": kernel.default_knobs(capacity),
            "sweep": cold.winners[str(capacity)]["knobs"],
            "native": native.get(capacity),
        }
        row: dict[str, Any] = {
            "capacity": capacity,
            "errors": {},
            **compare(bench, weights[0], capacity, choices),
        }
        rows.append(row)
        cells = [row[name] or "" for name in ("heuristic", "sweep", "native")]
        bench.say(f"{capacity:>9} {cells[0]:>13} {cells[1]:>9} {cells[2]:>10}")
    bench.results["ladder"] = rows

    def slower_than(other: str) -> list[int]:
        """Capacities at which the sweep found nothing or something slower than `other` by more than 2%."""
        compared = (row for row in rows if row[other])
        return [row["capacity"] for row in compared if not row["sweep"] or row["sweep"] > 1.02 * row[other]]

    slower = slower_than("native")
    bench.check("no winner is slower than native's by more than 2%", not slower, slower)
    behind = slower_than("heuristic")
    bench.check("no winner is slower than the heuristic by more than 2%", not behind, behind)


@torch.inference_mode()
def native(bench: Bench) -> None:
    """FlashInfer's own search alone: winners and seconds, for a `ladder` on another GPU of the host."""
    winners = tune_natively(bench, one_layer(bench), bench.args.capacities or [64])
    bench.results["native"] = {str(capacity): knobs for capacity, knobs in winners.items()}


def native_elsewhere(bench: Bench) -> dict[int, Knobs | None]:
    """The winners of `native` runs, whose files may still be to come."""
    winners: dict[int, Knobs | None] = {}
    deadline = time.monotonic() + NATIVE_WITHIN_S
    for path in map(Path, bench.args.native_from):
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"--native-from {path}: no such file within {NATIVE_WITHIN_S:g} s")
            time.sleep(0.5)
        document = json.loads(path.read_text())
        if "native" not in document:
            raise ValueError(f"--native-from {path}: that run ended early: {document['checks']}")
        bench.results.setdefault("native_seconds", {}).update(document["native_seconds"])
        for capacity, knobs in document["native"].items():
            winners[int(capacity)] = bench.kernel.check_knobs(knobs)
    return winners


def tune_natively(bench: Bench, weights: list[Any], capacities: list[int]) -> dict[int, Knobs | None]:
    """FlashInfer's own search at `capacities`."""
    winners: dict[int, Knobs | None] = {}
    seconds = {}
    for capacity in capacities:
        profiles = bench.profiles(weights)
        started = time.monotonic()
        with scratch_knob_cache(bench.kernel.required_environment()) as knob_cache:
            context = TuningContext(profiles, bench.agreement, lambda n: bench.inputs(n), knob_cache)
            winners[capacity] = next(tune("native", context, [capacity])).knobs
        seconds[str(capacity)] = round(time.monotonic() - started, 1)
        bench.say(f"     native tuning of capacity {capacity}: {seconds[str(capacity)]} s")
        profiles.close()
    bench.results["native_seconds"] = seconds
    return winners


def compare(
    bench: Bench, weights: Any, capacity: int, choices: dict[str, Knobs | None]
) -> dict[str, float | None]:
    """Median times of the choices, measured in turns so that clocks and temperature are the same for all."""
    inputs = bench.inputs(capacity, seed=1)
    owners, runs, times = [], {}, {name: [] for name in choices}
    with environment(bench.kernel.required_environment()):
        for name, knobs in choices.items():
            if knobs is None:
                continue
            same = next((other for other in runs if choices[other] == knobs), None)
            if same is not None:
                runs[name] = runs[same]
                continue
            owner = bench.kernel.create_owner(weights, capacity, knobs)
            owners.append(owner)
            output = torch.empty_like(inputs.hidden_states)
            mine = MegaInputs(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, output)
            owner.warmup(mine)
            runs[name] = bench.timer.capture(lambda owner=owner, mine=mine: owner.forward(mine))
    for _ in range(6):
        for name, run in runs.items():
            times[name] += bench.timer.times_us(run, 5)
    for owner in reversed(owners):
        owner.destroy()
    return {name: round(statistics.median(values), 1) if values else None for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("piece", choices=("lifecycle", "ladder", "native"))
    parser.add_argument(
        "--geometry", default="small", help=f"{', '.join(GEOMETRIES)}, or four numbers: H,I,E,K"
    )
    parser.add_argument("--capacities", type=int, nargs="+")
    parser.add_argument(
        "--native", type=int, nargs="*", default=[], help="ladder: capacities that FlashInfer tunes too"
    )
    parser.add_argument(
        "--native-from",
        nargs="*",
        default=[],
        metavar="FILE",
        help="ladder: results of `native` runs, waited for",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="the reference kernel instead, to try the harness itself"
    )
    parser.add_argument("--policy", choices=("sweep", "native"), default="sweep", help="of the lifecycle")
    parser.add_argument("--bootstrap", type=int, default=4)
    parser.add_argument("--out", help="file for the JSON document")
    args = parser.parse_args()
    args.sizes = GEOMETRIES.get(args.geometry) or tuple(map(int, args.geometry.split(",")))
    with tempfile.TemporaryDirectory() as directory:
        args.directory = directory
        bench = Bench(args)
        started = time.monotonic()
        try:
            {"lifecycle": lifecycle, "ladder": ladder, "native": native}[args.piece](bench)
        except Exception as error:
            bench.check("the piece ran to its end", False, f"{type(error).__name__}: {error}")
            raise
        finally:
            bench.results["seconds"] = round(time.monotonic() - started, 1)
            if bench.rank == 0:
                text = json.dumps(bench.results, indent=1, default=str)
                print(text if args.out is None else f"written to {args.out}", flush=True)
                if args.out is not None:
                    replace_file(Path(args.out), text.encode())
    if bench.world > 1:
        dist.destroy_process_group()
    return 0 if all(check["passed"] for check in bench.results["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
