"""Attention through torch's scaled_dot_product_attention, on any device.

A decode batch is attended in groups of sequences of similar length, padded to the longest of the group. An
extend batch is attended sequence by sequence, long ones in blocks of query rows so that the mask stays
small. Layers with a sliding window read no keys before it; layers with sinks spell the softmax out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool, read_slots
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

QUERY_BLOCK = 1024
SINK_QUERY_BLOCK = 128
"""Query rows at once where scores are kept whole."""
MIN_LENGTH_BUCKET = 256


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of one length bucket: their rows in the batch, their slots `[b * L]`, and which of `[b, L]` count."""

    rows: torch.Tensor  # [b] int64
    slots: torch.Tensor  # [b * L] int64
    mask: torch.Tensor  # [b, 1, 1, L] bool


@dataclass(frozen=True)
class ExtendSequence:
    """One sequence: its query rows `start .. start + num_new`, the tokens before them, and the slots of all tokens."""

    start: int
    num_new: int
    num_cached: int
    slots: torch.Tensor  # [num_cached + num_new] int64


class TorchNativeAttention(AttentionBackend):
    """See the module's docstring. It keeps the metadata of the latest batch."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: KVPool) -> None:
        self.req_to_token = req_to_token_pool.req_to_token
        self.kv_pool = kv_pool
        self._batch: ForwardBatch | None = None
        self._decode: dict[int | None, list[DecodeGroup]] = {}
        self._extend: list[ExtendSequence] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._batch, self._decode, self._extend = batch, {}, []
        if batch.mode is ForwardMode.EXTEND:
            self._extend = self._extend_sequences(batch)

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """The sequences of a decode batch by the number of keys that they see; kept for the other layers."""
        batch = self._batch
        assert batch is not None, "init_forward_metadata comes first"
        if batch.mode is not ForwardMode.DECODE:
            return []
        if window not in self._decode:
            self._decode[window] = self._grouped(batch, window)
        return self._decode[window]

    def _grouped(self, batch: ForwardBatch, window: int | None) -> list[DecodeGroup]:
        lengths = [length if window is None else min(length, window) for length in batch.seq_lens_cpu]
        buckets: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            buckets.setdefault(max(length - 1, MIN_LENGTH_BUCKET - 1).bit_length(), []).append(row)
        device = self.req_to_token.device
        groups = []
        for rows_cpu in buckets.values():
            rows = torch.tensor(rows_cpu, dtype=torch.int64, device=device)
            lens = torch.tensor([lengths[row] for row in rows_cpu], dtype=torch.int64, device=device)
            places = torch.arange(max(lengths[row] for row in rows_cpu), device=device)
            mask = places < lens[:, None]
            # Padding reads the first token that the sequence sees: a finite value of nobody else.
            places = torch.where(mask, places, 0) + (batch.seq_lens[rows] - lens)[:, None]
            slots = self.req_to_token[batch.req_pool_indices[rows, None], places].to(torch.int64)
            groups.append(DecodeGroup(rows, slots.reshape(-1), mask[:, None, None, :]))
        return groups

    def _extend_sequences(self, batch: ForwardBatch) -> list[ExtendSequence]:
        assert batch.extend_seq_lens_cpu is not None and batch.extend_prefix_lens_cpu is not None
        sequences, start = [], 0
        for i, (num_new, num_cached) in enumerate(
            zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
        ):
            slots = self.req_to_token[batch.req_pool_indices[i], : num_cached + num_new].to(torch.int64)
            sequences.append(ExtendSequence(start, num_new, num_cached, slots))
            start += num_new
        return sequences

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        if batch.num_tokens:
            self.kv_pool.set_kv(layer.layer_id, batch.out_cache_loc, k, v)
        for group in self._decode_groups(layer.sliding_window):
            self._attend_decode(q, out, group, layer)
        for sequence in self._extend:
            self._attend_extend(q, k, v, out, sequence, layer)
        return out.flatten(1)

    def _attend_decode(
        self, q: torch.Tensor, out: torch.Tensor, group: DecodeGroup, layer: AttentionLayer
    ) -> None:
        num_seqs = group.rows.shape[0]
        k = read_slots(self.kv_pool.k(layer.layer_id), group.slots, q.dtype)
        v = read_slots(self.kv_pool.v(layer.layer_id), group.slots, q.dtype)
        k = k.view(num_seqs, -1, layer.num_kv_heads, layer.head_dim).transpose(1, 2)
        v = v.view(num_seqs, -1, layer.num_kv_heads, layer.head_dim).transpose(1, 2)
        # The query heads that share a KV head stand where query rows usually do: [b, Hkv, Hq / Hkv, D].
        grouped_q = q[group.rows].view(num_seqs, layer.num_kv_heads, -1, layer.head_dim)
        if layer.sinks is None:
            attended = F.scaled_dot_product_attention(
                grouped_q, k, v, attn_mask=group.mask, scale=layer.scaling
            )
        else:
            sinks = layer.sinks.view(layer.num_kv_heads, -1, 1)
            attended = _attend_with_sinks(grouped_q, k, v, group.mask, sinks, layer.scaling)
        out[group.rows] = attended.reshape(num_seqs, layer.num_heads, layer.head_dim)

    def _attend_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sequence: ExtendSequence,
        layer: AttentionLayer,
    ) -> None:
        start, end = sequence.start, sequence.start + sequence.num_new
        if sequence.num_cached or self.kv_pool.dtype != q.dtype:
            k = read_slots(self.kv_pool.k(layer.layer_id), sequence.slots, q.dtype)
            v = read_slots(self.kv_pool.v(layer.layer_id), sequence.slots, q.dtype)
        else:
            k, v = k[start:end], v[start:end]
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, Hkv, L, D]
        block = QUERY_BLOCK if layer.sinks is None else SINK_QUERY_BLOCK
        for first in range(start, end, block):
            last = min(first + block, end)
            num_before = sequence.num_cached + first - start
            num_keys = num_before + last - first
            first_key = 0 if layer.sliding_window is None else max(0, num_before - layer.sliding_window + 1)
            mask = _visible(first_key, num_before, num_keys, layer.sliding_window, q.device)
            attended = _attend_block(
                q[first:last].transpose(0, 1)[None],
                k[:, :, first_key:num_keys],
                v[:, :, first_key:num_keys],
                mask,
                layer,
            )
            out[first:last] = attended[0].transpose(0, 1)


def _visible(
    first_key: int, num_before: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """`[num_keys - num_before, num_keys - first_key]` bool: which keys each query row sees; None: plainly causal."""
    if num_before == 0 and (window is None or num_keys <= window):
        return None
    keys = torch.arange(first_key, num_keys, device=device)
    queries = torch.arange(num_before, num_keys, device=device)[:, None]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layer: AttentionLayer
) -> torch.Tensor:
    """Rows `q` `[1, Hq, R, D]` over `k` and `v` `[1, Hkv, L, D]`; without a `mask`, R equals L and is causal."""
    if layer.sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=layer.scaling,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )
    num_rows = q.shape[2]
    if mask is None:
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).tril()
    group = layer.num_heads // layer.num_kv_heads
    # The heads that share a KV head stand one after the other among its rows: [1, Hkv, group * R, D].
    rows = q.reshape(1, layer.num_kv_heads, group * num_rows, layer.head_dim)
    sinks = layer.sinks.repeat_interleave(num_rows).view(layer.num_kv_heads, group * num_rows, 1)
    attended = _attend_with_sinks(rows, k, v, mask.repeat(group, 1), sinks, layer.scaling)
    return attended.view(q.shape)


def _attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """`q` `[b, H, R, D]` over `k` and `v` `[b, H, L, D]`, beside one more key of logit `sinks` `[H, R or 1, 1]`.

    `mask` broadcasts to `[b, H, R, L]`. The softmax is taken in float32.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(scaling).masked_fill_(~mask, -torch.inf)
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = scores.sub_(largest).exp_()
    weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - largest))
    return torch.matmul(weights.to(v.dtype), v)
