"""What one forward of the model works on: the tokens, where they stand, and where their keys and values go."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool import PADDING_ROW, PADDING_SLOT
from sglang.srt.utils.transfer import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base import AttentionBackend


class ForwardMode(enum.Enum):
    """DECODE: one new token for each sequence. EXTEND: one or more, after a prefix that is already cached.
    IDLE: no token of this rank's own; it takes part in the collectives of its neighbours."""

    DECODE = "decode"
    EXTEND = "extend"
    IDLE = "idle"


@dataclass
class ForwardBatch:
    """T tokens of B sequences. The tokens of a sequence are neighbours, in the order of the sequences.

    Tensors live on the model's device; the `_cpu` lists repeat them so that nobody waits for the device to
    read a length. `seq_lens` counts the tokens of a sequence after this forward. In DECODE T equals B and
    the `extend_*` fields are None.
    """

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    req_pool_indices: torch.Tensor  # [B] int64, rows of ReqToTokenPool
    seq_lens: torch.Tensor  # [B] int64
    out_cache_loc: torch.Tensor  # [T] int64, slots of KVPool for the new tokens
    seq_lens_cpu: list[int]
    extend_seq_lens: torch.Tensor | None = None  # [B] int64, new tokens of each sequence
    extend_prefix_lens: torch.Tensor | None = None  # [B] int64, cached tokens before them
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    global_num_tokens: list[int] | None = None  # T of every attention-DP rank, None without attention DP
    all_may_replay: bool = False  # the batches of all attention-DP ranks fit a captured decode forward
    attn_backend: AttentionBackend | None = None  # set by the model runner
    columns: torch.Tensor | None = None  # [5, B]: whose rows the fields of a DECODE batch are
    typical_routing: bool = (
        False  # as of a trained router, whatever this one says: random weights route oddly
    )
    num_layers: int | None = None  # run this many leading layers only; None runs all

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def batch_size(self) -> int:
        return self.req_pool_indices.shape[0]

    @classmethod
    def decode(
        cls,
        input_ids: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int],
        req_pool_indices: Sequence[int],
        out_cache_loc: torch.Tensor,
        device: torch.device | str,
    ) -> ForwardBatch:
        """One token for each of B sequences; `seq_lens` includes it, so its position is `seq_len - 1`.

        `out_cache_loc` `[B]` had best be on the CPU: anywhere else it is waited for.
        """
        is_on_device = isinstance(input_ids, torch.Tensor) and input_ids.device.type != "cpu"
        ids_there = torch.as_tensor(input_ids) if is_on_device else None
        host = np.empty((5, len(seq_lens)), dtype=np.int64)
        host[0] = np.asarray(input_ids) if ids_there is None else 0
        host[2], host[3], host[4] = req_pool_indices, seq_lens, out_cache_loc.cpu().numpy()
        host[1] = host[3] - 1
        columns = to_device(torch.from_numpy(host), device)  # one copy instead of five
        if ids_there is not None:
            columns[0] = ids_there
        ids, positions, rows, lens, slots = columns
        return cls(
            mode=ForwardMode.DECODE,
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots,
            seq_lens_cpu=list(seq_lens),
            columns=columns,
        )

    @classmethod
    def extend(
        cls,
        input_ids: Sequence[int] | torch.Tensor,
        extend_seq_lens: Sequence[int],
        extend_prefix_lens: Sequence[int],
        req_pool_indices: Sequence[int],
        out_cache_loc: torch.Tensor,
        device: torch.device | str,
    ) -> ForwardBatch:
        """`extend_seq_lens[b]` new tokens of sequence b, after `extend_prefix_lens[b]` cached ones."""
        seq_lens = [new + prefix for new, prefix in zip(extend_seq_lens, extend_prefix_lens, strict=True)]
        positions = [
            torch.arange(prefix, end) for prefix, end in zip(extend_prefix_lens, seq_lens, strict=True)
        ]  # on the CPU: one copy to the device instead of one kernel for each sequence
        lengths = torch.tensor([req_pool_indices, seq_lens, extend_seq_lens, extend_prefix_lens])
        rows, lens, new_lens, prefix_lens = to_device(lengths.to(torch.int64), device)
        return cls(
            mode=ForwardMode.EXTEND,
            input_ids=to_device(torch.as_tensor(input_ids, dtype=torch.int64), device),
            positions=to_device(torch.cat(positions), device),
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=to_device(out_cache_loc, device),
            seq_lens_cpu=seq_lens,
            extend_seq_lens=new_lens,
            extend_prefix_lens=prefix_lens,
            extend_seq_lens_cpu=list(extend_seq_lens),
            extend_prefix_lens_cpu=list(extend_prefix_lens),
        )

    @classmethod
    def idle(cls, device: torch.device | str) -> ForwardBatch:
        """A batch without tokens."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(ForwardMode.IDLE, empty, empty, empty, empty, empty, [])

    @classmethod
    def dummy(
        cls, mode: ForwardMode, sequence_lengths: Sequence[int], input_ids: torch.Tensor
    ) -> ForwardBatch:
        """A batch that belongs to nobody: `sequence_lengths[b]` new tokens for each sequence, none cached.

        It reads and writes the padding row and slot only, so it may run at any time before or between real
        batches. `input_ids` `[sum of lengths]` int64 stands on the model's device. A DECODE sequence has one
        token; a sequence must fit the context length.
        """
        device = input_ids.device
        num_seqs, num_tokens = len(sequence_lengths), sum(sequence_lengths)
        assert input_ids.shape == (num_tokens,), f"{tuple(input_ids.shape)} ids for {num_tokens} tokens"
        if mode is ForwardMode.IDLE or num_tokens == 0:
            return cls.idle(device)
        rows = [PADDING_ROW] * num_seqs
        slots = torch.full((num_tokens,), PADDING_SLOT, dtype=torch.int64)
        if mode is ForwardMode.DECODE:
            assert num_tokens == num_seqs, "a decode batch has one token for each sequence"
            return cls.decode(input_ids, [1] * num_seqs, rows, slots, device)
        return cls.extend(input_ids, sequence_lengths, [0] * num_seqs, rows, slots, device)
