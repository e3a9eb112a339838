"""Attention through FlashInfer's paged prefill and decode kernels.

The slots of a sequence are its pages, of one token each, in NHD layout. A forward is planned once, from
lengths that the host knows; then every layer runs the planned kernel. Decode graphs have a backend of their
own, `FlashInferGraphAttention`: one wrapper for each captured batch size over buffers that never move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.layers.attention.paged_metadata import PagedMetadata
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

logger = logging.getLogger(__name__)

FLAG = "--attention-backend flashinfer"
INSTEAD = "use --attention-backend torch_native --disable-cuda-graph"
LAYOUT = "NHD"
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
    """The kernels for one model and KV pool: makes wrappers, plans them, stores and attends."""

    def __init__(
        self, kv_pool: KVPool, num_heads: int, dtype: torch.dtype, *, deterministic: bool = False
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

    def prefill_wrapper(self) -> Any:
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, backend=self.prefill_backend
        )

    def decode_wrapper(self, **graph_buffers: Any) -> Any:
        # "auto" would look for kernels of other libraries, and for FP8 choose ones that have no mixed types.
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_tensor_cores=self.on_tensor_cores,
            backend="fa2",
            **graph_buffers,
        )

    def plan_prefill(self, wrapper: Any, metadata: PagedMetadata) -> None:
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
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
            **self._splits,
        )

    def plan_decode(self, wrapper: Any, metadata: PagedMetadata) -> None:
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
        wrapper.run(q, pages, out=out)
        return out.view(q.shape[0], -1)


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


class FlashInferAttention(AttentionBackend):
    """Eager forwards: any prefill batch, and decode batches that no graph covers."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: KVPool,
        num_heads: int,
        dtype: torch.dtype,
        *,
        deterministic: bool = False,
    ) -> None:
        """`num_heads` are this rank's query heads. Loads the kernels.

        Raises `ValueError` when FlashInfer is missing, or its kernels for this model and GPU neither load nor build.
        """
        self._req_to_token = req_to_token_pool.req_to_token
        self._kernels = PagedKernels(kv_pool, num_heads, dtype, deterministic=deterministic)
        self._prefill = self._kernels.prefill_wrapper()
        self._decode = self._kernels.decode_wrapper()
        self._write = self._kernels.slot_writer(1024)
        self._planned: Any = None
        self._slots = torch.empty(0, dtype=torch.int32, device=self._kernels.device)
        self._load_kernels(kv_pool.first_layer)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.num_tokens == 0:
            self._planned = None
            return
        metadata = PagedMetadata.of(batch, self._req_to_token)
        if batch.mode is ForwardMode.DECODE:
            self._planned = self._decode
            self._kernels.plan_decode(self._decode, metadata)
        else:
            self._planned = self._prefill
            self._kernels.plan_prefill(self._prefill, metadata)
        self._slots = batch.out_cache_loc.to(torch.int32)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        if batch.num_tokens == 0:
            return q.reshape(0, layer.num_heads * layer.head_dim)
        return self._kernels.attend(self._planned, self._write, q, k, v, layer, self._slots)

    def for_graphs(self, sizes: Sequence[int]) -> FlashInferGraphAttention:
        return FlashInferGraphAttention(self._req_to_token, self._kernels, sizes)

    @torch.inference_mode()
    def _load_kernels(self, layer_id: int) -> None:
        """Run each kernel once on the padding row, so that a missing one is known before anything depends on it."""
        kernels = self._kernels
        layer = AttentionLayer(
            layer_id, kernels.num_heads, kernels.num_kv_heads, kernels.head_dim, kernels.scaling
        )
        q = torch.zeros(1, kernels.num_heads, kernels.head_dim, dtype=kernels.dtype, device=kernels.device)
        kv = torch.zeros(
            1, kernels.num_kv_heads, kernels.head_dim, dtype=kernels.dtype, device=kernels.device
        )
        ids = torch.zeros(1, dtype=torch.int64, device=kernels.device)
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
            batch = ForwardBatch.dummy(mode, [1], ids)
            try:
                self.init_forward_metadata(batch)
                self.forward(q, kv, kv, layer, batch)
                torch.cuda.synchronize(kernels.device)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a module is loaded or built by the first call into it
                reason = (str(error) or type(error).__name__).strip().splitlines()[0][:300]
                raise ValueError(
                    f"{FLAG}: the {mode.value} kernel for heads of {kernels.head_dim} and a {kernels.kv_dtype} cache "
                    f"neither loads nor builds ({reason}); install the matching flashinfer-jit-cache wheel, or "
                    f"{INSTEAD}"
                ) from error
        logger.info(
            "Attention: FlashInfer, prefill %s, decode on %s cores, KV cache %s",
            kernels.prefill_backend,
            "tensor" if kernels.on_tensor_cores else "CUDA",
            str(kernels.kv_dtype).removeprefix("torch."),
        )


class FlashInferGraphAttention(AttentionBackend):
    """Decode attention inside captured graphs, for batches of exactly one of `sizes`.

    A graph replays with the addresses of its capture, so what `init_forward_metadata` works out goes into buffers
    that never move. They are shared by all sizes: a plan is used by the replay that follows it, and by no other.
    """

    def __init__(self, req_to_token: torch.Tensor, kernels: PagedKernels, sizes: Sequence[int]) -> None:
        self._req_to_token, self._kernels = req_to_token, kernels
        largest, device = max(sizes), kernels.device
        indptr = torch.zeros(largest + 1, dtype=torch.int32, device=device)
        last_page_len = torch.ones(largest, dtype=torch.int32, device=device)
        # No slot belongs to two sequences, except the sink, once for each padding sequence.
        self._indices = torch.zeros(kernels.kv_pool.num_tokens + largest, dtype=torch.int32, device=device)
        self._slots = torch.zeros(largest, dtype=torch.int32, device=device)
        # Not that of the eager backend, whose buffers move when a longer prefill comes.
        self._write = kernels.slot_writer(largest)
        self._wrappers = {
            size: kernels.decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr[: size + 1],
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=last_page_len[:size],
            )
            for size in sizes
        }

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the wrapper of this batch size; between the plan and the replay nothing else may be planned."""
        assert batch.mode is ForwardMode.DECODE, "only decode batches are captured"
        metadata = PagedMetadata.of(batch, self._req_to_token, self._indices)
        self._kernels.plan_decode(self._wrappers[batch.batch_size], metadata)
        self._slots[: batch.batch_size].copy_(batch.out_cache_loc)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        wrapper, slots = self._wrappers[batch.batch_size], self._slots[: batch.batch_size]
        return self._kernels.attend(wrapper, self._write, q, k, v, layer, slots)
