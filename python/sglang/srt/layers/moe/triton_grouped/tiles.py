"""The two products on tensor cores: a tile of rows of one expert by a tile of its weights.

Which rows a tile holds is looked up in the table that `align.py` made. With `swaps` the weights are the left factor:
their side of the tile is the longer one, and Hopper's matrix instruction wants 64 rows on the left. `widens` is for
Triton's interpreter, which multiplies no BF16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.moe.triton_grouped.parts import activate, start_launch


@triton.jit(do_not_specialize=["num_tokens"])
def first_tiles(  # type: ignore[no-untyped-def]
    x,  # [T, hidden]
    w13,  # [num_experts, 2 * inner, hidden], or a descriptor of [num_experts * 2 * inner, hidden]
    b13,  # [num_experts, 2 * inner] or None
    sorted_slots,  # [blocks * block_m]
    block_experts,  # [blocks]
    act,  # out: [blocks * block_m, inner]
    num_tokens,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    swaps: tl.constexpr,
    is_tma: tl.constexpr,
    widens: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Grid `blocks of rows * blocks of inner`, those of inner fastest."""
    start_launch(overlaps, overlaps)
    num_n: tl.constexpr = (inner + block_n - 1) // block_n
    block = tl.program_id(0) // num_n
    first_n = (tl.program_id(0) % num_n) * block_n
    num_slots = num_tokens * top_k
    ms = tl.arange(0, block_m)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    slots = tl.load(sorted_slots + block * block_m + ms)
    valid = slots < num_slots
    slots = tl.where(valid, slots, 0)
    act_rows = (block * block_m + ms).to(tl.int64)

    n = first_n + tl.arange(0, block_n)
    ks = tl.arange(0, block_k)
    x_rows = x + (slots // top_k).to(tl.int64)[:, None] * hidden
    if is_tma:
        up_row = expert * (2 * inner) + first_n
    else:
        w_up = w13 + expert.to(tl.int64) * (2 * inner * hidden) + tl.minimum(n, inner - 1)[:, None] * hidden
        w_gate = w_up + inner * hidden
    if swaps:
        up = tl.zeros([block_n, block_m], tl.float32)
        gate = tl.zeros([block_n, block_m], tl.float32)
    else:
        up = tl.zeros([block_m, block_n], tl.float32)
        gate = tl.zeros([block_m, block_n], tl.float32)
    for start in tl.range(0, hidden, block_k, num_stages=stages):
        k = start + ks[None, :]
        if hidden % block_k == 0:
            xs = tl.load(x_rows + k, mask=valid[:, None], other=0.0)
        else:
            xs = tl.load(x_rows + k, mask=valid[:, None] & (k < hidden), other=0.0)
        if is_tma:
            us = w13.load([up_row, start])
            gs = w13.load([up_row + inner, start])
        elif hidden % block_k == 0:
            us = tl.load(w_up + k)
            gs = tl.load(w_gate + k)
        else:
            us = tl.load(w_up + k, mask=k < hidden, other=0.0)
            gs = tl.load(w_gate + k, mask=k < hidden, other=0.0)
        if widens:
            xs, us, gs = xs.to(tl.float32), us.to(tl.float32), gs.to(tl.float32)
        if swaps:
            up = tl.dot(us, tl.trans(xs), up)
            gate = tl.dot(gs, tl.trans(xs), gate)
        else:
            up = tl.dot(xs, tl.trans(us), up)
            gate = tl.dot(xs, tl.trans(gs), gate)
    if b13 is not None:
        bias = b13 + expert * (2 * inner) + n
        b_up = tl.load(bias, mask=n < inner, other=0.0).to(tl.float32)
        b_gate = tl.load(bias + inner, mask=n < inner, other=0.0).to(tl.float32)
        if swaps:
            up += b_up[:, None]
            gate += b_gate[:, None]
        else:
            up += b_up[None, :]
            gate += b_gate[None, :]
    values = activate(up, gate, alpha, beta, limit).to(act.dtype.element_ty)
    if swaps:
        values = tl.trans(values)
    places = act + act_rows[:, None] * inner + n[None, :]
    tl.store(places, values, mask=valid[:, None] & (n < inner)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def second_tiles(  # type: ignore[no-untyped-def]
    act,  # [blocks * block_m, inner]
    w2,  # [num_experts, hidden, inner], or a descriptor of [num_experts * hidden, inner]
    b2,  # [num_experts, hidden] or None
    weights,  # [T, top_k] float32
    sorted_slots,  # [blocks * block_m]
    block_experts,  # [blocks]
    parts,  # out: [T * top_k, hidden], weighted; slots of other ranks' experts are left as they were
    num_tokens,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    swaps: tl.constexpr,
    is_tma: tl.constexpr,
    widens: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Grid `blocks of rows * blocks of hidden`, those of hidden fastest; `align.sum_parts` adds a token's slots."""
    num_n: tl.constexpr = (hidden + block_n - 1) // block_n
    block = tl.program_id(0) // num_n
    first_n = (tl.program_id(0) % num_n) * block_n
    num_slots = num_tokens * top_k
    ms = tl.arange(0, block_m)
    # The tables are those of the kernel before the former one, which waited for it.
    start_launch(overlaps, overlaps)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    slots = tl.load(sorted_slots + block * block_m + ms)
    valid = slots < num_slots
    slots = tl.where(valid, slots, 0)
    act_rows = (block * block_m + ms).to(tl.int64)

    n = first_n + tl.arange(0, block_n)
    ks = tl.arange(0, block_k)
    a_rows = act + act_rows[:, None] * inner
    if is_tma:
        w_row = expert * hidden + first_n
    else:
        w_rows = w2 + expert.to(tl.int64) * (hidden * inner) + tl.minimum(n, hidden - 1)[:, None] * inner
    if swaps:
        acc = tl.zeros([block_n, block_m], tl.float32)
    else:
        acc = tl.zeros([block_m, block_n], tl.float32)
    divides: tl.constexpr = inner % block_k == 0
    for start in tl.range(0, inner, block_k, num_stages=stages):
        k = start + ks[None, :]
        if divides:
            a = tl.load(a_rows + k, mask=valid[:, None], other=0.0)
        else:
            a = tl.load(a_rows + k, mask=valid[:, None] & (k < inner), other=0.0)
        if is_tma:
            w = w2.load([w_row, start])
        elif divides:
            w = tl.load(w_rows + k)
        else:
            w = tl.load(w_rows + k, mask=k < inner, other=0.0)
        if widens:
            a, w = a.to(tl.float32), w.to(tl.float32)
        if swaps:
            acc = tl.dot(w, tl.trans(a), acc)
        else:
            acc = tl.dot(a, tl.trans(w), acc)
    if swaps:
        acc = tl.trans(acc)
    if b2 is not None:
        bias = tl.load(b2 + expert * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
        acc += bias[None, :]
    acc *= tl.load(weights + slots, mask=valid, other=0.0)[:, None]
    places = parts + slots.to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(places, acc.to(parts.dtype.element_ty), mask=valid[:, None] & (n < hidden)[None, :])
