"""The model runner as the autotune stage sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.identity import Topology
from sglang.srt.autotune.plan import Phase, Shape
from sglang.srt.autotune_config import identity_of
from sglang.srt.layers.fused_moe import FusedMoE, moe_layers
from sglang.srt.layers.moe.megamoe import MegaMoERunner
from sglang.srt.layers.moe.topk import typical_topk_ids
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_SEED = 20


class ModelRunnerHost:
    """Implements `autotune.host.Host` for one rank's `ModelRunner`, before it serves anything."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.device = runner.device
        self.capability = (
            torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        )
        self.limits = runner.limits
        self.topology = topology_of(runner)
        self.identity = identity_of(
            runner.server_args, runner.model_config, self.device.type, self.capability
        )
        self.moe_backend = runner.moe_runner.name
        self.probe_dtype = runner.dtype
        self.op_names = runner.moe_runner.op_names
        op = getattr(runner.moe_runner, "op", None)
        self.tuned_ops: tuple[Any, ...] = () if op is None else (op,)
        mega = runner.moe_runner
        self.megamoe = mega.host() if isinstance(mega, MegaMoERunner) else None
        tp = runner.parallel.tp
        self.timing_group = tp.cpu_group if tp.size > 1 and self.device.type == "cuda" else None
        self._generator = torch.Generator(self.device).manual_seed(_SEED)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def dummy_forward(self, shape: Shape, *, every_layer: bool = True) -> None:
        """One forward of random tokens, routed as a trained router would.

        Pipeline stages run theirs apart from each other, each after the first from random hidden states: tuning
        needs shapes, and a stage that waits for another is one more way to hang.
        """
        runner, parallel = self._runner, self._runner.parallel
        lengths = shape.sequence_lengths(parallel.attn_dp.rank)
        is_decode = shape.phase is Phase.DECODE and shape.tokens_per_sequence == 1
        mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
        num_tokens = sum(lengths)
        ids = torch.randint(
            runner.model_config.vocab_size, (num_tokens,), generator=self._generator, device=self.device
        )
        batch = ForwardBatch.dummy(mode if lengths else ForwardMode.IDLE, lengths, ids)
        batch.typical_routing = True
        batch.num_layers = None if every_layer else runner.model.num_distinct_layers()
        if parallel.attn_dp.size > 1:
            batch.global_num_tokens = list(shape.tokens_of_rank)
        hidden = None
        if not parallel.pp.is_first:
            hidden = self._random(num_tokens, runner.model_config.hidden_size)
        runner.forward_hidden(batch, hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def op_probe(self, num_tokens: int) -> MoEProbe:
        layer = moe_layers(self._runner.model)[0]
        return MoEProbe(layer, self._random(num_tokens, layer.shape.hidden_size))

    def free_memory_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def step_memory_bytes(self, shape: Shape) -> int:
        """Activations of one layer at this shape, with the copies that the MoE makes of each token for its experts."""
        config, size = self._runner.model_config, self.probe_dtype.itemsize
        local = max(shape.tokens_of_rank)
        attention = local * config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
        expert_rows = shape.op_tokens * config.num_experts_per_tok
        experts = expert_rows * (2 * config.hidden_size + 3 * config.moe_intermediate_size)
        return 2 * size * (attention + experts + 4 * local * config.hidden_size)

    def _random(self, num_tokens: int, width: int) -> torch.Tensor:
        values = torch.randn((num_tokens, width), generator=self._generator, device=self.device)
        return values.to(self.probe_dtype)


class MoEProbe:
    """One layer's experts on fixed inputs ``hidden`` `[T, H]` and the routing of `typical_topk_ids`."""

    def __init__(self, layer: FusedMoE, hidden: torch.Tensor) -> None:
        self._layer, self._hidden, shape = layer, hidden, layer.shape
        num_tokens, top_k = hidden.shape[0], shape.top_k
        self._ids = typical_topk_ids(num_tokens, top_k, shape.num_experts, hidden.device)
        self._weights = torch.full((num_tokens, top_k), 1 / top_k, dtype=torch.float32, device=hidden.device)

    def run(self) -> torch.Tensor:
        layer = self._layer
        return layer.runner.run(self._hidden, self._ids, self._weights, *layer.weights)

    def compile_jobs(self) -> list[Callable[[], None]]:
        layer = self._layer
        return layer.runner.compile_jobs(self._hidden, self._ids, self._weights, layer.weights)

    def reference(self, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, first = self._hidden.shape[0], self._layer.shape.first_local_expert
        rows = (
            torch.linspace(0, num_tokens - 1, min(max_rows, num_tokens))
            .long()
            .unique()
            .to(self._hidden.device)
        )
        results = []
        for row in rows.tolist():
            x = self._hidden[row].float()
            total = torch.zeros_like(x)
            for expert, weight in zip(self._ids[row].tolist(), self._weights[row].tolist(), strict=True):
                local = expert - first
                if 0 <= local < self._layer.shape.num_local_experts:
                    total += weight * self._layer.weights.float32_expert(self._layer.shape, local, x)
            results.append(total)
        return rows, torch.stack(results)


def topology_of(runner: ModelRunner) -> Topology:
    """Whom this rank must agree with: all ranks take the same branch, a TP group chooses alike."""
    parallel = runner.parallel
    world = parallel.world
    return Topology(
        rank=world.ranks[world.rank],
        world_size=world.size,
        tp_rank=parallel.tp.rank,
        pp_rank=parallel.pp.rank,
        dp_rank=parallel.attn_dp.rank,
        ep_rank=parallel.ep.rank,
        coupled=world.ranks,
        alike=parallel.tp.ranks,
    )


def agreement_of(runner: ModelRunner, timeout_s: float) -> Agreement:
    """Votes over the store of the rendezvous; alone with one rank."""
    world = runner.parallel.world
    if world.size == 1:
        return Agreement.alone(timeout_s)
    return Agreement(runner.parallel.store, world.ranks[world.rank], world.ranks, timeout_s)
