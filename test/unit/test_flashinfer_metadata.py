"""What paged kernels are told about a batch, and which kernels a model gets; both without a GPU."""

from __future__ import annotations

import inspect
import math
import random
import types
from pathlib import Path

import pytest
import torch

from sglang.srt.layers.attention import flashinfer_sinks
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.attention.flashinfer_kernels import (
    check_supported,
    decodes_on_tensor_cores,
    prefill_backend,
    windows_of,
)
from sglang.srt.layers.attention.flashinfer_sinks import SinkWrappers, scale_by_sinks
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


def test_a_window_ends_with_the_decoded_token() -> None:
    table, lists = table_of([4, 2, 3])
    batch = ForwardBatch.decode([7, 8, 9], [4, 2, 3], [1, 2, 3], torch.tensor([1, 2, 3]), "cpu")
    metadata = PagedMetadata.one_query_each(batch, table, 3)
    assert metadata.kv_indptr.tolist() == [0, 3, 5, 8]
    assert metadata.kv_indices.tolist() == lists[0][1:] + lists[1] + lists[2]
    assert metadata.qo_indptr is None


def test_each_token_of_a_prompt_sees_its_own_window() -> None:
    table, lists = table_of([6, 3])
    batch = ForwardBatch.extend([0] * 5, [2, 3], [4, 0], [1, 2], torch.arange(1, 6), "cpu")
    metadata = PagedMetadata.one_query_each(batch, table, 2)
    seen = [lists[0][3:5], lists[0][4:6], lists[1][:1], lists[1][0:2], lists[1][1:3]]
    assert metadata.kv_indptr.tolist() == [0, 2, 4, 5, 7, 9]
    assert metadata.kv_indices.tolist() == [slot for slots in seen for slot in slots]
    assert metadata.last_page_len.tolist() == [1] * 5


def test_windows_of_padding_fit_the_buffer_of_a_graph() -> None:
    table, lists = table_of([5])
    batch = ForwardBatch.decode([7, 0], [5, 1], [1, PADDING_ROW], torch.zeros(2), "cpu")
    buffer = torch.full((2 * 3,), -1, dtype=torch.int32)
    metadata = PagedMetadata.one_query_each(batch, table, 3, buffer)
    assert metadata.kv_indices.data_ptr() == buffer.data_ptr()
    assert buffer.tolist() == [*lists[0][2:], PADDING_SLOT, -1, -1]


def test_layers_are_planned_once_for_each_window() -> None:
    layers = [AttentionLayer(i, 4, 2, 64, 0.125, window) for i, window in enumerate((128, None, 128, 16))]
    assert windows_of(layers) == (None, 16, 128)
    assert windows_of([]) == (None,)


def test_scaling_by_the_share_of_the_sinks_equals_a_softmax_with_them() -> None:
    torch.manual_seed(0)
    logits, values, sinks = 3 * torch.randn(5, 4, 9), torch.randn(9, 8), torch.randn(4)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2)
    with_sinks = torch.cat([logits, sinks.view(1, 4, 1).expand(5, 4, 1)], dim=-1).softmax(-1)
    scaled = scale_by_sinks(logits.softmax(-1) @ values, lse, sinks)
    torch.testing.assert_close(scaled, with_sinks[..., :-1] @ values)


def test_flashinfers_own_sink_wrapper_takes_the_arguments_that_it_is_given() -> None:
    import flashinfer

    made = inspect.signature(getattr(flashinfer, flashinfer_sinks.WRAPPER).__init__).parameters
    names = {"backend", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left"}
    buffers = {"use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf"}
    assert names | buffers | {"paged_kv_last_page_len_buf"} <= set(made)
    plan = flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan
    assert {"window_left", "causal", "sm_scale", "disable_split_kv"} <= set(
        inspect.signature(plan).parameters
    )


def test_without_a_sink_wrapper_the_ordinary_kernels_serve_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = types.SimpleNamespace()
    with caplog.at_level("WARNING"):
        sizes = (8, 2, 64, BF16)
        assert SinkWrappers.load(older, torch.zeros(1), *sizes, {False, True}) is None  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "ordinary kernels" in record.getMessage() and flashinfer_sinks.WRAPPER in record.getMessage()


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
    environ = {"TQDM_DISABLE": "0", "TRITON_CACHE_DIR": "/mine"}
    worker_environment.prepare_environment(environ)
    assert environ == {
        "TQDM_DISABLE": "0",
        "TRITON_CACHE_DIR": "/mine",
        "FLASHINFER_LOGGING_LEVEL": "warning",
        "FLASHINFER_USE_CUDA_NORM": "1",
    }


def test_compiled_kernels_are_kept_beside_the_records_unless_others_could_have_put_them_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def place(root: Path) -> str | None:
        monkeypatch.setenv("SGLANG_CACHE_DIR", str(root))
        environ: dict[str, str] = {}
        worker_environment.prepare_environment(environ)
        return environ.get("TRITON_CACHE_DIR")

    assert place(tmp_path / "new" / "root") == str(tmp_path / "new" / "root" / "triton")
    assert place(tmp_path) == str(tmp_path / "triton")
    (tmp_path / "file").write_text("")
    assert place(tmp_path / "file") is None, "Triton would fail to compile anything"
    assert place(tmp_path / ("x" * 300)) is None and place(Path("/proc/none")) is None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "triton").symlink_to(tmp_path / "elsewhere")
    assert place(tmp_path / "root") is None, "a link that leads out of the root"
    monkeypatch.setattr(worker_environment, "doubt", lambda path: "it belongs to user 1234")
    assert place(tmp_path) is None


def test_the_norms_compiler_is_left_on_without_a_compiled_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_environment, "_has_prebuilt_norm", lambda: False)
    environ: dict[str, str] = {}
    worker_environment.prepare_environment(environ)
    assert "FLASHINFER_USE_CUDA_NORM" not in environ
