"""Attention through FlashInfer's paged prefill and decode kernels.

A forward is planned once for each sliding window that the model's layers have, from lengths that the host knows; then
every layer runs the planned kernel. Decode graphs have a backend of their own, `FlashInferGraphAttention`: wrappers
for each captured batch size over buffers that never move.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.layers.attention.flashinfer_kernels import FLAG, INSTEAD, PagedKernels
from sglang.srt.layers.attention.paged_metadata import PagedMetadata
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.utils.errors import first_line

logger = logging.getLogger(__name__)

INDICES_PER_SLOT = 4
"""Room of a decode graph for the slots of its sequences, in sizes of the KV pool."""


class FlashInferAttention(AttentionBackend):
    """Eager forwards: any prefill batch, and decode batches that no graph covers."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: KVPool,
        num_heads: int,
        dtype: torch.dtype,
        *,
        layers: Sequence[AttentionLayer] = (),
        deterministic: bool = False,
    ) -> None:
        """`num_heads` are this rank's query heads, `layers` those that have windows or sinks. Loads the kernels.

        Raises `ValueError` when FlashInfer is missing, or its kernels for this model and GPU neither load nor build.
        """
        self._req_to_token = req_to_token_pool.req_to_token
        kernels = PagedKernels(kv_pool, num_heads, dtype, layers=layers, deterministic=deterministic)
        self._kernels = kernels
        self._prefill = {window: kernels.prefill_wrapper(window) for window in kernels.windows}
        self._decode = {window: kernels.decode_wrapper() for window in kernels.windows}
        self._write = kernels.slot_writer(1024)
        self._planned: dict[int | None, Any] = {}
        self._slots = torch.empty(0, dtype=torch.int32, device=kernels.device)
        self._load_kernels(layers or [self._plain_layer(kv_pool.first_layer)])

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._planned = {}
        if batch.num_tokens == 0:
            return
        for window in self._kernels.windows:
            self._planned[window] = self._plan(batch, window)
        self._slots = batch.out_cache_loc.to(torch.int32)

    def _plan(self, batch: ForwardBatch, window: int | None) -> Any:
        """The wrapper for layers of this `window`, planned for `batch`."""
        kernels, prefill, decode = self._kernels, self._prefill[window], self._decode[window]
        if batch.mode is ForwardMode.EXTEND and prefill is not None:
            kernels.plan_prefill(prefill, PagedMetadata.of(batch, self._req_to_token), window)
            return prefill
        kernels.plan_decode(decode, PagedMetadata.one_query_each(batch, self._req_to_token, window))
        return decode

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        if batch.num_tokens == 0:
            return q.reshape(0, layer.num_heads * layer.head_dim)
        planned = self._planned[layer.sliding_window]
        return self._kernels.attend(planned, self._write, q, k, v, layer, self._slots)

    def for_graphs(self, sizes: Sequence[int]) -> FlashInferGraphAttention:
        return FlashInferGraphAttention(self._req_to_token, self._kernels, sizes)

    def _plain_layer(self, layer_id: int) -> AttentionLayer:
        kernels = self._kernels
        sizes = (kernels.num_heads, kernels.num_kv_heads, kernels.head_dim)
        return AttentionLayer(layer_id, *sizes, kernels.scaling)

    @torch.inference_mode()
    def _load_kernels(self, layers: Sequence[AttentionLayer]) -> None:
        """Run each kernel once on the padding row, so that a missing one is known before anything depends on it."""
        kernels = self._kernels
        one_of_each = {layer.sliding_window: layer for layer in layers}.values()
        q = torch.zeros(1, kernels.num_heads, kernels.head_dim, dtype=kernels.dtype, device=kernels.device)
        kv = torch.zeros(
            1, kernels.num_kv_heads, kernels.head_dim, dtype=kernels.dtype, device=kernels.device
        )
        ids = torch.zeros(1, dtype=torch.int64, device=kernels.device)
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
            batch = ForwardBatch.dummy(mode, [1], ids)
            try:
                self.init_forward_metadata(batch)
                for layer in one_of_each:
                    self.forward(q, kv, kv, layer, batch)
                torch.cuda.synchronize(kernels.device)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a module is loaded or built by the first call into it
                reason = first_line(error)
                raise ValueError(
                    f"{FLAG}: the {mode.value} kernel for heads of {kernels.head_dim} and a {kernels.kv_dtype} cache "
                    f"neither loads nor builds ({reason}); install the matching flashinfer-jit-cache wheel, or "
                    f"{INSTEAD}"
                ) from error
        logger.info(
            "Attention: FlashInfer, prefill %s, decode on %s cores, KV cache %s%s",
            "fa2" if kernels.sinks is not None else kernels.prefill_backend,
            "tensor" if kernels.on_tensor_cores or kernels.sinks is not None else "CUDA",
            str(kernels.kv_dtype).removeprefix("torch."),
            ", sinks in the kernel" if kernels.sinks is not None else "",
        )


class FlashInferGraphAttention(AttentionBackend):
    """Decode attention inside captured graphs, for batches of exactly one of `sizes`.

    A graph replays with the addresses of its capture, so what `init_forward_metadata` works out goes into buffers
    that never move. They are shared by all sizes: a plan is used by the replay that follows it, and by no other.
    """

    def __init__(self, req_to_token: torch.Tensor, kernels: PagedKernels, sizes: Sequence[int]) -> None:
        self._req_to_token, self._kernels = req_to_token, kernels
        largest = max(sizes)
        self._slots = torch.zeros(largest, dtype=torch.int32, device=kernels.device)
        # Not that of the eager backend, whose buffers move when a longer prefill comes.
        self._write = kernels.slot_writer(largest)
        self._plans = {window: _GraphPlans(kernels, window, sizes) for window in kernels.windows}

    def can_plan(self, batch: ForwardBatch) -> bool:
        return all(plans.holds(batch) for plans in self._plans.values())

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the wrappers of this batch size; between the plans and the replay nothing else may be planned."""
        assert batch.mode is ForwardMode.DECODE, "only decode batches are captured"
        for plans in self._plans.values():
            plans.plan(batch, self._req_to_token)
        self._slots[: batch.batch_size].copy_(batch.out_cache_loc)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        wrapper = self._plans[layer.sliding_window].wrappers[batch.batch_size]
        return self._kernels.attend(wrapper, self._write, q, k, v, layer, self._slots[: batch.batch_size])


class _GraphPlans:
    """The wrappers of one sliding window, one for each batch size, over buffers of their own."""

    def __init__(self, kernels: PagedKernels, window: int | None, sizes: Sequence[int]) -> None:
        self._kernels, self._window = kernels, window
        largest, device = max(sizes), kernels.device
        indptr = torch.zeros(largest + 1, dtype=torch.int32, device=device)
        last_page_len = torch.ones(largest, dtype=torch.int32, device=device)
        # Sequences share the slots of a common prefix. Where many share a long one they need more indices than there
        # are slots, and beyond this room the batch runs eagerly.
        num_indices = INDICES_PER_SLOT * kernels.kv_pool.num_tokens + largest
        if window is not None:
            num_indices = min(num_indices, largest * window)
        self._indices = torch.zeros(num_indices, dtype=torch.int32, device=device)
        self.wrappers = {
            size: kernels.graph_decode_wrapper(indptr[: size + 1], self._indices, last_page_len[:size])
            for size in sizes
        }

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether there is room for the slots of `batch`, padded to any size."""
        lens = batch.seq_lens_cpu
        num_slots = sum(lens) if self._window is None else sum(min(n, self._window) for n in lens)
        return num_slots + max(self.wrappers) - len(lens) <= self._indices.shape[0]

    def plan(self, batch: ForwardBatch, req_to_token: torch.Tensor) -> None:
        metadata = PagedMetadata.one_query_each(batch, req_to_token, self._window, self._indices)
        self._kernels.plan_decode(self.wrappers[batch.batch_size], metadata)
