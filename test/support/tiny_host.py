"""A very small engine that carries the autotune stage: one MoE layer of the real reference op, nothing else.

It implements `autotune.host.Host` as any engine would; the op, the AutoTuner, the record files and the votes are
the real ones. Its forwards are fast, so that a test can run the stage many times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.identity import EngineIdentity, Topology
from sglang.srt.autotune.plan import Limits, Shape
from sglang.srt.autotune.report import StageReport
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.autotune.stage import run_stage
from sglang.srt.layers.moe.base import ExpertWeights, MoEShape
from sglang.srt.layers.moe.reference import ReferenceMoE, ReferenceMoERunner
from sglang.srt.layers.moe.topk import typical_topk_ids

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 4, 2


class TinyHost:
    """``between`` is called in the middle of every dummy forward: a test's place to fail or to kill."""

    def __init__(
        self,
        limits: Limits | None = None,
        topology: Topology | None = None,
        *,
        between: Callable[[Shape], None] = lambda shape: None,
        model: dict[str, Any] | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.capability = None
        self.limits = limits or Limits((1, 2, 4), 4, 16)
        self.topology = topology or Topology()
        self.identity = EngineIdentity(
            model={"hidden_size": HIDDEN, **(model or {})}, applies={"model_type": "tiny"}, dtype="float32"
        )
        self.moe_backend = "reference"
        self.probe_dtype = torch.float32
        self.runner = ReferenceMoERunner(
            MoEShape(HIDDEN, INNER, EXPERTS, EXPERTS, TOP_K, torch.float32, self.limits.max_op_tokens)
        )
        self.op_names = self.runner.op_names
        self.tuned_ops = (self.runner.op,)
        self.megamoe = None
        self.timing_group = None
        self.between = between
        self.forwards: list[Shape] = []
        self.free_bytes: int | None = None
        self.w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
        self.w2 = torch.randn(EXPERTS, HIDDEN, INNER)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def dummy_forward(self, shape: Shape, *, every_layer: bool = True) -> None:
        self.forwards.append(shape)
        self.between(shape)
        self.op_probe(shape.op_tokens).run()

    def op_probe(self, num_tokens: int) -> TinyProbe:
        return TinyProbe(self, num_tokens)

    def free_memory_bytes(self) -> int | None:
        return self.free_bytes

    def step_memory_bytes(self, shape: Shape) -> int:
        return 1 << 20


class TinyProbe:
    def __init__(self, host: TinyHost, num_tokens: int) -> None:
        self._host, self._hidden = host, torch.randn(num_tokens, HIDDEN)
        self._ids = typical_topk_ids(num_tokens, TOP_K, EXPERTS, host.device)
        self._weights = torch.full((num_tokens, TOP_K), 1 / TOP_K)

    def run(self) -> torch.Tensor:
        return self._host.runner.run(self._hidden, self._ids, self._weights, self._host.w13, self._host.w2)

    def compile_jobs(self) -> list[Callable[[], None]]:
        inputs = (self._hidden, self._ids, self._weights)
        return self._host.runner.compile_jobs(*inputs, ExpertWeights(self._host.w13, self._host.w2))

    def reference(self, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(min(max_rows, self._hidden.shape[0]))
        inputs = (self._hidden[rows], self._ids[rows], self._weights[rows])
        return rows, ReferenceMoE().forward([*inputs, self._host.w13, self._host.w2], tactic=0)


def start(
    root: Path,
    host: TinyHost | None = None,
    agreement: Agreement | None = None,
    **settings: Any,
) -> StageReport:
    """One start of a fresh process as far as the tuner is concerned: nothing live is left of earlier ones."""
    AutoTuner.get().clear_cache()
    host = host or TinyHost()
    return run_stage(
        host,
        StageSettings(cache_root=root, run_id="run", **settings),
        agreement or Agreement.alone(),
    )
