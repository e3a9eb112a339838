"""Attention over the paged pool against the textbook formula, for every way a batch can look."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.attention import torch_native
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch import ForwardBatch

HEAD_DIM = 16


class Cache:
    """Sequences whose keys and values lie at random slots; `k[i]` and `v[i]` hold them in order."""

    def __init__(self, lengths: list[int], num_kv_heads: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        total = sum(lengths)
        self.rows = ReqToTokenPool(len(lengths), 3000, "cpu")
        self.pool = KVPool(total, 1, 1, num_kv_heads, HEAD_DIM, dtype, "cpu")
        self.pool.k(0)[0] = self.pool.v(0)[0] = torch.nan  # nobody may read the padding slot
        self.backend = TorchNativeAttention(self.rows, self.pool)
        slots = (torch.randperm(total, generator=generator) + 1).split(lengths)
        self.slots = list(slots)
        self.row_ids = self.rows.alloc(len(lengths)) or []
        self.k = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in lengths]
        self.v = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=generator) for n in lengths]
        for row, part in zip(self.row_ids, self.slots, strict=True):
            self.rows.write(row, 0, part)

    def run(self, new: list[int], num_heads: int, decode: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The last `new[i]` tokens of each sequence attend; returns ours and the textbook's result."""
        cached = [len(k) - n for k, n in zip(self.k, new, strict=True)]
        for i, num_cached in enumerate(cached):
            before = slice(0, num_cached)
            self.pool.set_kv(0, self.slots[i][before], self.k[i][before], self.v[i][before])
        loc = torch.cat([slots[c:] for slots, c in zip(self.slots, cached, strict=True)])
        ids = torch.zeros(sum(new), dtype=torch.int64)
        if decode:
            batch = ForwardBatch.decode(ids, [len(k) for k in self.k], self.row_ids, loc, "cpu")
        else:
            batch = ForwardBatch.extend(ids, new, cached, self.row_ids, loc, "cpu")
        q = torch.randn(sum(new), num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(4))
        new_k = torch.cat([k[c:] for k, c in zip(self.k, cached, strict=True)])
        new_v = torch.cat([v[c:] for v, c in zip(self.v, cached, strict=True)])
        layer = AttentionLayer(0, num_heads, new_k.shape[1], HEAD_DIM, scaling=0.3)
        self.backend.init_forward_metadata(batch)
        ours = self.backend.forward(q, new_k, new_v, layer, batch)
        parts = zip(q.split(new), self.k, self.v, strict=True)
        return ours, torch.cat([textbook(*part, scaling=0.3) for part in parts])


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """`q` `[n, Hq, D]` are the last queries of a sequence with keys `[L, Hkv, D]`; returns `[n, Hq * D]`."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (3, 1)])
def test_decode_of_many_lengths_is_exact(num_heads: int, num_kv_heads: int) -> None:
    lengths = [1, 2, 255, 256, 257, 600, 1300, 17]
    ours, wanted = Cache(lengths, num_kv_heads).run([1] * len(lengths), num_heads, decode=True)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (3, 1)])
def test_extend_with_and_without_cached_tokens_is_exact(num_heads: int, num_kv_heads: int) -> None:
    lengths, new = [1, 40, 41, 300, 5], [1, 40, 1, 120, 2]
    ours, wanted = Cache(lengths, num_kv_heads).run(new, num_heads, decode=False)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_cached", [0, 7])
def test_long_prompts_are_exact_across_query_blocks(num_cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "QUERY_BLOCK", 32)
    ours, wanted = Cache([num_cached + 100], 2).run([100], 4, decode=False)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("decode", [True, False])
def test_keys_kept_in_another_dtype_are_read_back_in_it(decode: bool) -> None:
    ours, wanted = Cache([50, 9], 2, torch.bfloat16).run([1, 1] if decode else [50, 4], 4, decode=decode)
    torch.testing.assert_close(ours, wanted, atol=0.05, rtol=0.05)
    assert not torch.equal(ours, wanted)


def test_an_unknown_backend_names_the_flag() -> None:
    cache = Cache([1], 1)
    with pytest.raises(ValueError, match="--attention-backend nonsense"):
        create_attention_backend("nonsense", cache.rows, cache.pool, 1, torch.float32)


def test_a_gpu_backend_on_the_cpu_names_the_flag_and_the_remedy() -> None:
    cache = Cache([1], 1)
    with pytest.raises(ValueError, match="--attention-backend flashinfer needs a GPU: leave it out on cpu"):
        create_attention_backend("flashinfer", cache.rows, cache.pool, 1, torch.float32)
