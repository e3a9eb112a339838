"""The FlashInfer backend against torch's, over fake kernels: windows and sinks, eager and planned for graphs."""

from __future__ import annotations

import types

import pytest
import torch

from sglang.srt.layers.attention import flashinfer_kernels
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.attention.flashinfer import FlashInferAttention
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.decode_graphs import StaticDecodeBatch
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from support import fake_flashinfer

BF16, CPU = torch.bfloat16, torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
WINDOW = 5


@pytest.fixture(params=["sinks in the kernel", "sinks afterwards", "no sinks"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    names = [name for name in vars(fake_flashinfer) if name.startswith(("Batch", "append"))]
    if request.param == "sinks afterwards":
        names.remove("BatchAttentionWithAttentionSinkWrapper")
    module = types.SimpleNamespace(**{name: getattr(fake_flashinfer, name) for name in names})
    monkeypatch.setattr(flashinfer_kernels, "import_flashinfer", lambda: module)
    monkeypatch.setattr(flashinfer_kernels, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Case(has_sinks=request.param != "no sinks")


class Case:
    """Three layers, the middle one without a window, and sequences whose tokens stand in scattered slots."""

    LENGTHS = (0, 1, 4, 5, 6, 40)

    def __init__(self, has_sinks: bool) -> None:
        torch.manual_seed(0)
        sizes = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        self.layers = [
            AttentionLayer(i, *sizes, window, torch.randn(NUM_HEADS) if has_sinks else None)
            for i, window in enumerate((WINDOW, None, WINDOW))
        ]
        self.pool = KVPool(400, 1, 3, NUM_KV_HEADS, HEAD_DIM, BF16, CPU)
        for layer in range(3):
            self.pool.k(layer).normal_()
            self.pool.v(layer).normal_()
        self.rows = ReqToTokenPool(len(self.LENGTHS), 64, CPU)
        rows = self.rows.alloc(len(self.LENGTHS))
        assert rows is not None
        self.row_of, self._slots = rows, torch.randperm(400) + 1
        for row, length in zip(rows, self.LENGTHS, strict=True):
            self.rows.write(row, 0, self.take(length))
        self.ours = FlashInferAttention(self.rows, self.pool, NUM_HEADS, BF16, layers=self.layers)
        self.wanted = TorchNativeAttention(self.rows, self.pool)

    def take(self, num_slots: int) -> torch.Tensor:
        slots, self._slots = self._slots[:num_slots], self._slots[num_slots:]
        return slots

    def extend(self, new: list[int]) -> ForwardBatch:
        slots = [self.take(length) for length in new]
        for row, length, part in zip(self.row_of, self.LENGTHS, slots, strict=True):
            self.rows.write(row, length, part)
        return ForwardBatch.extend([0] * sum(new), new, self.LENGTHS, self.row_of, torch.cat(slots), CPU)

    def decode(self) -> ForwardBatch:
        slots = self.take(len(self.LENGTHS))
        for i, (row, length) in enumerate(zip(self.row_of, self.LENGTHS, strict=True)):
            self.rows.write(row, length, slots[i : i + 1])
        lens = [length + 1 for length in self.LENGTHS]
        return ForwardBatch.decode([0] * len(lens), lens, self.row_of, slots, CPU)

    def qkv(self, num_tokens: int) -> list[torch.Tensor]:
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        return [torch.randn(num_tokens, n, HEAD_DIM, dtype=BF16) for n in heads]

    def check(self, batch: ForwardBatch, backend, own: ForwardBatch | None = None) -> None:
        """Every layer of `backend`, on `own` batch if it pads one, gives what torch's gives on `batch`."""
        own = own or batch
        backend.init_forward_metadata(own)
        self.wanted.init_forward_metadata(batch)
        for layer in self.layers:
            qkv = self.qkv(own.num_tokens)
            ours = backend.forward(*qkv, layer, own)[: batch.num_tokens]
            wanted = self.wanted.forward(*(part[: batch.num_tokens] for part in qkv), layer, batch)
            torch.testing.assert_close(ours, wanted, atol=0.02, rtol=0.02)


def test_prompts_after_prefixes_of_all_lengths(case: Case) -> None:
    case.check(case.extend([3, 9, 1, 2, 7, 12]), case.ours)


def test_eager_decode(case: Case) -> None:
    case.check(case.decode(), case.ours)


def test_decode_planned_for_a_graph_with_padding(case: Case) -> None:
    graphs = case.ours.for_graphs([2, 8])
    inputs = StaticDecodeBatch(8, CPU)
    for size in (2, 8):  # the capture: every size on padding
        padding = inputs.view(size, [1] * size)
        graphs.init_forward_metadata(padding)
        for layer in case.layers:
            graphs.forward(*case.qkv(size), layer, padding)
    batch = case.decode()
    case.check(batch, graphs, inputs.fill(batch, 8))


@pytest.mark.parametrize(("mode", "lengths"), [(ForwardMode.DECODE, [1]), (ForwardMode.EXTEND, [20, 1])])
def test_dummy_batches_attend_within_the_padding_row(
    case: Case, mode: ForwardMode, lengths: list[int]
) -> None:
    batch = ForwardBatch.dummy(mode, lengths, torch.zeros(sum(lengths), dtype=torch.int64))
    case.ours.init_forward_metadata(batch)
    for layer in case.layers:
        assert case.ours.forward(*case.qkv(batch.num_tokens), layer, batch).isfinite().all()


def test_an_idle_batch_is_neither_planned_nor_attended(case: Case) -> None:
    batch = ForwardBatch.idle(CPU)
    case.ours.init_forward_metadata(batch)
    assert case.ours.forward(*case.qkv(0), case.layers[0], batch).shape == (0, NUM_HEADS * HEAD_DIM)
