"""An engine of one MoE layer, which the stage tunes like any other: the op alone, without 60 GB around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.identity import EngineIdentity, Topology
from sglang.srt.autotune.plan import Limits, Shape
from sglang.srt.autotune.report import StageReport
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.autotune.stage import run_stage
from sglang.srt.layers.moe.base import ExpertWeights, MoERunner, MoEShape
from sglang.srt.layers.moe.topk import select_experts
from sglang.srt.limits import standard_batch_sizes
from sglang.srt.model_executor.autotune_host import MoEProbe

_WEIGHT_STD = 0.02


class OneLayer:
    """The experts of one layer with random `weights`, and who runs them."""

    def __init__(self, shape: MoEShape, runner: MoERunner, device: torch.device, seed: int = 7) -> None:
        self.shape, self.runner, self.device = shape, runner, device
        generator = torch.Generator(device=device).manual_seed(seed)
        experts, inner, hidden = shape.num_local_experts, shape.intermediate_size, shape.hidden_size

        def normal(*size: int) -> torch.Tensor:
            empty = torch.empty(size, dtype=shape.dtype, device=device)
            return empty.normal_(std=_WEIGHT_STD, generator=generator)

        self.weights = ExpertWeights(normal(experts, 2 * inner, hidden), normal(experts, hidden, inner))
        if shape.has_bias:
            self.weights = self.weights._replace(b13=normal(experts, 2 * inner), b2=normal(experts, hidden))

    def inputs(self, num_tokens: int, seed: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(hidden_states, topk_ids, topk_weights)`, routed as by a router that likes no expert more than another."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        size = (num_tokens, self.shape.hidden_size)
        hidden = torch.randn(size, generator=generator, device=self.device).to(self.shape.dtype)
        size = (num_tokens, self.shape.num_experts)
        logits = torch.randn(size, generator=generator, device=self.device)
        weights, ids = select_experts(logits, self.shape.top_k, renormalize=True)
        return hidden, ids, weights

    def run(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], runner: MoERunner | None = None
    ) -> torch.Tensor:
        """Its experts on `inputs`, by its own runner or another."""
        hidden, ids, weights = inputs
        return (runner or self.runner).run(hidden, ids, weights, *self.weights)

    def float32_rows(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rows: Sequence[int]
    ) -> torch.Tensor:
        """`[len(rows), H]` float32: the experts of these tokens, one after another."""
        hidden, ids, weights = inputs
        results = []
        for row in rows:
            x, total = hidden[row].float(), torch.zeros(self.shape.hidden_size, device=self.device)
            for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
                total += weight * self.weights.float32_expert(self.shape, expert, x)
            results.append(total)
        return torch.stack(results)


class OneLayerHost:
    """Implements `autotune.host.Host` for a `OneLayer`."""

    def __init__(self, layer: OneLayer, limits: Limits) -> None:
        self._layer, self.limits = layer, limits
        self.device = layer.device
        self.capability = (
            torch.cuda.get_device_capability(layer.device) if layer.device.type == "cuda" else None
        )
        self.topology = Topology()
        shape = layer.shape
        geometry = {
            "hidden_size": shape.hidden_size,
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
        }
        dtype = str(shape.dtype).removeprefix("torch.")
        self.identity = EngineIdentity(
            model=geometry, applies={"model_type": "one_layer", **geometry}, dtype=dtype
        )
        self.moe_backend = layer.runner.name
        self.probe_dtype = shape.dtype
        self.op_names = layer.runner.op_names
        op = getattr(layer.runner, "op", None)
        self.tuned_ops: tuple[Any, ...] = () if op is None else (op,)
        self.megamoe: Any | None = None
        self.timing_group: Any | None = None

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def dummy_forward(self, shape: Shape, *, every_layer: bool = True) -> None:
        self.op_probe(shape.op_tokens).run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def op_probe(self, num_tokens: int) -> MoEProbe:
        return MoEProbe(self._layer, self._layer.inputs(num_tokens)[0])  # type: ignore[arg-type]

    def free_memory_bytes(self) -> int | None:
        return None

    def step_memory_bytes(self, shape: Shape) -> int:
        return 0


def tune(layer: OneLayer, max_num_tokens: int, cache_root: Path, decode_ceiling: int = 256) -> StageReport:
    """Run the stage over the whole grid up to `max_num_tokens`, keeping its records below `cache_root`."""
    ceiling = min(decode_ceiling, max_num_tokens)
    limits = Limits(tuple(standard_batch_sizes(ceiling)), ceiling, max_num_tokens)
    return run_stage(
        OneLayerHost(layer, limits),
        StageSettings(cache_root=cache_root, run_id="bench"),
        Agreement.alone(),
    )
