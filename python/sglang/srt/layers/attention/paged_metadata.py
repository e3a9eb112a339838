"""What paged attention kernels must know about a batch, worked out from lengths that the host knows.

A page is one slot here, so a sequence's pages are the slots of its tokens and its last page is always full.
Boundaries are made on the host, where the planner of the kernels reads them; slots are gathered on the
device, where `ReqToTokenPool` lives. Nothing here waits for the device, and what is copied to it later stands in
pinned memory: the driver may wait for the device before it takes a copy from any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sglang.srt.model_executor.forward_batch import ForwardBatch


def indptr_of(lengths: Sequence[int], *, pinned: bool = False) -> torch.Tensor:
    """`[B + 1]` int32 on the CPU: where each of B neighbours of these `lengths` begins, and where the last ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=pinned)


def full_pages(num_seqs: int, *, pinned: bool = False) -> torch.Tensor:
    """`[num_seqs]` int32 on the CPU: the length of each sequence's last page, which is 1."""
    return torch.ones(num_seqs, dtype=torch.int32, pin_memory=pinned)


def gather_slots(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of `seq_lens` tokens of B sequences, one sequence after another, into `out` `[sum of seq_lens]` int32.

    `req_to_token` is `[num_rows, max_context_len]` int32; `rows`, `seq_lens` and `starts`, the first token of each (0
    by default), are `[B]` int64 on its device. `out` has the length that the host knows, so the device is not asked
    for it.
    """
    total = out.shape[0]
    ends = torch.cumsum(seq_lens, 0)
    # Token t of the output stands at `t + base` of the flattened table, with one base for each sequence.
    base = rows * req_to_token.shape[1] - (ends - seq_lens)
    if starts is not None:
        base += starts
    places = torch.repeat_interleave(base, seq_lens, output_size=total)
    places += torch.arange(total, device=places.device)
    return torch.index_select(req_to_token.view(-1), 0, places, out=out)


@dataclass(frozen=True)
class PagedMetadata:
    """One batch as the wrappers' `plan` takes it. `qo_indptr` is None for a decode batch: one query each.

    The three of them on the host are int32 on the CPU; `kv_indices` is int32 on the device.
    """

    kv_indptr: torch.Tensor  # [B + 1]
    last_page_len: torch.Tensor  # [B], all 1
    kv_indices: torch.Tensor  # [sum of the lengths]
    qo_indptr: torch.Tensor | None = None  # [B + 1]

    @classmethod
    def of(
        cls, batch: ForwardBatch, req_to_token: torch.Tensor, indices: torch.Tensor | None = None
    ) -> PagedMetadata:
        """Metadata of `batch`, the slots written to the front of `indices` (int32, long enough) if it is given."""
        total = sum(batch.seq_lens_cpu)
        if indices is None:
            indices = torch.empty(total, dtype=torch.int32, device=req_to_token.device)
        assert total <= indices.shape[0], f"{total} tokens in a buffer of {indices.shape[0]}"
        new_lens = batch.extend_seq_lens_cpu
        pinned = indices.is_cuda
        return cls(
            kv_indptr=indptr_of(batch.seq_lens_cpu, pinned=pinned),
            last_page_len=full_pages(batch.batch_size, pinned=pinned),
            kv_indices=gather_slots(req_to_token, batch.req_pool_indices, batch.seq_lens, indices[:total]),
            qo_indptr=None if new_lens is None else indptr_of(new_lens, pinned=pinned),
        )

    @classmethod
    def one_query_each(
        cls,
        batch: ForwardBatch,
        req_to_token: torch.Tensor,
        window: int | None = None,
        indices: torch.Tensor | None = None,
    ) -> PagedMetadata:
        """Metadata in which every token of `batch` is a sequence of its own: the tokens that it sees, itself last.

        With a `window` it sees that many at the most; without one, `batch` must be a decode batch.
        """
        if window is None:
            assert batch.extend_seq_lens_cpu is None, "each token of a prompt would list all before it"
            return cls.of(batch, req_to_token, indices)
        ends, rows = batch.seq_lens_cpu, batch.req_pool_indices
        if batch.extend_seq_lens_cpu is not None:
            assert batch.extend_prefix_lens_cpu is not None and batch.extend_seq_lens is not None
            pieces = zip(batch.extend_prefix_lens_cpu, batch.seq_lens_cpu, strict=True)
            ends = [end for prefix, last in pieces for end in range(prefix + 1, last + 1)]
            rows = torch.repeat_interleave(rows, batch.extend_seq_lens, output_size=batch.num_tokens)
        lengths = [min(end, window) for end in ends]
        total = sum(lengths)
        if indices is None:
            indices = torch.empty(total, dtype=torch.int32, device=req_to_token.device)
        assert total <= indices.shape[0], f"{total} tokens in a buffer of {indices.shape[0]}"
        first = (batch.positions + 1 - window).clamp_(min=0)
        seen = batch.positions + 1 - first
        return cls(
            kv_indptr=indptr_of(lengths, pinned=indices.is_cuda),
            last_page_len=full_pages(len(lengths), pinned=indices.is_cuda),
            kv_indices=gather_slots(req_to_token, rows, seen, indices[:total], first),
        )
