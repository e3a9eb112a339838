"""Launches of one FP8 layer without the host work that FlashInfer repeats in each of them.

FlashInfer's public `forward` stages the inputs by fourteen torch operations and keeps the launch arguments of one
layer, while all layers share a workspace: eager forwards wait for the host, and graphs carry the small kernels. Here
one kernel stages, and the arguments are built once for each workspace and stream. It is used on a workspace only after
the same inputs gave the same result, bit by bit, as by the public way; both ways meet the other ranks alike, so a rank
may choose by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang.srt.autotune import failures, flashinfer_moe_ep
from sglang.srt.autotune.flashinfer_moe_ep import HopperBuffers
from sglang.srt.autotune.megamoe.kernels.base import CapacityExceeded, MegaInputs


class DirectLaunch:
    """One layer on one workspace.

    Args:
        weights: the layer's prepared weights.
        workspace: FlashInfer's handle, warmed.

    Raises:
        AttributeError: FlashInfer keeps its buffers elsewhere in this version.
        ImportError: there is no Triton.
    """

    def __init__(self, weights: Any, workspace: Any) -> None:
        from sglang.srt.autotune.megamoe.kernels.fp8_staging import stage  # needs Triton

        self.workspace, self._weights, self._stage = workspace, weights, stage
        self._buffers: HopperBuffers = flashinfer_moe_ep.hopper_buffers(workspace)
        self._by_stream: dict[int, Callable[[], None]] = {}

    def __call__(self, inputs: MegaInputs) -> torch.Tensor:
        """`[T, H]`: a view of the workspace, good until the next launch on it.

        Raises:
            CapacityExceeded: there are more tokens than the workspace holds.
        """
        self.staged(inputs)()
        return self.output(inputs)

    def output(self, inputs: MegaInputs) -> torch.Tensor:
        return self._buffers.output[: inputs.num_tokens]

    def staged(self, inputs: MegaInputs) -> Callable[[], None]:
        """Stage the inputs; what remains to do is to call what comes back."""
        buffers = self._buffers
        if inputs.num_tokens > buffers.ids.shape[0]:
            raise CapacityExceeded(
                f"{inputs.num_tokens} tokens, and the workspace holds {buffers.ids.shape[0]}"
            )
        self._stage(
            inputs.hidden_states,
            inputs.topk_ids,
            inputs.topk_weights,
            buffers.payload,
            buffers.scales,
            buffers.ids,
            buffers.shares,
        )
        stream = torch.cuda.current_stream().cuda_stream
        launch = self._by_stream.get(stream)
        if launch is None:
            launch = flashinfer_moe_ep.hopper_launch(self._weights, self.workspace)
            self._by_stream[stream] = launch
        return launch


def direct_launch(
    weights: Any, workspace: Any, inputs: MegaInputs, public: Callable[[], torch.Tensor]
) -> DirectLaunch | str:
    """A launch that gives what `public` gives for `inputs`, or why there is none.

    Collective: every rank launches twice, whatever it finds.
    """
    expected = public().clone()
    try:
        launch = DirectLaunch(weights, workspace)
        run = launch.staged(inputs)
    except Exception as error:  # a renamed attribute, a Triton that cannot compile: FlashInfer's way serves
        public()
        return failures.describe(error)
    run()
    if torch.equal(launch.output(inputs), expected):
        return launch
    return "the tree's own staging gave another result"
