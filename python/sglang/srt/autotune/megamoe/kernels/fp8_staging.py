"""Staging of one FP8 launch in one Triton kernel, where FlashInfer composes it of fourteen torch operations.

What it writes is what `flashinfer.moe_ep` writes, bit by bit. Imported on GPUs only: Triton comes with torch's CUDA
builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Columns that share a scale; the kernel's, like the smallest scale below.
_BLOCK = 128
_SMALLEST_SCALE = 1e-30
#: torch divides a CUDA tensor by a number by multiplying with its inverse.
_INVERSE_OF_FP8_MAX = 1 / 448.0


@triton.jit
def _stage_row(  # type: ignore[no-untyped-def]
    hidden,
    ids,
    shares,
    payload_out,
    scales_out,
    ids_out,
    shares_out,
    num_tokens,
    hidden_stride,
    ids_stride,
    shares_stride,
    num_blocks: tl.constexpr,
    scale_columns: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
    blocks_padded: tl.constexpr,
    slots_padded: tl.constexpr,
    smallest_scale: tl.constexpr,
    inverse_of_fp8_max: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, slots_padded)
    if row >= num_tokens:
        # The kernel skips rows without experts; what their payload holds does not matter.
        tl.store(ids_out + row * top_k + slots, tl.full([slots_padded], -1, tl.int64), mask=slots < top_k)
        return
    blocks = tl.arange(0, blocks_padded)
    columns = blocks[:, None] * block + tl.arange(0, block)[None, :]
    inside = columns < num_blocks * block
    values = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(values), axis=1) * inverse_of_fp8_max, smallest_scale)
    payload = tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape))
    tl.store(
        payload_out + row * (num_blocks * block) + columns,
        payload.to(payload_out.dtype.element_ty),
        mask=inside,
    )
    # Columns beyond the last block pad a row of scales to 16 bytes.
    scales = tl.where(blocks < num_blocks, scales, 0.0)
    tl.store(scales_out + row * scale_columns + blocks, scales, mask=blocks < scale_columns)
    own_ids = tl.load(ids + row * ids_stride + slots, mask=slots < top_k, other=0)
    own_shares = tl.load(shares + row * shares_stride + slots, mask=slots < top_k, other=0.0)
    tl.store(ids_out + row * top_k + slots, own_ids.to(tl.int64), mask=slots < top_k)
    tl.store(shares_out + row * top_k + slots, own_shares.to(tl.float32), mask=slots < top_k)


def stage(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
) -> None:
    """Quantise `T` rows of a launch and write them, with their routing, into the buffers of `C` rows.

    Args:
        hidden_states: `[T, H]` BF16, `T` at most `C` and maybe 0; `H` a multiple of 128. Rows of this and the next two
            are contiguous.
        topk_ids: `[T, K]` integer, global expert numbers.
        topk_weights: `[T, K]` floating.
        payload: `[C, H]` FP8 e4m3, contiguous like all buffers.
        scales: `[C, H / 128 rounded up to 4]` float32; one for each 128 columns, zeros behind them.
        ids: `[C, K]` int64; -1 in rows from `T` on.
        shares: `[C, K]` float32.
    """
    assert hidden_states.stride(1) == topk_ids.stride(1) == topk_weights.stride(1) == 1
    num_blocks, top_k = payload.shape[1] // _BLOCK, ids.shape[1]
    _stage_row[(payload.shape[0],)](
        hidden_states,
        topk_ids,
        topk_weights,
        payload,
        scales,
        ids,
        shares,
        hidden_states.shape[0],
        hidden_states.stride(0),
        topk_ids.stride(0),
        topk_weights.stride(0),
        num_blocks,
        scales.shape[1],
        top_k,
        _BLOCK,
        triton.next_power_of_2(max(num_blocks, scales.shape[1])),
        triton.next_power_of_2(top_k),
        _SMALLEST_SCALE,
        _INVERSE_OF_FP8_MAX,
        num_warps=4,
    )
