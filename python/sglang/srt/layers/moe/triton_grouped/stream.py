"""The two products for one or two tokens by programs that stay: each streams one block of weights after another.

A program that is replaced by the next one starts with nothing on its way from memory; here the loads of the next
blocks are under way while one is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.moe.triton_grouped.parts import activate, held_here, start_launch


@triton.jit(do_not_specialize=["num_slots"])
def first_stream(  # type: ignore[no-untyped-def]
    x,  # [T, hidden]
    w13,  # [num_experts, 2 * inner, hidden]
    b13,  # [num_experts, 2 * inner] or None
    ids,  # [T, top_k]
    act,  # out: [T * top_k, inner]
    num_slots,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    slot_block: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    turns: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Any grid of one dimension. Slots vary fastest over the blocks of work."""
    start_launch(False, overlaps)
    slots = tl.arange(0, slot_block)
    experts = tl.load(ids + slots, mask=slots < num_slots, other=-1)
    num_n: tl.constexpr = (inner + block_n - 1) // block_n
    ks = tl.arange(0, block_k)
    for turn in tl.range(0, turns, num_stages=stages):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        slot = work % num_slots
        n = (work // num_slots) * block_n + tl.arange(0, block_n)
        expert = tl.sum(tl.where(slots == slot, experts, 0), axis=0)
        held = held_here(expert, num_experts) & (work < num_slots * num_n)
        w_up = w13 + expert.to(tl.int64) * (2 * inner * hidden) + tl.minimum(n, inner - 1)[:, None] * hidden
        if hidden == block_k:
            mask = held & (ks >= 0)
        else:
            mask = held & (ks < hidden)
        xs = tl.load(x + (slot // top_k) * hidden + ks, mask=mask, other=0.0).to(tl.float32)[None, :]
        us = tl.load(w_up + ks[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
        gs = tl.load(w_up + inner * hidden + ks[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
        up = tl.sum(us * xs, axis=1)
        gate = tl.sum(gs * xs, axis=1)
        present = held & (n < inner)
        if b13 is not None:
            bias = b13 + expert * (2 * inner) + n
            up += tl.load(bias, mask=present, other=0.0).to(tl.float32)
            gate += tl.load(bias + inner, mask=present, other=0.0).to(tl.float32)
        values = activate(up, gate, alpha, beta, limit)
        tl.store(act + slot * inner + n, values.to(act.dtype.element_ty), mask=present)


@triton.jit
def second_stream(  # type: ignore[no-untyped-def]
    act,  # [T * top_k, inner]
    w2,  # [num_experts, hidden, inner]
    b2,  # [num_experts, hidden] or None
    ids,  # [T, top_k]
    weights,  # [T, top_k] float32
    out,  # out: [T, hidden]
    hidden: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    slot_block: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    turns: tl.constexpr,
    stages: tl.constexpr,
    waits: tl.constexpr,
):
    """Grid `(any, T)`: all experts of a token in one block of work, so that their sum stays in registers."""
    token = tl.program_id(1)
    slots = tl.arange(0, slot_block)
    experts = tl.load(ids + token * top_k + slots, mask=slots < top_k, other=-1)
    held = held_here(experts, num_experts)
    shares = tl.load(weights + token * top_k + slots, mask=held, other=0.0)
    ks = tl.arange(0, block_k)[None, None, :]
    of_expert = (tl.where(held, experts, 0).to(tl.int64) * (hidden * inner))[:, None, None]
    if inner == block_k:
        mask = held[:, None, None] & (ks >= 0)
    else:
        mask = held[:, None, None] & (ks < inner)
    num_n: tl.constexpr = (hidden + block_n - 1) // block_n
    start_launch(waits, False)
    a = tl.load(act + (token * top_k + slots)[:, None, None] * inner + ks, mask=mask, other=0.0).to(
        tl.float32
    )
    a *= shares[:, None, None]
    for turn in tl.range(0, turns, num_stages=stages):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        n = work * block_n + tl.arange(0, block_n)
        w_rows = w2 + of_expert + tl.minimum(n, hidden - 1)[None, :, None] * inner
        w = tl.load(w_rows + ks, mask=mask & (work < num_n), other=0.0).to(tl.float32)
        total = tl.sum(tl.sum(w * a, axis=2), axis=0)
        if b2 is not None:
            bias = b2 + tl.where(held, experts, 0)[:, None] * hidden + n[None, :]
            biases = tl.load(bias, mask=held[:, None] & (n < hidden)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(biases * shares[:, None], axis=0)
        tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)
