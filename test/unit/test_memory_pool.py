"""Rows, slots and the KV pool: what is handed out, taken back and kept apart."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.mem_cache.memory_pool import (
    PADDING_ROW,
    PADDING_SLOT,
    KVPool,
    ReqToTokenPool,
    TokenAllocator,
    read_slots,
)
from sglang.srt.model_executor.kv_sizing import CPU_TOKENS, max_total_num_tokens

CPU = torch.device("cpu")


def test_slots_are_distinct_and_never_the_padding_slot() -> None:
    allocator = TokenAllocator(10)
    first, second = allocator.alloc(4), allocator.alloc(6)
    assert first is not None and second is not None
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(1, 11))
    assert PADDING_SLOT not in first


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    allocator = TokenAllocator(3)
    assert allocator.alloc(4) is None
    assert allocator.available() == 3


def test_freed_slots_are_handed_out_again_and_clear_takes_all_back() -> None:
    allocator = TokenAllocator(4)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free(slots[1:3].to(torch.int32))
    again = allocator.alloc(2)
    assert again is not None
    assert sorted(again.tolist()) == sorted(slots[1:3].tolist())
    allocator.clear()
    assert allocator.available() == 4


def test_slots_already_handed_out_do_not_change_when_others_come_back() -> None:
    allocator = TokenAllocator(4)
    first, second = allocator.alloc(2), allocator.alloc(2)
    assert first is not None and second is not None
    before = first.tolist()
    allocator.free(second)
    allocator.alloc(1)
    assert first.tolist() == before


def test_freeing_more_than_was_handed_out_is_an_error() -> None:
    allocator = TokenAllocator(4)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(torch.tensor([1]))


def test_rows_are_handed_out_until_none_is_left() -> None:
    pool = ReqToTokenPool(2, 8, CPU)
    rows = pool.alloc(2)
    assert rows is not None and len(set(rows)) == 2 and PADDING_ROW not in rows
    assert pool.alloc(1) is None
    pool.free(rows[:1])
    assert pool.available() == 1
    assert pool.alloc(1) == rows[:1]


def test_write_places_slots_after_those_already_there() -> None:
    pool = ReqToTokenPool(2, 8, CPU)
    (row,) = pool.alloc(1) or []
    pool.write(row, 0, torch.tensor([5, 6]))
    pool.write(row, 2, torch.tensor([9]))
    assert pool.req_to_token[row].tolist() == [5, 6, 9, 0, 0, 0, 0, 0]
    assert pool.req_to_token[PADDING_ROW].tolist() == [0] * 8


def test_only_single_slot_pages_are_accepted() -> None:
    with pytest.raises(ValueError, match="page_size"):
        TokenAllocator(4, page_size=16)
    with pytest.raises(ValueError, match="page_size"):
        KVPool(4, 16, 1, 1, 8, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_keys_and_values_are_read_back_from_their_layer_and_slots(dtype: torch.dtype) -> None:
    pool = KVPool(6, 1, 2, 2, 4, dtype, CPU, first_layer=3)
    k = torch.randint(-8, 8, (2, 2, 4)).float()  # integers this small are exact in every dtype here
    v = torch.randint(-8, 8, (2, 2, 4)).float()
    loc = torch.tensor([6, 2])
    pool.set_kv(4, loc, k, v)
    assert torch.equal(read_slots(pool.k(4), loc, torch.float32), k)
    assert torch.equal(read_slots(pool.v(4), loc, torch.float32), v)
    assert read_slots(pool.k(4), torch.tensor([1, 3, 4, 5]), torch.float32).abs().sum() == 0
    assert pool.k(3).float().abs().sum() == 0


def pool_size(requested: int | None, free_tokens: int, context_length: int = 100) -> int:
    world = ParallelState.single().world
    return max_total_num_tokens(requested, context_length, 1000, free_tokens * 1000, world, CPU)


def test_the_requested_pool_size_is_taken() -> None:
    assert pool_size(500, free_tokens=10_000) == 500


def test_the_default_pool_on_cpu_is_bounded_and_holds_a_request() -> None:
    assert pool_size(None, free_tokens=10**9) == CPU_TOKENS
    assert pool_size(None, free_tokens=10**9, context_length=2 * CPU_TOKENS) == 2 * CPU_TOKENS
    assert pool_size(None, free_tokens=300) == 300


def test_a_pool_that_does_not_fit_names_the_flag_and_the_size_that_fits() -> None:
    with pytest.raises(ValueError, match=r"--max-total-tokens 500 .* lower it to 400"):
        pool_size(500, free_tokens=400)


def test_memory_for_less_than_one_request_names_the_flags() -> None:
    with pytest.raises(ValueError, match=r"--context-length.*--mem-fraction-static"):
        pool_size(None, free_tokens=99)
    with pytest.raises(ValueError, match=r"0 tokens"):
        pool_size(None, free_tokens=-5)
