"""Piece `engine`: one loaded model, its stage run disabled, cold, warm and seeded, its forwards timed by each runner.

The weights are loaded once. A start with other records is the same stage on the same runner after FlashInfer's
tuner forgot everything, and decode graphs captured anew, since a graph holds the choices of its capture.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang.cli.autotune import export_seed
from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.bounds import Bounds, measure_bounds
from sglang.srt.autotune.bench.drive import Driver, build_runner, recorded_routing, step_ms
from sglang.srt.autotune.report import StageReport
from sglang.srt.autotune.stage import run_stage
from sglang.srt.autotune_config import settings_of
from sglang.srt.layers.fused_moe import moe_layers
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.model_executor.autotune_host import ModelRunnerHost, agreement_of
from sglang.srt.model_executor.decode_graphs import capture_decode_graphs
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SEED_FILE = "bench.json"


@dataclass(frozen=True)
class EngineLoad:
    """What is timed: decode batches of sequences of `seq_len` tokens, and prefills of one prompt."""

    decode_batch_sizes: Sequence[int] = (1, 8, 64, 256)
    prefill_sizes: Sequence[int] = (1024, 8192)
    seq_len: int = 1024
    decode_repeats: int = 10
    prefill_repeats: int = 3


def measure_engine(
    args: ServerArgs, load: EngineLoad, folder: Path, portfolio: str = "portfolio"
) -> dict[str, Any]:
    """Start once and measure everything; `args` must leave the stage on. Records and the seed go below `folder`.

    No start sees the seeds that ship with the product: they may hold what a cold one is to measure.

    Returns plain data: seconds and profiles of each start, and milliseconds of each forward by the default
    choice, the tuned one, `torch_grouped` and the `portfolio`, beside the bound. `args` name the runner that the first
    two are of.
    """
    flashinfer_api.forget_everything()
    began = time.monotonic()
    runner = build_runner(replace(args, disable_flashinfer_autotune=True))
    start_s = time.monotonic() - began
    bounds = measure_bounds(runner.device)
    forwards = Forwards(runner, load)
    rows = forwards.bound_rows(bounds)
    _add(rows, "default_ms", forwards.times_ms())
    starts: dict[str, Any] = {"disabled": _start_row(runner.autotune_report, start_s, 0.0)}

    nothing = folder / "no-seeds"
    nothing.mkdir(parents=True)
    cold = restart_stage(runner, args, folder / "records", nothing)
    capture_s = recapture(runner)
    _add(rows, "tuned_ms", forwards.times_ms())
    starts["cold"] = _start_row(cold, start_s, cold.seconds)

    warm = restart_stage(runner, args, folder / "records", nothing)
    starts["warm"] = _start_row(warm, start_s, warm.seconds)
    seeds = _export_seed(cold, folder / "seeds")
    seeded = restart_stage(runner, args, folder / "seeded", seeds)
    starts["seeded"] = _start_row(seeded, start_s, seeded.seconds)

    grouped = create_moe_runner("torch_grouped", runner.moe_runner.shape, device=runner.device)
    with swapped_moe_runner(runner, grouped):
        recapture(runner)
        _add(rows, "torch_grouped_ms", forwards.times_ms())
    whole = create_moe_runner(portfolio, runner.moe_runner.shape, device=runner.device)
    with swapped_moe_runner(runner, whole):
        stage = restart_stage(runner, args, folder / "portfolio", nothing)
        starts["portfolio"] = _start_row(stage, start_s, stage.seconds)
        again = restart_stage(runner, args, folder / "portfolio", nothing)
        starts["portfolio, warm"] = _start_row(again, start_s, again.seconds)
        portfolio_seed = _export_seed(stage, folder / "portfolio-seeds")
        recapture(runner)
        _add(rows, "portfolio_ms", forwards.times_ms())
    return {
        "backend": runner.moe_runner.name,
        "portfolio_report": stage.to_json(),
        "bounds": bounds.to_json(),
        "seq_len": load.seq_len,
        "decode_batch_sizes": list(runner.limits.decode_batch_sizes),
        "kv_tokens": runner.max_total_num_tokens,
        "capture_s": capture_s,
        "starts": starts,
        "cold_report": cold.to_json(),
        "seed": json.loads((seeds / SEED_FILE).read_text()),
        "portfolio_seed": json.loads((portfolio_seed / SEED_FILE).read_text()),
        "rows": rows,
    }


class Forwards:
    """The timed forwards of one runner, on the same batches for every arm."""

    def __init__(self, runner: ModelRunner, load: EngineLoad) -> None:
        self._runner, self._load = runner, load
        driver = Driver(runner)
        driver.fill_kv()
        self._batches: dict[tuple[str, int], ForwardBatch] = {}
        self._rows_of_pool: dict[tuple[str, int], torch.Tensor] = {}
        for size in load.decode_batch_sizes:
            self._keep("decode", size, driver.decode(size, load.seq_len))
            driver.release()  # batches of different sizes share rows and slots: only one runs at a time
        for size in load.prefill_sizes:
            self._keep("prefill", size, driver.prefill([driver.random_ids(size)]))
            driver.release()

    def release(self) -> None:
        """Forget the batches, whose rows and slots belong to nobody already."""
        self._batches, self._rows_of_pool = {}, {}

    def _keep(self, phase: str, size: int, batch: ForwardBatch) -> None:
        self._batches[phase, size] = batch
        rows = self._runner.req_to_token_pool.req_to_token[batch.req_pool_indices, : max(batch.seq_lens_cpu)]
        self._rows_of_pool[phase, size] = rows

    def times_ms(self) -> dict[tuple[str, int], float]:
        """Milliseconds of each forward: decode through the graphs where there are any, prefill eagerly."""
        times = {}
        for key, batch in self._batches.items():
            self._restore(key)
            is_decode = key[0] == "decode"
            repeats = self._load.decode_repeats if is_decode else self._load.prefill_repeats
            times[key] = step_ms(partial(self._runner.forward, batch), self._runner.device, repeats)
            logger.info("%s %d: %.3f ms", *key, times[key])
        return times

    def bound_rows(self, bounds: Bounds) -> list[dict[str, Any]]:
        """One row for each forward, with the experts that it touches and its bound in milliseconds."""
        rows = []
        for key, batch in self._batches.items():
            self._restore(key)
            with recorded_routing(self._runner) as touched:
                self._runner.forward_hidden(batch)
            num_bytes, flops = self._work(batch, touched)
            rows.append(
                {
                    "phase": key[0],
                    "tokens": key[1],
                    "experts_per_layer": sum(touched) / max(1, len(touched)),
                    "gigabytes": num_bytes / 1e9,
                    "bound_ms": 1e-3 * bounds.us(num_bytes, flops),
                }
            )
        return rows

    def _restore(self, key: tuple[str, int]) -> None:
        """Enter the batch's slots into its rows again: other batches used the same rows."""
        slots = self._rows_of_pool[key]
        rows = self._batches[key].req_pool_indices
        self._runner.req_to_token_pool.req_to_token[rows, : slots.shape[1]] = slots

    def _work(self, batch: ForwardBatch, touched: list[int]) -> tuple[int, int]:
        """Bytes that one forward must move (weights it touches, keys and values it reads), and its operations.

        Activations are left out: they fit the caches at decode sizes and overlap at prefill sizes.
        """
        runner, config = self._runner, self._runner.model_config
        size = runner.dtype.itemsize
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        attention = config.hidden_size * config.head_dim * (heads + config.num_attention_heads)
        head = config.hidden_size * config.vocab_size
        layers, num_tokens = config.num_hidden_layers, batch.num_tokens
        windows = [config.window_of(layer) or config.context_length for layer in range(layers)]
        router = config.hidden_size * config.num_experts
        kv_row = config.num_key_value_heads * config.head_dim * runner.kv_pool.dtype.itemsize * 2
        num_bytes = size * (sum(touched) * expert + layers * (attention + router) + head)
        num_bytes += kv_row * sum(min(length, w) for length in batch.seq_lens_cpu for w in windows)
        per_token = layers * (attention + router + config.num_experts_per_tok * expert)
        flops = 2 * (num_tokens * per_token + batch.batch_size * head)
        new = batch.extend_seq_lens_cpu or [1] * batch.batch_size
        # Each new token attends to all before it: on average half of the new ones, and all older ones.
        lengths = list(zip(new, batch.seq_lens_cpu, strict=True))
        pairs = sum(n * min(total - n / 2, w) for n, total in lengths for w in windows)
        flops += int(4 * pairs * config.num_attention_heads * config.head_dim)
        return num_bytes, flops


def restart_stage(
    runner: ModelRunner, args: ServerArgs, cache_root: Path, seeds: Path | None = None
) -> StageReport:
    """Run the stage as a fresh process would: nothing live in the tuner, records below `cache_root`.

    `seeds` is a folder that stands in for the built-in seeds; it may be empty.
    """
    flashinfer_api.forget_everything()
    settings = replace(settings_of(args), cache_root=cache_root, seed_folder=seeds)
    return run_stage(ModelRunnerHost(runner), settings, agreement_of(runner, settings.timeout_s))


def recapture(runner: ModelRunner) -> float:
    """Capture the decode graphs again with the choices that are in force now; gives the seconds."""
    runner.decode_graphs = None
    gc.collect()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.monotonic()
    runner.decode_graphs = capture_decode_graphs(runner)
    return time.monotonic() - began


@contextlib.contextmanager
def swapped_moe_runner(runner: ModelRunner, other: MoERunner) -> Iterator[None]:
    """Have all layers run their experts by `other` inside the block, as if --moe-runner-backend named it."""
    layers = moe_layers(runner.model)
    before, args = runner.moe_runner, runner.server_args

    def use(moe_runner: MoERunner, server_args: ServerArgs) -> None:
        runner.moe_runner, runner.server_args = moe_runner, server_args
        for layer in layers:
            layer.runner = moe_runner

    use(other, replace(args, moe_runner_backend=other.name))
    try:
        yield
    finally:
        use(before, args)


def _export_seed(report: StageReport, seeds: Path) -> Path:
    """Put a seed of the records that `report` left into the folder `seeds`; gives the folder."""
    seeds.mkdir(parents=True, exist_ok=True)
    assert report.cache_path is not None, "a completed stage names its file"
    code = export_seed.main([report.cache_path, "-o", str(seeds / SEED_FILE), "--force"])
    if code:
        raise RuntimeError(f"export-seed ended with {code}")
    return seeds


def _start_row(report: StageReport, start_without_stage_s: float, stage_s: float) -> dict[str, Any]:
    records = report.records
    return {
        "status": report.status,
        "reason": report.reason,
        "stage_s": report.seconds,
        "timings": report.timings,
        "profiles": report.profiles_tuned,
        "records": {name: getattr(records, name) for name in ("seeded", "user", "given", "tuned")},
        "fallbacks": report.fallbacks,
        "start_s": start_without_stage_s + stage_s,
        "share_of_start": stage_s / (start_without_stage_s + stage_s),
    }


def _add(rows: list[dict[str, Any]], name: str, times: dict[tuple[str, int], float]) -> None:
    for row in rows:
        row[name] = times[row["phase"], row["tokens"]]
