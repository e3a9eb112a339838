"""What an MoE runner is: the experts of one layer applied to routed tokens.

The layer owns the weights and the reductions between ranks; a runner owns only the choice of kernels.
One runner serves all layers of a model, so that a tuned choice is made once per shape, not per layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang.srt.layers.moe.activation import PLAIN_SWIGLU, MoEActivation


@dataclass(frozen=True)
class MoEShape:
    """Sizes that decide which kernels a rank's experts can use.

    ``intermediate_size`` is this rank's shard; ``num_local_experts`` the experts whose weights it holds.
    ``max_num_tokens`` is the largest token count that the op can see in one call (after a gather over
    attention-DP ranks it counts the gathered tokens). ``has_bias`` says whether both projections add one.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    top_k: int
    dtype: torch.dtype
    max_num_tokens: int
    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    activation: MoEActivation = PLAIN_SWIGLU
    has_bias: bool = False

    @property
    def adds_output_bias(self) -> bool:
        """One of the ranks that split an expert adds its output's bias, or the sum would hold it several times."""
        return self.has_bias and self.tp_rank == 0

    @property
    def first_local_expert(self) -> int:
        return self.ep_rank * self.num_local_experts

    def local_expert_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """`topk_ids` counted within this rank's experts; those of other ranks become `num_local_experts`, past them."""
        if self.ep_size == 1:
            return topk_ids
        # Counted from this rank's first expert and around, those of other ranks come last.
        return torch.remainder(topk_ids - self.first_local_expert, self.num_experts).clamp_(
            max=self.num_local_experts
        )

    def global_expert_ids(self, local_ids: torch.Tensor) -> torch.Tensor:
        """What `local_expert_ids` was given, but that all experts of other ranks are one of theirs."""
        if self.ep_size == 1:
            return local_ids
        return torch.remainder(local_ids + self.first_local_expert, self.num_experts)


class ExpertWeights(NamedTuple):
    """What a runner takes of one layer after the routed tokens; the order is that of `MoERunner.run`."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def float32_expert(self, shape: MoEShape, local: int, x: torch.Tensor) -> torch.Tensor:
        """What local expert `local` makes of `x` `[H]`, in float32: what runners are judged by."""
        up_gate = self.w13[local].float() @ x.float()
        if self.b13 is not None:
            up_gate += self.b13[local].float()
        out = self.w2[local].float() @ shape.activation(up_gate)
        return out + self.b2[local].float() if self.b2 is not None and shape.adds_output_bias else out


def op_inputs(
    shape: MoEShape,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
) -> list[torch.Tensor]:
    """What the implementations of the MoE op take: `MoERunner.run`'s arguments, with `MoEShape.local_expert_ids`.

    Five tensors, or seven where the experts have biases.
    """
    inputs = [hidden_states, shape.local_expert_ids(topk_ids), topk_weights, weights.w13, weights.w2]
    if weights.b13 is not None and weights.b2 is not None:
        inputs += [weights.b13, weights.b2]
    return inputs


def shapes_of_op_inputs(shape: MoEShape, num_tokens: int) -> list[torch.Tensor]:
    """`op_inputs` of `num_tokens` tokens without memory behind them."""
    experts, hidden, inner = shape.num_local_experts, shape.hidden_size, shape.intermediate_size

    def weights(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=shape.dtype, device="meta")

    ids = torch.empty(num_tokens, shape.top_k, dtype=torch.int32, device="meta")
    biases = (weights(experts, 2 * inner), weights(experts, hidden)) if shape.has_bias else ()
    experts_of_layer = ExpertWeights(
        weights(experts, 2 * inner, hidden), weights(experts, hidden, inner), *biases
    )
    return op_inputs(shape, weights(num_tokens, hidden), ids, ids.float(), experts_of_layer)


def tuning_key(inputs: Sequence[torch.Tensor], activation: MoEActivation) -> tuple[Any, ...]:
    """What a tuned choice depends on beside the shapes of ``inputs`` (those of `op_inputs`).

    It is `TunableRunner.get_cache_key_extras` of every runner of the MoE op: a record's question must not depend on
    who answers it.
    """
    extras = (str(inputs[0].dtype), int(inputs[1].shape[1]))
    has_bias = len(inputs) > 5
    if activation == PLAIN_SWIGLU and not has_bias:
        return extras
    return (*extras, str(activation), has_bias)


class MoERunner(ABC):
    """Computes ``sum_k weight_k * expert_k(x)`` over the experts that this rank holds.

    The result is partial where experts or their rows are spread over ranks; the caller reduces it.
    """

    #: What `--moe-runner-backend` calls it.
    name: str = ""
    #: Names under which FlashInfer's AutoTuner asks for a tactic; empty when nothing is tunable.
    op_names: tuple[str, ...] = ()
    #: Values of `--quantization` that this runner makes of unquantised experts while loading.
    load_quantizations: tuple[str, ...] = ()

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape

    def reserved_bytes(self) -> int:
        """Device memory that this runner takes after its construction and keeps, in bytes."""
        return 0

    def compile_jobs(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
    ) -> list[Callable[[], None]]:
        """What a call with these arguments would compile first, as jobs for any thread; nothing is launched."""
        return []

    def freeze(self) -> None:
        """Called once after the start: what was chosen by then serves, and need not be looked up in the AutoTuner."""
        return

    @abstractmethod
    def run(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the local experts.

        Args:
            hidden_states: ``[T, H]`` in the model's dtype, ``T >= 1``.
            topk_ids: ``[T, K]`` int32, global expert ids.
            topk_weights: ``[T, K]`` float32.
            w13: ``[E_local, 2*I, H]``; rows of one expert are UP first, then GATE (FlashInfer CUTLASS order).
            w2: ``[E_local, H, I]``.
            b13: ``[E_local, 2*I]`` in the order of the rows of ``w13``, where the shape has biases.
            b2: ``[E_local, H]``, the whole of it on every rank; see `MoEShape.adds_output_bias`.

        Returns:
            ``[T, H]`` in the dtype of ``hidden_states``, without the experts of other ranks.
        """
