"""gpt-oss on a GPU: windows and sinks against torch, its experts against float32, and an engine of two layers.

Where FlashInfer's attention with sinks is not prebuilt, the first test that wants it waits for the compiler, a minute
or two for each of two modules; with FLASHINFER_DISABLE_JIT=1 those tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.drive import Driver, build_runner
from sglang.srt.autotune.bench.geometry import GPT_OSS_20B, shape_of, write_config
from sglang.srt.autotune.bench.one_layer import OneLayer, tune
from sglang.srt.layers.attention import flashinfer_sinks
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.attention.flashinfer import FlashInferAttention
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool
from sglang.srt.model_executor.decode_graphs import CudaGraphCapture, StaticDecodeBatch
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.server_args import ServerArgs
from support.moe_reference import float32_moe, relative_error

pytestmark = pytest.mark.native

BF16 = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128
LENGTHS = [0, 1, 126, 127, 128, 129, 700, 2500]
MAX_NUM_TOKENS = 1024


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.cuda.set_device(0)
    flashinfer_api.forget_everything()
    with torch.inference_mode():
        yield
    flashinfer_api.forget_everything()


class Attention:
    """A layer with the window and one without, both with sinks, over sequences in scattered slots."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda", 0)
        sizes = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        self.layers = [
            AttentionLayer(i, *sizes, window, torch.randn(NUM_HEADS, device=self.device))
            for i, window in enumerate((WINDOW, None))
        ]
        total = sum(LENGTHS) + 2000
        self.pool = KVPool(total, 1, 2, NUM_KV_HEADS, HEAD_DIM, BF16, self.device)
        for layer in range(2):
            self.pool.k(layer).normal_()
            self.pool.v(layer).normal_()
        self.rows = ReqToTokenPool(len(LENGTHS), 4096, self.device)
        rows = self.rows.alloc(len(LENGTHS))
        assert rows is not None
        self.row_of, self._slots = rows, torch.randperm(total) + 1
        for row, length in zip(rows, LENGTHS, strict=True):
            self.rows.write(row, 0, self.take(length))
        self.ours = FlashInferAttention(self.rows, self.pool, NUM_HEADS, BF16, layers=self.layers)
        self.wanted = TorchNativeAttention(self.rows, self.pool)

    def take(self, num_slots: int) -> torch.Tensor:
        slots, self._slots = self._slots[:num_slots], self._slots[num_slots:]
        return slots

    def extend(self, new: list[int]) -> ForwardBatch:
        slots = [self.take(length) for length in new]
        for row, length, part in zip(self.row_of, LENGTHS, slots, strict=True):
            self.rows.write(row, length, part)
        ids = torch.zeros(sum(new), dtype=torch.int64, device=self.device)
        return ForwardBatch.extend(ids, new, LENGTHS, self.row_of, torch.cat(slots), self.device)

    def decode(self) -> ForwardBatch:
        slots = self.take(len(LENGTHS))
        for i, (row, length) in enumerate(zip(self.row_of, LENGTHS, strict=True)):
            self.rows.write(row, length, slots[i : i + 1])
        lens = [length + 1 for length in LENGTHS]
        return ForwardBatch.decode([0] * len(lens), lens, self.row_of, slots, self.device)

    def qkv(self, num_tokens: int) -> list[torch.Tensor]:
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        return [torch.randn(num_tokens, n, HEAD_DIM, dtype=BF16, device=self.device) for n in heads]

    def expected(self, batch: ForwardBatch, layer: AttentionLayer, qkv: list[torch.Tensor]) -> torch.Tensor:
        self.wanted.init_forward_metadata(batch)
        return self.wanted.forward(*qkv, layer, batch).float()


@pytest.fixture(params=["in the kernel", "afterwards"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attention:
    if request.param == "afterwards":
        monkeypatch.setattr(flashinfer_sinks, "WRAPPER", "NoSuchWrapper")
    case = Attention()
    if request.param == "in the kernel" and case.ours._kernels.sinks is None:
        pytest.skip("FlashInfer's attention with sinks can neither be loaded nor compiled here")
    return case


def test_prompts_see_their_window_and_lose_weight_to_the_sinks(attention: Attention) -> None:
    batch = attention.extend([300, 129, 1, 2, 3, 128, 127, 64])
    attention.ours.init_forward_metadata(batch)
    for layer in attention.layers:
        qkv = attention.qkv(batch.num_tokens)
        ours = attention.ours.forward(*qkv, layer, batch)
        assert relative_error(ours, attention.expected(batch, layer, qkv)) < 0.01


def test_decode_eager_and_replayed_from_a_graph(attention: Attention) -> None:
    batch = attention.decode()
    attention.ours.init_forward_metadata(batch)
    size, device = 16, attention.device
    graphs = attention.ours.for_graphs([size])
    capture = CudaGraphCapture(device)
    for layer in attention.layers:
        # A new one for each layer: a used one holds the lengths of its last batch, not the padding's.
        inputs = StaticDecodeBatch(size, device)
        static, out = attention.qkv(size), torch.zeros(size, NUM_HEADS * HEAD_DIM, dtype=BF16, device=device)
        padding = inputs.view(size, [1] * size)
        graphs.init_forward_metadata(padding)

        def run(static=static, out=out, layer=layer, padding=padding) -> None:
            out.copy_(graphs.forward(*static, layer, padding))

        replay = capture(run)
        qkv = attention.qkv(batch.num_tokens)
        eager = attention.ours.forward(*qkv, layer, batch)
        expected = attention.expected(batch, layer, qkv)
        assert relative_error(eager, expected) < 0.01
        for buffer, values in zip(static, qkv, strict=True):
            buffer[: batch.num_tokens].copy_(values)
        graphs.init_forward_metadata(inputs.fill(batch, size))
        replay()
        torch.cuda.synchronize(device)
        assert relative_error(out[: batch.num_tokens], expected) < 0.01


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "torch_grouped"])
def test_the_experts_equal_float32(backend: str) -> None:
    device, shape = torch.device("cuda", 0), shape_of(GPT_OSS_20B, MAX_NUM_TOKENS)
    layer = OneLayer(shape, create_moe_runner(backend, shape, device=device), device)
    layer.weights.b13.mul_(50), layer.weights.b2.mul_(50)  # large enough to be missed
    errors = {}
    for num_tokens in (1, 8, 257, 1024):
        inputs, rows = layer.inputs(num_tokens), sorted({0, num_tokens // 2, num_tokens - 1})
        expected = float32_moe(shape, *inputs, *layer.weights, rows=rows)
        errors[num_tokens] = relative_error(layer.run(inputs)[rows], expected)
    assert max(errors.values()) < 1e-2, errors


def test_the_stage_tunes_the_experts_and_a_second_start_profiles_nothing(tmp_path: Path) -> None:
    device, shape = torch.device("cuda", 0), shape_of(GPT_OSS_20B, MAX_NUM_TOKENS)
    layer = OneLayer(shape, create_moe_runner("flashinfer_cutlass", shape, device=device), device)
    cold = tune(layer, MAX_NUM_TOKENS, tmp_path, decode_ceiling=64)
    assert cold.status == "completed" and cold.fallbacks == 0
    assert cold.profiles_tuned == 2 * len(cold.steps), "two GEMMs at each bucket"
    flashinfer_api.forget_everything()
    warm = tune(layer, MAX_NUM_TOKENS, tmp_path, decode_ceiling=64)
    assert warm.profiles_tuned == 0 and warm.fallbacks == 0
    inputs, rows = layer.inputs(257), [0, 128, 256]
    expected = float32_moe(shape, *inputs, *layer.weights, rows=rows)
    assert relative_error(layer.run(inputs)[rows], expected) < 1e-2


def test_an_engine_of_two_layers_agrees_with_torch_on_the_same_weights(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", GPT_OSS_20B, num_hidden_layers=2)
    flags = {
        "model_path": str(model),
        "load_format": "dummy",
        "device": "cuda",
        "context_length": 2048,
        "max_running_requests": 8,
        "chunked_prefill_size": MAX_NUM_TOKENS,
        "max_total_tokens": 8192,
    }
    logits = {}
    for name, more in {
        "ours": {},
        "torch": {
            "disable_flashinfer_autotune": True,
            "disable_cuda_graph": True,
            "attention_backend": "torch_native",
            "moe_runner_backend": "torch_grouped",
        },
    }.items():
        runner = build_runner(ServerArgs(**flags, **more))
        assert runner.autotune_report.status == ("completed" if name == "ours" else "skipped")
        driver = Driver(runner)
        prompt = [(7 * i) % 200_000 for i in range(700)]
        logits[name] = [runner.forward(driver.prefill([prompt])).clone()]
        driver.release()
        batch = driver.decode(5, 300)
        logits[name].append(runner.forward_hidden(batch).isfinite().all())
        del runner, driver
        torch.cuda.empty_cache()
    assert relative_error(logits["ours"][0], logits["torch"][0]) < 0.03
    assert all(finite for _, finite in logits.values())
