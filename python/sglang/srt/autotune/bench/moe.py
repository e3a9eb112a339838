"""Piece `moe`: the MoE op at every power of two, by each implementation alone and by the portfolio, beside a bound."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.bounds import measure_bounds, moe_work
from sglang.srt.autotune.bench.geometry import shape_of
from sglang.srt.autotune.bench.one_layer import OneLayer, tune
from sglang.srt.autotune.plan import bucket_of
from sglang.srt.autotune.timer import OpTimer
from sglang.srt.layers.moe.registry import create_moe_runner

logger = logging.getLogger(__name__)

SINGLES = ("flashinfer_cutlass", "triton_grouped", "torch_grouped")
#: Times of an arm that are taken at a turn; the arms take turns, so that a slow moment of the machine meets each.
TIMES_AT_A_TURN = 5
SAMPLED_ROWS = 16

#: Gives so many times in milliseconds.
Times = Callable[[int], list[float]]


@dataclass
class Arm:
    """One way to run the op as it was tuned: by token count its times, its error, and what it chose."""

    name: str
    stage: dict[str, Any] | None = None
    winners: dict[int, dict[str, str]] = field(default_factory=dict)
    times: dict[int, Times] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    fallbacks: int = 0


@torch.inference_mode()
def measure_moe(
    config: dict[str, Any],
    max_num_tokens: int,
    device: torch.device,
    portfolio: str = "portfolio",
    singles: Sequence[str] = SINGLES,
    repeats: int = 30,
) -> dict[str, Any]:
    """Times of one layer's experts, graph replay with a cold L2, in microseconds.

    `portfolio` and `singles` are values of `--moe-runner-backend`. Each is tuned by a stage of its own in this process,
    with an empty tuner, and captured as tuned; then all are timed in turns, on the same weights and inputs. The
    default is that of the first of `singles` that has one.
    """
    bounds = measure_bounds(device)
    shape = shape_of(config, max_num_tokens)
    layer = OneLayer(shape, create_moe_runner(portfolio, shape, device=device), device)
    sizes = powers_of_two(max_num_tokens)
    inputs = {size: layer.inputs(size) for size in sizes}
    samples = {size: sampled_rows(size) for size in sizes}
    expected = {size: layer.float32_rows(inputs[size], samples[size]) for size in sizes}
    timer = OpTimer(device)
    arms = [Arm(name) for name in (portfolio, *singles)]
    default: Arm | None = None
    for arm in arms:
        layer.runner = create_moe_runner(arm.name, shape, device=device)
        _tune(arm, layer, max_num_tokens)
        for size in sizes:
            run = partial(layer.run, inputs[size], layer.runner)
            with flashinfer_api.observed() as lookups:
                out = run()[samples[size]].float()
                arm.times[size] = timer.frozen(run)
            arm.fallbacks += len(lookups.fallbacks)
            arm.errors[size] = float((out - expected[size]).norm() / expected[size].norm().clamp_min(1e-20))
        if default is None and arm is not arms[0] and layer.runner.op_names:
            default = Arm("default")
            with flashinfer_api.observed(), flashinfer_api.only_defaults(layer.runner.op_names):
                for size in sizes:
                    default.times[size] = timer.frozen(partial(layer.run, inputs[size], layer.runner))
    rows = []
    for size in sizes:
        touched, num_bytes, flops = moe_work(shape, inputs[size][1])
        timed = [*arms, default] if default is not None else arms
        times_us = _in_turns([arm.times[size] for arm in timed], repeats)
        row: dict[str, Any] = {
            "tokens": size,
            "experts": touched,
            "fallbacks": arms[0].fallbacks,
            "winners": arms[0].winners.get(bucket_of(size, max_num_tokens), {}),
            "bound_us": bounds.us(num_bytes, flops),
        }
        row |= {f"{arm.name}_us": time for arm, time in zip(timed, times_us, strict=True)}
        row |= {f"{arm.name}_error": arm.errors[size] for arm in arms}
        words = ", ".join(
            f"{name.removesuffix('_us')} {row[name]:.1f}" for name in row if name.endswith("_us")
        )
        logger.info("%5d tokens: %s us", size, words)
        rows.append(row)
    return {
        "portfolio": portfolio,
        "singles": list(singles),
        "geometry": {
            name: config[name]
            for name in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
        },
        "dtype": config["torch_dtype"],
        "bounds": bounds.to_json(),
        "repeats": repeats,
        "stages": {arm.name: arm.stage for arm in arms if arm.stage is not None},
        "rows": rows,
    }


def _tune(arm: Arm, layer: OneLayer, max_num_tokens: int) -> None:
    """Have the stage tune the layer as it now runs, if there is anything to tune."""
    flashinfer_api.forget_everything()
    if not layer.runner.op_names:
        return
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        report = tune(layer, max_num_tokens, Path(folder))
    if report.status != "completed":
        raise RuntimeError(f"the stage did not tune {arm.name}: {report.status}, {report.reason}")
    arm.stage = report.to_json()
    arm.winners = {step.num_tokens: step.winners for step in report.steps}


def _in_turns(all_times: Sequence[Times], repeats: int) -> list[float]:
    """Medians of `repeats` times of each, in microseconds."""
    taken: list[list[float]] = [[] for _ in all_times]
    while len(taken[0]) < repeats:
        count = min(TIMES_AT_A_TURN, repeats - len(taken[0]))
        for times, so_far in zip(all_times, taken, strict=True):
            so_far += times(count)
    return [1e3 * statistics.median(times_ms) for times_ms in taken]


def sampled_rows(num_tokens: int) -> list[int]:
    rows = torch.linspace(0, num_tokens - 1, min(SAMPLED_ROWS, num_tokens)).long()
    return [int(row) for row in rows.unique()]


def powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]
