"""The MoE as one op with several implementations over the same weights, chosen per token bucket.

No implementation is the fastest at every size, so the startup stage measures all of them at each bucket and files
which one serves there, with which tactic. All take the weights as `MoERunner.run` has them: there is no second copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from flashinfer.autotuner import OptimizationProfile, TunableRunner

from sglang.srt.layers.moe.base import (
    ExpertWeights,
    MoERunner,
    MoEShape,
    op_inputs,
    shapes_of_op_inputs,
    tuning_key,
)
from sglang.srt.layers.moe.flashinfer_cutlass import FlashInferCutlassMoERunner
from sglang.srt.layers.moe.torch_grouped import TorchGroupedMoERunner
from sglang.srt.layers.moe.tuned_op import TunedOp

logger = logging.getLogger(__name__)

OP_NAME = "sglang::moe"

#: Inputs of the op whose first dimension are tokens: hidden states, expert ids, weights of the experts.
NUM_TOKEN_INPUTS = 3


class TunedMoERunner(MoERunner):
    """Serves each call by the runner and tactic that the AutoTuner holds for its bucket.

    ``runners[0]`` with tactic -1 is what a lookup without a record gets. The op's inputs are those of `op_inputs`. A
    runner that asks the tuner for ops of its own names them in an attribute ``nested_ops``.
    """

    op_names = (OP_NAME,)

    def __init__(self, shape: MoEShape, runners: Sequence[TunableRunner]) -> None:
        super().__init__(shape)
        self.op = TunedOp(OP_NAME, runners, shape.max_num_tokens, NUM_TOKEN_INPUTS)
        nested = [op for runner in runners for op in getattr(runner, "nested_ops", ())]
        self.op_names = (OP_NAME, *nested)

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
        weights = ExpertWeights(w13, w2, b13, b2)
        return self.op(op_inputs(self.shape, hidden_states, topk_ids, topk_weights, weights))

    def compile_jobs(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
    ) -> list[Callable[[], None]]:
        return self.op.compile_jobs(op_inputs(self.shape, hidden_states, topk_ids, topk_weights, weights))

    def freeze(self) -> None:
        self.op.freeze(partial(shapes_of_op_inputs, self.shape))


class _OnGpu(TunedMoERunner):
    """Runners whose scratch comes from torch's allocator."""

    def reserved_bytes(self) -> int:
        """What the runners keep, and the scratch of one call at the largest bucket.

        Serving's scratch is counted with its forwards; candidates are captured into a memory pool of their own. Per
        routed row `torch_grouped` takes most: the copied input, both activations, the output in two orders.
        """
        shape = self.shape
        kept = sum(getattr(runner, "reserved_bytes", int)() for runner in self.op.runners)
        rows = shape.max_num_tokens * shape.top_k
        return kept + rows * 3 * (shape.hidden_size + shape.intermediate_size) * shape.dtype.itemsize


class TritonGroupedMoERunner(_OnGpu):
    """The Triton kernels alone; untuned they pick a tactic by rule."""

    name = "triton_grouped"

    @classmethod
    def create(cls, shape: MoEShape, device: torch.device) -> TritonGroupedMoERunner:
        """Raises `ValueError`, with the remedy, where the kernels cannot serve `shape` on `device`."""
        return cls(shape, [_triton_grouped(shape, device)])


class PortfolioMoERunner(_OnGpu):
    """torch's grouped products, FlashInfer's CUTLASS op and the Triton kernels, whichever are to be had here.

    In this order: what no record answers is served by the first, which needs no tuning and compiles nothing, where
    FlashInfer's untuned default is several times slower. FlashInfer's two products are tuned by FlashInfer.
    """

    name = "portfolio"

    @classmethod
    def create(cls, shape: MoEShape, device: torch.device, *, tunes: bool = True) -> PortfolioMoERunner:
        """Build what can be had; without ``tunes`` only what then serves.

        Raises:
            ValueError: not one of the implementations can serve `shape` on `device`.
        """
        runners: list[TunableRunner] = []
        problems: list[str] = []
        for build in (_torch_grouped, _flashinfer_cutlass, _triton_grouped):
            if runners and not tunes:
                break
            try:
                runners.append(build(shape, device))
            except ValueError as error:
                problems.append(str(error))
        if not runners:
            raise ValueError(problems[0])
        for problem in problems:
            logger.warning("The MoE portfolio is one implementation short: %s", problem)
        return cls(shape, runners)


class _Adapter(TunableRunner):
    """A runner of one tactic over a `MoERunner` of the same shape."""

    tactic = -1

    def __init__(self, runner: MoERunner) -> None:
        self._runner, self._shape = runner, runner.shape

    def reserved_bytes(self) -> int:
        return self._runner.reserved_bytes()

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return tuning_key(inputs, self._shape.activation)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: OptimizationProfile | None) -> list[Any]:
        return [self.tactic]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        return type(tactic) is int and tactic in (-1, self.tactic)


class TorchGroupedMoE(_Adapter):
    """torch's grouped products."""

    _runner: TorchGroupedMoERunner

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        return self._runner.compute(inputs)


class FlashInferCutlassMoE(_Adapter):
    """FlashInfer's fused op; its two products look their own tactics up, under names of their own."""

    nested_ops = FlashInferCutlassMoERunner.op_names
    tactic = 0

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        hidden_states, local_ids, topk_weights, *weights = inputs
        topk_ids = self._shape.global_expert_ids(local_ids)
        return self._runner.run(hidden_states, topk_ids, topk_weights, *weights)


def _torch_grouped(shape: MoEShape, device: torch.device) -> TunableRunner:
    return TorchGroupedMoE(TorchGroupedMoERunner(shape, device))


def _flashinfer_cutlass(shape: MoEShape, device: torch.device) -> TunableRunner:
    return FlashInferCutlassMoE(FlashInferCutlassMoERunner.create(shape, device))


def _triton_grouped(shape: MoEShape, device: torch.device) -> TunableRunner:
    from sglang.srt.layers.moe import triton_grouped

    triton_grouped.check_supported(shape, device)
    return triton_grouped.TritonGroupedMoE(shape, device)
