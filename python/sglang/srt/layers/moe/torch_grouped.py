"""The MoE with torch alone: tokens sorted by expert, two grouped products, a sum per token.

It is the baseline that any tuned kernel has to beat, and what serves where FlashInfer has no kernel. Where
each expert's rows end stays on the device, so that nothing waits for it and a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang.srt.layers.moe.base import ExpertWeights, MoERunner, MoEShape, op_inputs

FLAG = "--moe-runner-backend torch_grouped"
MIN_CAPABILITY = (9, 0)

#: `product(rows [N, K], weights [E, M, K], ends [E] int32) -> [N, M]`; rows from `ends[-1]` on are undefined.
GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_supported(shape: MoEShape, device: torch.device) -> None:
    """Raise `ValueError` with the remedy where torch's grouped product would wait for the host or is missing."""
    if device.type != "cuda":
        return
    instead = "use --moe-runner-backend reference --disable-cuda-graph"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        raise ValueError(f"{FLAG} needs compute capability 9.0 or later and this GPU has {have}: {instead}")
    if shape.dtype is not torch.bfloat16:
        raise ValueError(
            f"{FLAG} computes in bfloat16 on a GPU, not {shape.dtype}: set --dtype bfloat16, or {instead}"
        )
    if _torch_grouped_mm() is None:
        raise ValueError(f"{FLAG} needs torch 2.8 or later (this is {torch.__version__})")


def _torch_grouped_mm() -> Callable[..., torch.Tensor] | None:
    """The public function where torch has it (2.10), else the op behind it (2.8)."""
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _grouped_on_gpu() -> GroupedProduct:
    grouped_mm = _torch_grouped_mm()
    assert grouped_mm is not None, "checked by check_supported"

    def product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    return product


def _grouped_by_loop(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Expert by expert, for CPUs: torch's own version there knows fewer dtypes and alignments."""
    out = rows.new_zeros(rows.shape[0], weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = rows[start:end] @ weights[expert].t()
        start = end
    return out


class TorchGroupedMoERunner(MoERunner):
    """See the module's docstring. It has nothing to tune: `op_names` is empty."""

    name = "torch_grouped"

    def __init__(self, shape: MoEShape, device: torch.device) -> None:
        super().__init__(shape)
        check_supported(shape, device)
        self._product = _grouped_on_gpu() if device.type == "cuda" else _grouped_by_loop
        # Bounds to look up in the sorted expert ids: rows of expert e end where e + 1 would begin.
        self._next_expert = torch.arange(1, shape.num_local_experts + 1, dtype=torch.int32, device=device)

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
        return self.compute(op_inputs(self.shape, hidden_states, topk_ids, topk_weights, weights))

    def compute(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """`run` on `op_inputs`."""
        hidden_states, local_ids, topk_weights, w13, w2 = inputs[:5]
        b13, b2 = inputs[5:] or (None, None)
        num_tokens, top_k = local_ids.shape
        experts, order = torch.sort(local_ids.reshape(-1), stable=True)
        ends = torch.searchsorted(experts, self._next_expert, out_int32=True)
        # Rows of other ranks' experts borrow some expert's bias; they are cleared at the end.
        of_row = experts.clamp(max=self.shape.num_local_experts - 1) if b13 is not None else experts
        rows = self._product(hidden_states[order // top_k], w13, ends)
        if b13 is not None:
            rows = rows.add_(b13[of_row])
        # Weighting the narrow activation instead of the wide result saves two passes over the latter; the float32
        # weight takes part in the product unrounded.
        weights = topk_weights.reshape(-1)[order].unsqueeze(1)
        rows = self._product(self.shape.activation(rows).mul_(weights), w2, ends)
        if b2 is not None and self.shape.adds_output_bias:
            rows = rows.addcmul_(b2[of_row], weights.to(b2.dtype))
        if self.shape.ep_size > 1:
            # Rows of other ranks' experts come last, and the product leaves them undefined: NaN must not get through.
            rows = rows.masked_fill((experts == self.shape.num_local_experts).unsqueeze(1), 0)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        return rows[place].view(num_tokens, top_k, -1).sum(dim=1)
