"""Attention through torch's scaled_dot_product_attention, on any device.

A decode batch is attended in groups of sequences of similar length, padded to the longest of the group. An
extend batch is attended sequence by sequence, long ones in blocks of query rows so that the mask stays
small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base import AttentionBackend, AttentionLayer
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool, read_slots
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

QUERY_BLOCK = 1024
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
        self._decode: list[DecodeGroup] = []
        self._extend: list[ExtendSequence] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._decode, self._extend = [], []
        if batch.mode is ForwardMode.DECODE:
            self._decode = self._decode_groups(batch)
        elif batch.mode is ForwardMode.EXTEND:
            self._extend = self._extend_sequences(batch)

    def _decode_groups(self, batch: ForwardBatch) -> list[DecodeGroup]:
        buckets: dict[int, list[int]] = {}
        for row, length in enumerate(batch.seq_lens_cpu):
            buckets.setdefault(max(length - 1, MIN_LENGTH_BUCKET - 1).bit_length(), []).append(row)
        device = self.req_to_token.device
        groups = []
        for rows_cpu in buckets.values():
            max_len = max(batch.seq_lens_cpu[row] for row in rows_cpu)
            rows = torch.tensor(rows_cpu, dtype=torch.int64, device=device)
            slots = self.req_to_token[batch.req_pool_indices[rows], :max_len].to(torch.int64)
            mask = torch.arange(max_len, device=device) < batch.seq_lens[rows, None]
            # Padding reads the sequence's own first token: a finite value of nobody else.
            slots = torch.where(mask, slots, slots[:, :1])
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
        for group in self._decode:
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
        attended = F.scaled_dot_product_attention(grouped_q, k, v, attn_mask=group.mask, scale=layer.scaling)
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
        for first in range(start, end, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, end)
            num_before = sequence.num_cached + first - start
            num_keys = num_before + last - first
            mask = None
            if num_before:
                key_positions = torch.arange(num_keys, device=q.device)
                query_positions = torch.arange(num_before, num_keys, device=q.device)
                mask = key_positions <= query_positions[:, None]
            attended = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                k[:, :, :num_keys],
                v[:, :, :num_keys],
                attn_mask=mask,
                is_causal=mask is None,
                scale=layer.scaling,
                enable_gqa=layer.num_heads != layer.num_kv_heads,
            )
            out[first:last] = attended[0].transpose(0, 1)
