"""FlashInfer's attention against torch's, on random queries, keys and values over the same scattered slots."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.layers.attention.flashinfer import FlashInferAttention
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.decode_graphs import CudaGraphCapture, StaticDecodeBatch
from sglang.srt.model_executor.forward_batch import ForwardBatch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
RELATIVE_ERROR = {BF16: 0.01, FP8: 0.02}
"""Both sides read the same stored keys and values, so FP8 adds only what differs in how they are widened."""
MODELS = [
    pytest.param(4, 4, 64, BF16, id="built-in"),
    pytest.param(8, 4, 64, BF16, id="64-group2"),
    pytest.param(32, 4, 64, BF16, id="64-group8"),
    pytest.param(4, 4, 128, BF16, id="128-group1"),
    pytest.param(32, 4, 128, BF16, id="30b-a3b"),
    pytest.param(32, 4, 128, FP8, id="30b-a3b-fp8"),
]
LAYER_ID = 1


class Case:
    """Sequences of `lengths` tokens whose keys and values stand in scattered slots of a pool."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype, lengths: list[int]
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda", 0)
        self.layer = AttentionLayer(LAYER_ID, num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        self.lengths = list(lengths)
        total = sum(lengths) + 64 * len(lengths)
        self.pool = KVPool(total, 1, 2, num_kv_heads, head_dim, kv_dtype, self.device)
        self.rows = ReqToTokenPool(len(lengths), 4096, self.device)
        self.row_of = self.rows.alloc(len(lengths))
        assert self.row_of is not None
        self._slots = torch.randperm(total) + 1
        self.ours = FlashInferAttention(self.rows, self.pool, num_heads, BF16)
        self.wanted = TorchNativeAttention(self.rows, self.pool)
        for row, length in zip(self.row_of, lengths, strict=True):
            slots = self.take(length)
            self.rows.write(row, 0, slots)
            k, v = (self.random(length, num_kv_heads) for _ in range(2))
            self.pool.set_kv(LAYER_ID, slots.to(self.device), k, v)

    def take(self, num_slots: int) -> torch.Tensor:
        slots, self._slots = self._slots[:num_slots], self._slots[num_slots:]
        return slots

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, self.layer.head_dim, dtype=BF16, device=self.device)

    def qkv(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the model makes them: values are a view into a wider tensor."""
        heads, kv_heads = self.layer.num_heads, self.layer.num_kv_heads
        both = self.random(num_tokens, heads + 2 * kv_heads)
        q, k, v = both.split([heads, kv_heads, kv_heads], dim=1)
        return q.contiguous(), k.contiguous(), v

    def extend(self, new: list[int]) -> ForwardBatch:
        slots = [self.take(length) for length in new]
        for row, length, part in zip(self.row_of, self.lengths, slots, strict=True):
            self.rows.write(row, length, part)
        num_tokens = sum(new)
        return ForwardBatch.extend(
            torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            new,
            self.lengths,
            self.row_of,
            torch.cat(slots),
            self.device,
        )

    def decode(self, num_seqs: int) -> ForwardBatch:
        rows, slots = self.row_of[:num_seqs], self.take(num_seqs)
        for i, row in enumerate(rows):
            self.rows.write(row, self.lengths[i], slots[i : i + 1])
        lens = [length + 1 for length in self.lengths[:num_seqs]]
        return ForwardBatch.decode([0] * num_seqs, lens, rows, slots, self.device)

    def run(
        self, backend: AttentionBackend, batch: ForwardBatch, qkv: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        backend.init_forward_metadata(batch)
        return backend.forward(*qkv, self.layer, batch)

    def check(self, ours: torch.Tensor, wanted: torch.Tensor) -> None:
        error = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
        assert ours.shape == wanted.shape
        assert error < RELATIVE_ERROR[self.pool.dtype], error


@pytest.fixture(autouse=True)
def without_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "kv_dtype"), MODELS)
def test_prefill_after_prefixes_of_all_lengths(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    case = Case(num_heads, num_kv_heads, head_dim, kv_dtype, [0, 1, 130, 1000])
    batch = case.extend([40, 3, 1, 20])
    qkv = case.qkv(batch.num_tokens)
    ours = case.run(case.ours, batch, qkv)
    case.check(ours, case.run(case.wanted, batch, qkv))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "kv_dtype"), MODELS)
def test_eager_decode(num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    case = Case(num_heads, num_kv_heads, head_dim, kv_dtype, [1, 17, 700, 2500])
    batch = case.decode(4)
    qkv = case.qkv(4)
    ours = case.run(case.ours, batch, qkv)
    case.check(ours, case.run(case.wanted, batch, qkv))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "kv_dtype"), MODELS)
def test_captured_decode_follows_new_lengths_and_padding(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    case = Case(num_heads, num_kv_heads, head_dim, kv_dtype, [3, 900, 40, 2000])
    graphs = case.ours.for_graphs([2, 4])
    inputs = StaticDecodeBatch(4, case.device)
    q, k, v = (tensor.clone() for tensor in case.qkv(4))
    out = torch.empty(4, num_heads * head_dim, dtype=BF16, device=case.device)
    capture, replays = CudaGraphCapture(case.device), {}
    for size in (4, 2):
        static = inputs.view(size, [1] * size)
        graphs.init_forward_metadata(static)

        def run(size: int = size, static: ForwardBatch = static) -> None:
            out[:size].copy_(graphs.forward(q[:size], k[:size], v[:size], case.layer, static))

        replays[size] = capture(run)
    for num_seqs, size in ((4, 4), (3, 4), (1, 2), (2, 2)):
        batch = case.decode(num_seqs)
        for static, new in zip((q, k, v), case.qkv(num_seqs), strict=True):
            static[:num_seqs].copy_(new)
        graphs.init_forward_metadata(inputs.fill(batch, size))
        replays[size]()
        ours = out[:num_seqs].clone()
        qkv = tuple(tensor[:num_seqs] for tensor in (q, k, v))
        case.check(ours, case.run(case.wanted, batch, qkv))
        for i in range(num_seqs):
            case.lengths[i] += 1


def test_values_beyond_fp8_become_its_largest() -> None:
    case = Case(4, 4, 128, FP8, [5])
    batch = case.decode(1)
    q, k, v = case.qkv(1)
    case.run(case.ours, batch, (q, k, torch.full_like(v, 1e4)))
    stored = case.pool.v(LAYER_ID)[batch.out_cache_loc[0]].float()
    assert torch.equal(stored, torch.full_like(stored, 448.0))
