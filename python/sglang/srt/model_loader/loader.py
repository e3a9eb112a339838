"""Building the model of one rank and filling it, from safetensors or from a seed."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.model_loader.weights import WeightSlot
from sglang.srt.models.registry import CausalLM, model_class

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
DUMMY_STD = 0.02
"""Spread of dummy weights: that of a fresh Qwen3, so that routing and activations look alike."""
LINE_INTERVAL_S = 10.0
"""Between two lines that say how far loading is."""
_NAMES_SHOWN = 8


def load_model(
    config: ModelConfig,
    parallel: ParallelState,
    moe_runner: MoERunner,
    dtype: torch.dtype,
    device: torch.device,
    *,
    load_format: str,
    seed: int,
) -> CausalLM:
    """The model of this rank, filled. `load_format` is auto, safetensors or dummy; `seed` is for dummy
    weights.

    Raises `ValueError` that names the files, tensors or sizes which do not fit.
    """
    start = time.perf_counter()
    model = model_class(config)(config, parallel, moe_runner, dtype, device)
    if load_format == "dummy":
        fill_with_dummy_weights(model, seed)
    else:
        load_safetensors(model, config.model_path, tells=parallel.world.rank == 0)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    logger.info("Weights ready: %.2f GiB in %.1f s", num_bytes / 2**30, time.perf_counter() - start)
    return model.eval()


def fill_with_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fill all matrices with uniform values that depend on `seed` and the parameter's name alone; norms stay
    one.

    Parameters that ranks hold in full are so the same on every rank. Values are made on the parameter's
    device.
    """
    bound = DUMMY_STD * math.sqrt(3)
    for name, param in model.named_parameters():
        if param.dim() < 2:
            continue
        generator = torch.Generator(device=param.device)
        # 32 bits: the CPU generator ignores those above.
        generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        param.data.uniform_(-bound, bound, generator=generator)


def load_safetensors(model: CausalLM, path: str, *, tells: bool = False) -> None:
    """Fill `model` from the safetensors files in directory `path`, reading only what this rank holds.

    `tells` logs how far it is, every `LINE_INTERVAL_S` seconds at most.

    Raises `ValueError` when files or tensors are missing, unexpected, or of another shape than config.json
    says.
    """
    slots: dict[str, list[WeightSlot]] = defaultdict(list)
    for name, slot in model.weight_slots():
        slots[name].append(slot)
    found: set[str] = set()
    unexpected: list[str] = []
    files, told_at = list(_checkpoint_files(path)), time.monotonic()
    for number, (file, names) in enumerate(files):
        if tells and time.monotonic() - told_at >= LINE_INTERVAL_S:
            logger.info("Loading weights: %d of %d files", number, len(files))
            told_at = time.monotonic()
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys() if names is None else names:  # noqa: SIM118 (not a dict)
                    if name in slots:
                        _copy(tensors.get_slice(name), slots[name], name, file)
                        found.add(name)
                    elif not model.belongs_elsewhere(name):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"--model-path: {file} cannot be read: {error}") from error
    missing = [
        name
        for name, targets in slots.items()
        if name not in found and not any(s.alternative in found for s in targets)
    ]
    if missing or unexpected:
        problems = [
            f"{kind} {_shown(names)}"
            for kind, names in (("misses", missing), ("has unknown", unexpected))
            if names
        ]
        raise ValueError(f"--model-path {path}: the checkpoint {' and '.join(problems)}")


def _copy(source: torch.Tensor, targets: list[WeightSlot], name: str, file: str) -> None:
    """Copy the parts of `source` (a safetensors slice, which reads what is indexed) to where they belong."""
    shape = tuple(source.get_shape())  # type: ignore[attr-defined]
    for slot in targets:
        if shape != slot.shape:
            raise ValueError(
                f"--model-path: {name} in {file} has shape {list(shape)} where config.json implies {list(slot.shape)}"
            )
        if slot.store is not None:
            slot.store(source[slot.index])
        elif slot.dest is not None:
            slot.dest.data.copy_(source[slot.index])


def _checkpoint_files(path: str) -> Iterator[tuple[str, list[str] | None]]:
    """The files of a checkpoint and the tensors to read from each; None: all of them."""
    index = os.path.join(path, INDEX_FILE)
    if os.path.isfile(index):
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, file in _read_index(index).items():
            by_file[file].append(name)
        for file, names in sorted(by_file.items()):
            full = os.path.join(path, file)
            if not os.path.isfile(full):
                raise ValueError(f"--model-path: {index} names {file}, which is not there")
            yield full, names
        return
    files = sorted(file for file in os.listdir(path) if file.endswith(".safetensors"))
    if not files:
        raise ValueError(
            f"--model-path {path}: there are no .safetensors files in that directory "
            "(--load-format dummy serves random weights)"
        )
    for file in files:
        yield os.path.join(path, file), None


def _read_index(index: str) -> dict[str, str]:
    try:
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--model-path: {index} is not a safetensors index: {error!r}") from error


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
