"""The mixture-of-experts layer: router, this rank's experts, and the sum over ranks."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.dp_attention import gather_tokens, local_tokens
from sglang.srt.layers.linear import Linear, divide
from sglang.srt.layers.moe.activation import PLAIN_SWIGLU, MoEActivation
from sglang.srt.layers.moe.base import ExpertWeights, MoERunner, MoEShape
from sglang.srt.layers.moe.megamoe import MegaMoERunner
from sglang.srt.layers.moe.topk import expert_selector, typical_topk_ids
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.weights import NamedSlots, WeightSlot


def moe_shape(
    config: ModelConfig, parallel: ParallelState, dtype: torch.dtype, max_num_tokens: int
) -> MoEShape:
    """This rank's share of the experts. `max_num_tokens` counts what the op sees in one call, gathered ranks
    included.
    """
    ep, moe_tp = parallel.ep, parallel.moe_tp
    return MoEShape(
        hidden_size=config.hidden_size,
        intermediate_size=divide(config.moe_intermediate_size, moe_tp.size, "width of an expert"),
        num_experts=config.num_experts,
        num_local_experts=divide(config.num_experts, ep.size, "experts"),
        top_k=config.num_experts_per_tok,
        dtype=dtype,
        max_num_tokens=max_num_tokens,
        ep_size=ep.size,
        ep_rank=ep.rank,
        tp_size=moe_tp.size,
        tp_rank=moe_tp.rank,
        activation=moe_activation(config),
        has_bias=config.expert_bias,
    )


def moe_activation(config: ModelConfig) -> MoEActivation:
    """Between the projections of an expert: plain SwiGLU, or that of gpt-oss, whose up projection is raised by one."""
    if config.swiglu_alpha is None:
        return PLAIN_SWIGLU
    return MoEActivation(alpha=config.swiglu_alpha, beta=1.0, limit=config.swiglu_limit)


class FusedMoE(nn.Module):
    """Routes each token to `top_k` experts; every rank runs the experts it holds and the results are summed.

    `w13` is `[E_local, 2 * I_local, H]` with UP rows before GATE rows, `w2` is `[E_local, H, I_local]`. Where the
    model's experts have biases, `b13` is `[E_local, 2 * I_local]` and `b2`, whole on every rank, `[E_local, H]`.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
        *,
        router_bias: bool = False,
    ) -> None:
        super().__init__()
        self.parallel, self.runner, self.shape = parallel, runner, runner.shape
        self.renormalize = config.norm_topk_prob
        self.full_intermediate_size = config.moe_intermediate_size
        experts, hidden, inner = (
            self.shape.num_local_experts,
            config.hidden_size,
            self.shape.intermediate_size,
        )
        self._select_experts = expert_selector(device)
        self.gate = Linear(hidden, config.num_experts, router_bias, dtype, device)
        w13 = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=device)
        w2 = torch.empty(experts, hidden, inner, dtype=dtype, device=device)
        self.w13 = nn.Parameter(w13, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)
        self.b13: nn.Parameter | None = None
        self.b2: nn.Parameter | None = None
        if self.shape.has_bias:
            b13 = torch.zeros(experts, 2 * inner, dtype=dtype, device=device)
            b2 = torch.zeros(experts, hidden, dtype=dtype, device=device)
            self.b13 = nn.Parameter(b13, requires_grad=False)
            self.b2 = nn.Parameter(b2, requires_grad=False)
        #: Number under which a MegaMoE runner took the weights over; None with any other runner.
        self.mega_owner: int | None = None

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.w13, self.w2, self.b13, self.b2)

    def forward(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H]` -> `[T, H]`. Under attention DP all ranks must call it, those without tokens too."""
        num_tokens = batch.global_num_tokens
        if self.mega_owner is not None:
            return self._mega(self.mega_owner, hidden_states, batch)
        if num_tokens is None:
            assert self.parallel.attn_dp.size == 1, "attention DP needs the token counts of all ranks"
            return self._experts(hidden_states, batch.typical_routing)
        gathered = gather_tokens(hidden_states, num_tokens, self.parallel.attn_dp)
        return local_tokens(self._experts(gathered, batch.typical_routing), num_tokens, self.parallel.attn_dp)

    def _mega(self, owner: int, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Local tokens stay local: the kernel exchanges them, and ranks without any take part."""
        assert isinstance(self.runner, MegaMoERunner)
        topk_weights, topk_ids = self._route(hidden_states, batch.typical_routing)
        return self.runner.exchange_and_run(
            owner, hidden_states, topk_ids, topk_weights, batch.global_num_tokens
        )

    def _route(self, hidden_states: torch.Tensor, typical: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `[T, K]` float32 and ids `[T, K]` int32."""
        num_tokens, top_k, device = hidden_states.shape[0], self.shape.top_k, hidden_states.device
        if num_tokens == 0:
            empty = torch.empty((0, top_k), device=device)
            return empty, empty.to(torch.int32)
        topk_weights, topk_ids = self._select_experts(self.gate(hidden_states), top_k, self.renormalize)
        if typical:
            topk_ids = typical_topk_ids(num_tokens, top_k, self.shape.num_experts, device)
        return topk_weights, topk_ids

    def _experts(self, hidden_states: torch.Tensor, typical: bool) -> torch.Tensor:
        if hidden_states.shape[0] == 0:
            return hidden_states
        topk_weights, topk_ids = self._route(hidden_states, typical)
        partial = self.runner.run(hidden_states, topk_ids, topk_weights, *self.weights)
        # The ep and moe_tp groups tile the tp group, so one sum over it is the sum over both.
        return self.parallel.tp.all_reduce(partial)

    def weight_slots(self, prefix: str) -> NamedSlots:
        """Experts one by one, as published checkpoints have them, or stacked (`gate_up_proj`, gate first)."""
        yield from self.gate.weight_slots(f"{prefix}.gate")
        stacked_w13, stacked_w2 = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
        first, inner = self.shape.first_local_expert, self.shape.intermediate_size
        full = self.full_intermediate_size
        hidden = self.w2.shape[1]
        start = self.shape.tp_rank * inner
        shard = slice(start, start + inner)
        every = slice(None)
        for expert in range(self.shape.num_experts):
            local = expert - first
            held = 0 <= local < self.shape.num_local_experts
            name = f"{prefix}.experts.{expert}"
            up = self.w13[local, :inner] if held else None
            gate = self.w13[local, inner:] if held else None
            down = self.w2[local] if held else None
            yield f"{name}.up_proj.weight", WeightSlot((full, hidden), up, (shard,), stacked_w13)
            yield f"{name}.gate_proj.weight", WeightSlot((full, hidden), gate, (shard,), stacked_w13)
            yield f"{name}.down_proj.weight", WeightSlot((hidden, full), down, (every, shard), stacked_w2)

        local_experts = slice(first, first + self.shape.num_local_experts)
        up_shard = slice(full + start, full + start + inner)
        w13_shape, w2_shape = (
            (self.shape.num_experts, 2 * full, hidden),
            (self.shape.num_experts, hidden, full),
        )
        by_expert = f"{prefix}.experts.{first}"
        instead = f"{by_expert}.gate_proj.weight"
        yield stacked_w13, WeightSlot(w13_shape, self.w13[:, :inner], (local_experts, up_shard), instead)
        yield stacked_w13, WeightSlot(w13_shape, self.w13[:, inner:], (local_experts, shard), instead)
        instead = f"{by_expert}.down_proj.weight"
        yield stacked_w2, WeightSlot(w2_shape, self.w2, (local_experts, every, shard), instead)


def moe_layers(model: nn.Module) -> list[FusedMoE]:
    """The mixture-of-experts layers of `model`, in their order."""
    return [module for module in model.modules() if isinstance(module, FusedMoE)]
