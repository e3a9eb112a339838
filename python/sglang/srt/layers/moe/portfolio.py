"""The MoE as one op with several implementations over the same weights, chosen per token bucket.

No implementation is the fastest at every size, so the startup stage measures all of them at each bucket and files
which one serves there, with which tactic. All take the weights as `MoERunner.run` has them: there is no second copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flashinfer.autotuner import TunableRunner

from sglang.srt.layers.moe.base import MoERunner, MoEShape
from sglang.srt.layers.moe.tuned_op import TunedOp

OP_NAME = "sglang::moe"

#: Inputs of the op whose first dimension are tokens: hidden states, expert ids, weights of the experts.
NUM_TOKEN_INPUTS = 3


class TunedMoERunner(MoERunner):
    """Serves each call by the runner and tactic that the AutoTuner holds for its bucket.

    ``runners[0]`` with tactic -1 is what a lookup without a record gets. The op's inputs are those of `run`, with
    expert ids counted within this rank (``num_local_experts`` stands for an expert of another rank). A runner that asks
    the tuner for ops of its own names them in an attribute ``nested_ops``.
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
        inputs = [hidden_states, self.shape.local_expert_ids(topk_ids), topk_weights, w13, w2]
        if b13 is not None and b2 is not None:
            inputs += [b13, b2]
        return self.op(inputs)
