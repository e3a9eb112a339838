"""What paged kernels are told about a batch, and which kernels a model gets; both without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sglang.srt.layers.attention.flashinfer import (
    check_supported,
    decodes_on_tensor_cores,
    prefill_backend,
)
from sglang.srt.layers.attention.paged_metadata import PagedMetadata, gather_slots, indptr_of
from sglang.srt.managers import worker_environment
from sglang.srt.mem_cache.memory_pool import PADDING_ROW, PADDING_SLOT
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = (9, 0)


def table_of(lengths: list[int], width: int = 64) -> tuple[torch.Tensor, list[list[int]]]:
    """A table whose row `i + 1` lists distinct random slots of sequence i; and the lists."""
    slots = random.Random(0).sample(range(1, 10_000), sum(lengths))
    table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
    lists = []
    for row, length in enumerate(lengths, start=1):
        lists.append([slots.pop() for _ in range(length)])
        table[row, :length] = torch.tensor(lists[-1], dtype=torch.int32)
    return table, lists


def test_boundaries_are_running_sums_on_the_host() -> None:
    indptr = indptr_of([3, 1, 5])
    assert indptr.tolist() == [0, 3, 4, 9]
    assert indptr.dtype == torch.int32 and indptr.device.type == "cpu"


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2], [2, 2], [1]])
def test_slots_come_sequence_after_sequence_in_the_order_of_the_rows(order: list[int]) -> None:
    lengths = [5, 64, 1]
    table, lists = table_of(lengths)
    seq_lens = [lengths[row - 1] for row in order]
    out = torch.empty(sum(seq_lens), dtype=torch.int32)
    gather_slots(table, torch.tensor(order), torch.tensor(seq_lens), out)
    assert out.tolist() == [slot for row in order for slot in lists[row - 1]]


def test_a_decode_batch_has_one_query_each_and_full_last_pages() -> None:
    table, lists = table_of([4, 2])
    batch = ForwardBatch.decode([7, 8], [4, 2], [1, 2], torch.tensor([1, 2]), "cpu")
    metadata = PagedMetadata.of(batch, table)
    assert metadata.kv_indptr.tolist() == [0, 4, 6]
    assert metadata.kv_indices.tolist() == lists[0] + lists[1]
    assert metadata.last_page_len.tolist() == [1, 1]
    assert metadata.qo_indptr is None


def test_an_extend_batch_reads_its_prefix_too() -> None:
    table, lists = table_of([6, 3])
    batch = ForwardBatch.extend([1, 2, 3, 4, 5], [2, 3], [4, 0], [1, 2], torch.arange(1, 6), "cpu")
    metadata = PagedMetadata.of(batch, table)
    assert metadata.qo_indptr is not None
    assert metadata.qo_indptr.tolist() == [0, 2, 5]
    assert metadata.kv_indptr.tolist() == [0, 6, 9]
    assert metadata.kv_indices.tolist() == lists[0] + lists[1]


def test_slots_go_to_the_front_of_a_given_buffer() -> None:
    table, lists = table_of([4, 2])
    batch = ForwardBatch.decode([7, 8], [4, 2], [1, 2], torch.tensor([1, 2]), "cpu")
    buffer = torch.full((10,), -1, dtype=torch.int32)
    metadata = PagedMetadata.of(batch, table, buffer)
    assert metadata.kv_indices.data_ptr() == buffer.data_ptr()
    assert buffer.tolist() == lists[0] + lists[1] + [-1] * 4


def test_padding_sequences_read_the_sink_once() -> None:
    table, lists = table_of([3])
    batch = ForwardBatch.decode([7, 0, 0], [3, 1, 1], [1, PADDING_ROW, PADDING_ROW], torch.zeros(3), "cpu")
    metadata = PagedMetadata.of(batch, table)
    assert metadata.kv_indptr.tolist() == [0, 3, 4, 5]
    assert metadata.kv_indices.tolist() == [*lists[0], PADDING_SLOT, PADDING_SLOT]


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_dummy_batch_reads_nothing_but_the_sink(mode: ForwardMode) -> None:
    table, _ = table_of([3])
    batch = ForwardBatch.dummy(mode, [1] * 5, torch.zeros(5, dtype=torch.int64))
    assert set(PagedMetadata.of(batch, table).kv_indices.tolist()) == {PADDING_SLOT}


def test_hopper_prefill_kernels_are_for_heads_of_128_without_mixed_types() -> None:
    assert prefill_backend(128, BF16, BF16, HOPPER) == "fa3"
    assert prefill_backend(64, BF16, BF16, HOPPER) == "fa2"
    assert prefill_backend(128, BF16, FP8, HOPPER) == "fa2"
    assert prefill_backend(128, BF16, BF16, (10, 0)) == "fa2"


def test_wide_groups_and_fp8_decode_on_tensor_cores() -> None:
    assert not decodes_on_tensor_cores(4, 4, BF16)
    assert not decodes_on_tensor_cores(8, 4, BF16)
    assert decodes_on_tensor_cores(32, 4, BF16)
    assert decodes_on_tensor_cores(40, 8, BF16)  # 5 to 1: there is no other kernel
    assert decodes_on_tensor_cores(4, 4, FP8)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "capability", "message"),
    [
        (128, BF16, BF16, (8, 0), "--attention-backend flashinfer needs compute capability 9.0 or later"),
        (32, BF16, BF16, HOPPER, "not 32: use --attention-backend torch_native"),
        (128, torch.float32, torch.float32, HOPPER, "set --dtype bfloat16"),
        (128, torch.float16, BF16, HOPPER, "--kv-cache-dtype"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused_in_one_line(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_supported(head_dim, dtype, kv_dtype, capability)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_bfloat16_models_are_accepted_with_both_caches(head_dim: int, kv_dtype: torch.dtype) -> None:
    check_supported(head_dim, BF16, kv_dtype, HOPPER)


def test_the_workers_environment_keeps_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_environment, "_has_prebuilt_norm", lambda: True)
    environ = {"TQDM_DISABLE": "0"}
    worker_environment.prepare_environment(environ)
    assert environ == {
        "TQDM_DISABLE": "0",
        "FLASHINFER_LOGGING_LEVEL": "warning",
        "FLASHINFER_USE_CUDA_NORM": "1",
    }


def test_the_norms_compiler_is_left_on_without_a_compiled_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_environment, "_has_prebuilt_norm", lambda: False)
    environ: dict[str, str] = {}
    worker_environment.prepare_environment(environ)
    assert "FLASHINFER_USE_CUDA_NORM" not in environ
