"""The passes beside the products: slots sorted by expert before them, the sum over a token's slots after them."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.moe.triton_grouped.parts import held_here, start_launch


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def align_slots(  # type: ignore[no-untyped-def]
    ids,  # [num_slots]
    sorted_slots,  # out: [num_blocks * block_m]; num_slots where a block has no more rows
    block_experts,  # out: [num_blocks]; -1 where no rows are left
    num_slots,
    num_blocks,
    num_experts: tl.constexpr,
    expert_block: tl.constexpr,
    slot_block: tl.constexpr,
    block_m: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One program for each expert and one more: each counts everything, and writes what is its own.

    Rows of an expert keep the order of their slots, whatever the order in which programs run, and nothing has to be
    cleared beforehand. The last program closes the table of blocks.
    """
    start_launch(False, overlaps)
    mine = tl.program_id(0)
    experts = tl.arange(0, expert_block)
    places = tl.arange(0, slot_block)
    counts = tl.zeros([expert_block], tl.int32)
    start = 0
    while start < num_slots:
        slot = start + places
        expert = tl.load(ids + slot, mask=slot < num_slots, other=-1)
        held = held_here(expert, num_experts)
        counts += tl.histogram(tl.where(held, expert, 0), expert_block, mask=held)
        start += slot_block
    blocks = (counts + block_m - 1) // block_m
    first_block = tl.sum(tl.where(experts < mine, blocks, 0), axis=0)
    if mine == num_experts:
        while first_block < num_blocks:
            block = first_block + places
            tl.store(block_experts + block, -1, mask=block < num_blocks)
            first_block += slot_block
        return
    count = tl.sum(tl.where(experts == mine, counts, 0), axis=0)
    my_blocks = (count + block_m - 1) // block_m
    start = 0
    while start < my_blocks:
        block = start + places
        tl.store(block_experts + first_block + block, mine, mask=block < my_blocks)
        start += slot_block
    sorted_slots += first_block * block_m
    done = 0
    if count > 0:
        start = 0
        while start < num_slots:
            slot = start + places
            is_mine = tl.load(ids + slot, mask=slot < num_slots, other=-1) == mine
            number = done + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
            tl.store(sorted_slots + number, slot, mask=is_mine)
            done += tl.sum(is_mine.to(tl.int32), axis=0)
            start += slot_block
        rest = count + tl.arange(0, block_m)
        tl.store(sorted_slots + rest, num_slots, mask=rest < my_blocks * block_m)


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    parts,  # [T * top_k, hidden], weighted
    ids,  # [T * top_k]
    out,  # out: [T, hidden]
    hidden: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    part_block: tl.constexpr,
    block_n: tl.constexpr,
    waits: tl.constexpr,
):
    """Grid `(T, blocks of hidden)`. Slots of other ranks' experts hold anything and are passed over."""
    start_launch(waits, False)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    part = tl.arange(0, part_block)
    slot = token * top_k + part
    expert = tl.load(ids + slot, mask=part < top_k, other=-1)
    mask = held_here(expert, num_experts)[:, None] & (n < hidden)[None, :]
    values = tl.load(parts + slot[:, None] * hidden + n[None, :], mask=mask, other=0.0)
    total = tl.sum(values.to(tl.float32), axis=0)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)
