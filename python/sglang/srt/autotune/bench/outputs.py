"""Piece `outputs`: tuned results against float32, at and beside the edges of buckets, and two equal starts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.drive import Driver, build_runner
from sglang.srt.autotune.bench.engine import restart_stage
from sglang.srt.autotune.bench.geometry import shape_of, write_config
from sglang.srt.autotune.bench.one_layer import OneLayer, tune
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SAMPLED_ROWS = 32
GREEDY_WITHIN_S = 240.0


def measure_outputs(
    config: dict[str, Any],
    max_num_tokens: int,
    token_counts: Sequence[int],
    prompt_lengths: Sequence[int],
    device: torch.device,
    backend: str,
    flags: dict[str, Any],
    num_layers: int = 4,
) -> dict[str, Any]:
    """Relative errors (norm of the difference over norm of the reference) and whether two starts say the same.

    `flags` are fields of `ServerArgs` for the engines, which have `num_layers` layers of the geometry.
    """
    layer = _layer_errors(config, max_num_tokens, token_counts, device, backend)
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        model = write_config(Path(folder, "model"), config, num_hidden_layers=num_layers)
        args = {"model_path": str(model), "load_format": "dummy", "device": device.type, **flags}
        logits = _logit_errors(args, prompt_lengths, Path(folder))
        greedy = _two_starts(args)
    return {
        "sampled_rows": SAMPLED_ROWS,
        "num_layers": num_layers,
        "layer": layer,
        "logits": logits,
        "greedy": greedy,
    }


@torch.inference_mode()
def _layer_errors(
    config: dict[str, Any],
    max_num_tokens: int,
    token_counts: Sequence[int],
    device: torch.device,
    backend: str,
) -> list[dict[str, Any]]:
    """One MoE layer by each choice, sampled rows against float32."""
    flashinfer_api.forget_everything()
    shape = shape_of(config, max_num_tokens)
    layer = OneLayer(shape, create_moe_runner(backend, shape, device=device), device)
    grouped = create_moe_runner("torch_grouped", shape, device=device)
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        tune(layer, max_num_tokens, Path(folder))
    rows = []
    for num_tokens in token_counts:
        inputs = layer.inputs(num_tokens)
        sample = torch.linspace(0, num_tokens - 1, min(SAMPLED_ROWS, num_tokens)).long().unique().tolist()
        expected = layer.float32_rows(inputs, sample)
        with flashinfer_api.observed() as lookups:
            tuned = layer.run(inputs)
        with flashinfer_api.observed(), flashinfer_api.only_defaults(layer.runner.op_names):
            default = layer.run(inputs)
        baseline = layer.run(inputs, grouped)
        row = {
            "tokens": num_tokens,
            "tuned_error": relative_error(tuned[sample], expected),
            "default_error": relative_error(default[sample], expected),
            "torch_grouped_error": relative_error(baseline[sample], expected),
            "tuned_to_default": relative_error(tuned, default.float()),
            "fallbacks": len(lookups.fallbacks),
        }
        logger.info(
            "%d tokens: tuned off by %.2e, default by %.2e",
            num_tokens,
            row["tuned_error"],
            row["default_error"],
        )
        rows.append(row)
    return rows


def _logit_errors(args: dict[str, Any], prompt_lengths: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Logits of a few layers after one prompt: default and tuned against the same weights in float32."""
    flashinfer_api.forget_everything()
    server_args = ServerArgs(**args, disable_cuda_graph=True)
    runner = build_runner(replace(server_args, disable_flashinfer_autotune=True))
    driver = Driver(runner)
    prompts = [driver.random_ids(length) for length in prompt_lengths]
    default = _logits(runner, prompts)
    report = restart_stage(runner, server_args, folder / "records")
    tuned = _logits(runner, prompts)
    plain = replace(
        server_args,
        dtype="float32",
        attention_backend="torch_native",
        moe_runner_backend="reference",
        disable_flashinfer_autotune=True,
    )
    reference = build_runner(plain)
    weights = {name: tensor.float() for name, tensor in runner.model.state_dict().items()}
    reference.model.load_state_dict(weights)
    expected = _logits(reference, prompts)
    return [
        {
            "tokens": length,
            "tuned_error": relative_error(tuned[i], expected[i]),
            "default_error": relative_error(default[i], expected[i]),
            "tuned_to_default": relative_error(tuned[i], default[i]),
            "fallbacks": report.fallbacks,
        }
        for i, length in enumerate(prompt_lengths)
    ]


def _logits(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """`[1, vocab]` float32 after each prompt, one forward each."""
    driver, results = Driver(runner), []
    for prompt in prompts:
        results.append(runner.forward(driver.prefill([prompt])).float().clone())
        driver.release()
    return results


def _two_starts(args: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of two processes under deterministic inference."""
    flags = ["--enable-deterministic-inference"]
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    command = [sys.executable, "-m", "sglang.srt.autotune.bench.greedy", *flags]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=GREEDY_WITHIN_S)
        if done.returncode:
            raise RuntimeError(f"a deterministic start ended with {done.returncode}:\n{done.stderr[-2000:]}")
        outputs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {
        "identical": outputs[0] == outputs[1],
        "tokens": sum(map(len, outputs[0])),
        "distinct": len({token for output in outputs[0] for token in output}),
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm().clamp_min(1e-20))
