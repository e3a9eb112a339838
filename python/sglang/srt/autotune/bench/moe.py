"""Piece `moe`: the MoE op at every power of two, by each runner, beside its bound."""

from __future__ import annotations

import logging
import tempfile
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


@torch.inference_mode()
def measure_moe(
    config: dict[str, Any], max_num_tokens: int, device: torch.device, backend: str, repeats: int = 30
) -> dict[str, Any]:
    """Times of one layer's experts, graph replay with a cold L2, in microseconds.

    `backend` is the tunable runner: its default and tuned choices are taken from one process, tuned by the stage
    itself, beside `torch_grouped` on the same weights and inputs.
    """
    bounds = measure_bounds(device)
    shape = shape_of(config, max_num_tokens)
    layer = OneLayer(shape, create_moe_runner(backend, shape, device=device), device)
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        report = tune(layer, max_num_tokens, Path(folder))
    if report.status != "completed":
        raise RuntimeError(f"the stage did not tune: {report.status}, {report.reason}")
    winners = {step.num_tokens: step.winners for step in report.steps}
    grouped = create_moe_runner("torch_grouped", shape, device=device)
    timer = OpTimer(device, repeats=repeats)
    rows = []
    for num_tokens in powers_of_two(max_num_tokens):
        inputs = layer.inputs(num_tokens)
        touched, num_bytes, flops = moe_work(shape, inputs[1])
        with flashinfer_api.observed() as lookups:
            tuned_ms = timer.measure_ms(partial(layer.run, inputs))
        with flashinfer_api.observed(), flashinfer_api.only_defaults(layer.runner.op_names):
            default_ms = timer.measure_ms(partial(layer.run, inputs))
        grouped_ms = timer.measure_ms(partial(layer.run, inputs, grouped))
        row = {
            "tokens": num_tokens,
            "experts": touched,
            "bound_us": bounds.us(num_bytes, flops),
            "tuned_us": 1e3 * tuned_ms,
            "torch_grouped_us": 1e3 * grouped_ms,
            "default_us": 1e3 * default_ms,
            "fallbacks": len(lookups.fallbacks),
            "winners": winners.get(bucket_of(num_tokens, max_num_tokens), {}),
        }
        logger.info(
            "%5d tokens: bound %.1f, tuned %.1f, torch_grouped %.1f, default %.1f us",
            *(row[name] for name in ("tokens", "bound_us", "tuned_us", "torch_grouped_us", "default_us")),
        )
        rows.append(row)
    return {
        "backend": backend,
        "geometry": {
            name: config[name]
            for name in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
        },
        "dtype": config["torch_dtype"],
        "bounds": bounds.to_json(),
        "repeats": repeats,
        "stage": report.to_json(),
        "rows": rows,
    }


def powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]
