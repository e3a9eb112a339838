"""The two products for one or a few tokens, without tensor cores: reading the weights is all the work.

Each program reads some rows of weights once and multiplies them by a vector; nothing is sorted and no tile of
sixteen rows is computed for one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.moe.triton_grouped.parts import (
    activate,
    held_here,
    start_launch,
)


@triton.jit
def first_gemv(  # type: ignore[no-untyped-def]
    x,  # [T, hidden]
    w13,  # [num_experts, 2 * inner, hidden]
    b13,  # [num_experts, 2 * inner] or None
    ids,  # [T, top_k]
    act,  # out: [T * top_k, inner]
    hidden: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Grid `(T * top_k, blocks of inner)`: slots vary fastest: an expert chosen twice is read from DRAM once."""
    start_launch(False, overlaps)
    slot = tl.program_id(0)
    expert = tl.load(ids + slot)
    if not held_here(expert, num_experts):
        return
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    ks = tl.arange(0, block_k)
    row = tl.minimum(n, inner - 1)[:, None] * hidden
    w_up = w13 + expert.to(tl.int64) * (2 * inner * hidden) + row
    w_gate = w_up + inner * hidden
    x += (slot // top_k) * hidden
    up = tl.zeros([block_n, block_k], tl.float32)
    gate = tl.zeros([block_n, block_k], tl.float32)
    for start in tl.range(0, hidden, block_k, num_stages=stages):
        k = start + ks
        if hidden % block_k == 0:
            xs = tl.load(x + k)
            us = tl.load(w_up + k[None, :])
            gs = tl.load(w_gate + k[None, :])
        else:
            xs = tl.load(x + k, mask=k < hidden, other=0.0)
            us = tl.load(w_up + k[None, :], mask=k[None, :] < hidden, other=0.0)
            gs = tl.load(w_gate + k[None, :], mask=k[None, :] < hidden, other=0.0)
        xs = xs.to(tl.float32)[None, :]
        up += us.to(tl.float32) * xs
        gate += gs.to(tl.float32) * xs
    ups = tl.sum(up, axis=1)
    gates = tl.sum(gate, axis=1)
    if b13 is not None:
        bias = b13 + expert * (2 * inner) + n
        ups += tl.load(bias, mask=n < inner, other=0.0).to(tl.float32)
        gates += tl.load(bias + inner, mask=n < inner, other=0.0).to(tl.float32)
    values = activate(ups, gates, alpha, beta, limit)
    tl.store(act + slot * inner + n, values.to(act.dtype.element_ty), mask=n < inner)


@triton.jit
def second_gemv(  # type: ignore[no-untyped-def]
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
    stages: tl.constexpr,
    waits: tl.constexpr,
):
    """Grid `(T, blocks of hidden)`: all experts of a token in one program, so that their sum stays in registers."""
    token = tl.program_id(0)
    first_row = tl.program_id(1) * block_n
    slots = tl.arange(0, slot_block)
    experts = tl.load(ids + token * top_k + slots, mask=slots < top_k, other=-1)
    held = held_here(experts, num_experts)
    shares = tl.load(weights + token * top_k + slots, mask=held, other=0.0)
    n = first_row + tl.arange(0, block_n)
    ks = tl.arange(0, block_k)
    row = tl.minimum(n, hidden - 1)[None, :, None] * inner
    of_expert = tl.where(held, experts, 0).to(tl.int64) * (hidden * inner)
    w_rows = w2 + of_expert[:, None, None] + row
    act_rows = act + (token * top_k + slots)[:, None, None] * inner
    present = held[:, None, None]
    # Ids and weights are older than the kernel before this one, which waited for nothing.
    start_launch(waits, False)
    acc = tl.zeros([slot_block, block_n, block_k], tl.float32)
    for start in tl.range(0, inner, block_k, num_stages=stages):
        k = (start + ks)[None, None, :]
        if inner % block_k == 0:
            mask = present
        else:
            mask = present & (k < inner)
        a = tl.load(act_rows + k, mask=mask, other=0.0)
        w = tl.load(w_rows + k, mask=mask, other=0.0)
        acc += w.to(tl.float32) * a.to(tl.float32)
    by_slot = tl.sum(acc, axis=2)
    if b2 is not None:
        bias = b2 + tl.where(held, experts, 0)[:, None] * hidden + n[None, :]
        by_slot += tl.load(bias, mask=held[:, None] & (n < hidden)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(by_slot * shares[:, None], axis=0)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), mask=n < hidden)
