"""FlashInfer's paged attention kernels as this engine calls them.

The slots of a sequence are its pages, of one token each, in NHD layout. A wrapper is planned from lengths that the
host knows, then every layer that sees the same tokens runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.attention.flashinfer_sinks import LAYOUT, SinkWrappers, scale_by_sinks
from sglang.srt.layers.attention.paged_metadata import PagedMetadata
from sglang.srt.mem_cache.memory_pool import KVPool

FLAG = "--attention-backend flashinfer"
INSTEAD = "use --attention-backend torch_native --disable-cuda-graph"
PAGE_SIZE = 1
WORKSPACE_BYTES = 256 << 20
"""Partial results of split sequences. FlashInfer asks for 128 MiB; releases before 0.7.2 reserve more for wide groups
of query heads."""
MIN_CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
TENSOR_CORE_GROUP = 4
"""From this many query heads to a KV head, decode on tensor cores is the quicker one; it pads the group to 16 rows."""
CUDA_CORE_GROUPS = (1, 2, 3)
"""Smaller groups for which the kernel without tensor cores exists."""


def check_supported(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    """Raise `ValueError` with the remedy where FlashInfer has no kernel for this model and GPU."""
    if capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        raise ValueError(f"{FLAG} needs compute capability 9.0 or later and this GPU has {have}: {INSTEAD}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{FLAG} has kernels for heads of 64, 128 and 256, not {head_dim}: {INSTEAD}")
    if dtype not in DTYPES:
        raise ValueError(f"{FLAG} computes in bfloat16 or float16, not {dtype}: set --dtype bfloat16")
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"--kv-cache-dtype {kv_dtype}: FlashInfer reads a cache of the activations' type ({dtype}) or fp8_e4m3; "
            "use auto or fp8_e4m3"
        )


def prefill_backend(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> str:
    """FlashInfer's name of the prefill kernels to use: Hopper's own where they are tuned for, else the general ones."""
    return "fa3" if head_dim == 128 and kv_dtype == dtype and capability[0] == 9 else "fa2"


def decodes_on_tensor_cores(num_heads: int, num_kv_heads: int, kv_dtype: torch.dtype) -> bool:
    group = num_heads // num_kv_heads
    return group >= TENSOR_CORE_GROUP or group not in CUDA_CORE_GROUPS or kv_dtype.itemsize == 1


def import_flashinfer() -> ModuleType:
    """FlashInfer; raises `ValueError` when it cannot be imported."""
    try:
        import flashinfer
    except Exception as error:  # a broken install raises all kinds: missing libraries, version checks
        raise ValueError(
            f"{FLAG}: FlashInfer cannot be imported ({type(error).__name__}: {error}); install flashinfer-python, "
            f"or {INSTEAD}"
        ) from error
    return flashinfer


class PagedKernels:
    """The kernels for one model and KV pool: makes wrappers, plans them, stores and attends.

    `windows` are the sliding windows of the layers, None for those that see everything. Layers with sinks have
    FlashInfer's own kernels where `sinks` is not None, else the ordinary ones and a scale afterwards.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        num_heads: int,
        dtype: torch.dtype,
        *,
        layers: Sequence[AttentionLayer] = (),
        deterministic: bool = False,
    ) -> None:
        """Raises `ValueError` when FlashInfer is missing or has no kernel for this model and GPU."""
        first_layer = kv_pool.k(kv_pool.first_layer)
        self.device, self.dtype, self.kv_dtype = first_layer.device, dtype, kv_pool.dtype
        self.num_heads, self.num_kv_heads, self.head_dim = (
            num_heads,
            first_layer.shape[1],
            first_layer.shape[2],
        )
        self.scaling = self.head_dim**-0.5
        capability = torch.cuda.get_device_capability(self.device)
        check_supported(self.head_dim, dtype, self.kv_dtype, capability)
        self.flashinfer = import_flashinfer()
        self.kv_pool = kv_pool
        # A sum over a split sequence depends on how many splits fit the GPU beside the rest of the batch.
        self._splits: dict[str, Any] = {"disable_split_kv": True} if deterministic else {}
        self.on_tensor_cores = deterministic or decodes_on_tensor_cores(
            num_heads, self.num_kv_heads, self.kv_dtype
        )
        self.prefill_backend = prefill_backend(self.head_dim, dtype, self.kv_dtype, capability)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.windows: tuple[int | None, ...] = windows_of(layers)
        self.sinks: SinkWrappers | None = None
        if any(layer.sinks is not None for layer in layers) and self.kv_dtype == dtype:
            kinds = {False, *(window is not None for window in self.windows)}
            sizes = (num_heads, self.num_kv_heads, self.head_dim)
            self.sinks = SinkWrappers.load(self.flashinfer, self._workspace, *sizes, dtype, kinds)

    def prefill_wrapper(self, window: int | None = None) -> Any:
        """For whole prompts; None where layers of this `window` prefill through the decode wrapper instead.

        The ordinary kernels with a window are no prebuilt module. Without them each token of a prompt is attended as
        a sequence of its own, of the tokens in its window.
        """
        if self.sinks is not None:
            return self.sinks.make(sliding=window is not None)
        if window is not None:
            return None
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, backend=self.prefill_backend
        )

    def decode_wrapper(self) -> Any:
        if self.sinks is not None:
            return self.sinks.make()
        return self._ordinary_decode_wrapper()

    def graph_decode_wrapper(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> Any:
        """For captured batches of `indptr.shape[0] - 1` sequences, planned into these buffers."""
        if self.sinks is not None:
            return self.sinks.make(
                use_cuda_graph=True,
                qo_indptr_buf=torch.arange(indptr.shape[0], dtype=torch.int32, device=self.device),
                paged_kv_indptr_buf=indptr,
                paged_kv_indices_buf=indices,
                paged_kv_last_page_len_buf=last_page_len,
            )
        return self._ordinary_decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )

    def _ordinary_decode_wrapper(self, **graph_buffers: Any) -> Any:
        # "auto" would look for kernels of other libraries, and for FP8 choose ones that have no mixed types.
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_tensor_cores=self.on_tensor_cores,
            backend="fa2",
            **graph_buffers,
        )

    def plan_prefill(self, wrapper: Any, metadata: PagedMetadata, window: int | None = None) -> None:
        wrapper.plan(
            metadata.qo_indptr,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.last_page_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            PAGE_SIZE,
            causal=True,
            sm_scale=self.scaling,
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
            **self._splits,
        )

    def plan_decode(self, wrapper: Any, metadata: PagedMetadata) -> None:
        """Plan one query for each sequence of `metadata`."""
        if self.sinks is not None:  # its wrapper is one for prompts
            pinned = metadata.kv_indptr.is_pinned()
            one_each = torch.arange(metadata.kv_indptr.shape[0], dtype=torch.int32, pin_memory=pinned)
            self.plan_prefill(wrapper, replace(metadata, qo_indptr=one_each))
            return
        wrapper.plan(
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.last_page_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            PAGE_SIZE,
            sm_scale=self.scaling,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
            **self._splits,
        )

    def slot_writer(self, num_tokens: int) -> SlotWriter:
        return SlotWriter(self.flashinfer.append_paged_kv_cache, num_tokens, self.device)

    def attend(
        self,
        wrapper: Any,
        write: SlotWriter,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Let `write` store `k` and `v` at `slots` `[T]` int32, then run the planned `wrapper`.

        Returns `[T, num_heads * head_dim]`.
        """
        assert layer.scaling == self.scaling, "the kernels were planned for another scale"
        # [num_slots, heads, dim] is already [num_pages, page_size, heads, dim] with pages of one slot.
        pages = (
            self.kv_pool.k(layer.layer_id).unsqueeze(1),
            self.kv_pool.v(layer.layer_id).unsqueeze(1),
        )
        if self.kv_dtype != k.dtype:
            k, v = _to_fp8(k), _to_fp8(v)
        write(k, v, pages, slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if layer.sinks is None:
            wrapper.run(q, pages, out=out)
        elif self.sinks is not None:
            wrapper.run(q, pages, layer.sinks, self.scaling, out=out)
        else:
            _, lse = wrapper.run(q, pages, out=out, return_lse=True)
            scale_by_sinks(out, lse, layer.sinks)
        return out.view(q.shape[0], -1)


def windows_of(layers: Sequence[AttentionLayer]) -> tuple[int | None, ...]:
    """The different sliding windows of `layers`, that of everything (None) first; without layers, that one alone."""
    windows = {layer.sliding_window for layer in layers} or {None}
    return tuple(sorted(windows, key=lambda window: window or 0))


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Values beyond the type's range become its largest; a plain cast makes them NaN."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class SlotWriter:
    """Stores keys and values of all tokens at their slots in one launch.

    FlashInfer's append takes positions inside requests. Here every token is a request of its own with one page,
    its slot, and stands at position 0 of it.
    """

    def __init__(self, append: Callable[..., None], num_tokens: int, device: torch.device) -> None:
        self._append, self._device = append, device
        self._reserve(num_tokens)

    def _reserve(self, num_tokens: int) -> None:
        self._requests = torch.arange(num_tokens + 1, dtype=torch.int32, device=self._device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int32, device=self._device)
        self._last_page_len = torch.ones(num_tokens, dtype=torch.int32, device=self._device)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        num_tokens = slots.shape[0]
        if num_tokens > self._positions.shape[0]:
            self._reserve(num_tokens)
        self._append(
            k,
            v,
            self._requests[:num_tokens],
            self._positions[:num_tokens],
            pages,
            slots,
            self._requests[: num_tokens + 1],
            self._last_page_len[:num_tokens],
            LAYOUT,
        )
