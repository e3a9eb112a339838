"""The MoE runners on a GPU: right at and beside the edges of buckets, tuned and not, eager and from a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.bench.one_layer import OneLayer, OneLayerHost, tune
from sglang.srt.autotune.plan import Limits, bucket_of
from sglang.srt.layers.moe.base import MoEShape, op_inputs
from sglang.srt.layers.moe.registry import create_moe_runner
from support.moe_reference import float32_moe, relative_error

pytestmark = pytest.mark.native

#: One grid for the whole process: FlashInfer keeps it in a class of its own.
MAX_NUM_TOKENS = 2048
TOKEN_COUNTS = [1, 2, 8, 64, 256, 1023, 1024, 1025, 2001]
TOLERANCE = 1e-2


def shape(**changes: int) -> MoEShape:
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_experts": 32,
        "num_local_experts": 32,
        "top_k": 4,
        "max_num_tokens": MAX_NUM_TOKENS,
        **changes,
    }
    return MoEShape(dtype=torch.bfloat16, **sizes)


def sampled(num_tokens: int) -> list[int]:
    return sorted(
        {0, num_tokens // 3, num_tokens // 2, num_tokens - 2, num_tokens - 1} & set(range(num_tokens))
    )


@pytest.fixture(scope="module")
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def clean_tuner() -> Iterator[None]:
    flashinfer_api.forget_everything()
    yield
    flashinfer_api.forget_everything()


def error_of(layer: OneLayer, num_tokens: int, out: torch.Tensor | None = None) -> float:
    inputs = layer.inputs(num_tokens)
    rows = sampled(num_tokens)
    expected = float32_moe(layer.shape, *inputs, *layer.weights, rows=rows)
    return relative_error((layer.run(inputs) if out is None else out)[rows], expected)


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "triton_grouped", "torch_grouped", "portfolio"])
@pytest.mark.parametrize("ep_rank", [None, 0, 1])
def test_a_runner_equals_float32_at_every_token_count(device, clean_tuner, backend, ep_rank):
    ranks = {} if ep_rank is None else {"num_local_experts": 16, "ep_size": 2, "ep_rank": ep_rank}
    of_rank = shape(**ranks)
    layer = OneLayer(of_rank, create_moe_runner(backend, of_rank, device=device), device)
    errors = {num_tokens: error_of(layer, num_tokens) for num_tokens in TOKEN_COUNTS}
    assert max(errors.values()) < TOLERANCE, errors


def test_tuned_choices_are_right_too_and_every_lookup_finds_them(device, clean_tuner, tmp_path):
    layer = OneLayer(shape(), create_moe_runner("flashinfer_cutlass", shape(), device=device), device)
    report = tune(layer, MAX_NUM_TOKENS, tmp_path, decode_ceiling=64)
    assert report.status == "completed" and report.fallbacks == 0
    assert report.profiles_tuned == 2 * len(report.steps), "two GEMMs at each bucket"
    errors = {}
    with flashinfer_api.observed() as lookups:
        for num_tokens in TOKEN_COUNTS:
            errors[num_tokens] = error_of(layer, num_tokens)
    assert max(errors.values()) < TOLERANCE, errors
    assert not lookups.fallbacks
    assert any("default" not in text for step in report.steps for text in step.winners.values())


@pytest.mark.parametrize("ep_rank", [None, 0, 1])
def test_the_portfolio_is_right_whoever_wins_and_a_second_start_profiles_nothing(
    device, clean_tuner, tmp_path, ep_rank
):
    ranks = {} if ep_rank is None else {"num_local_experts": 16, "ep_size": 2, "ep_rank": ep_rank}
    of_rank = shape(**ranks)
    layer = OneLayer(of_rank, create_moe_runner("portfolio", of_rank, device=device), device)
    assert len(layer.runner.op.runners) == 3
    cold = tune(layer, 256, tmp_path, decode_ceiling=64)
    assert cold.status == "completed" and cold.fallbacks == 0 and not cold.warnings
    assert cold.profiles_tuned == 3 * len(cold.steps), "who serves, and FlashInfer's two products"
    for attempt in range(2):
        with flashinfer_api.observed() as lookups:
            errors = {n: error_of(layer, n) for n in TOKEN_COUNTS if n <= 256}
        assert max(errors.values()) < TOLERANCE, (errors, attempt)
        assert not lookups.fallbacks
        flashinfer_api.forget_everything()
        warm = tune(layer, 256, tmp_path, decode_ceiling=64)
        assert warm.profiles_tuned == 0 and warm.fallbacks == 0
        assert [step.winners for step in warm.steps] == [step.winners for step in cold.steps]


def test_each_implementation_of_the_portfolio_can_serve_a_graph(device, clean_tuner):
    layer = OneLayer(shape(), create_moe_runner("portfolio", shape(), device=device), device)
    inputs = layer.inputs(8)
    op = layer.runner.op
    of_op = op_inputs(shape(), *inputs, layer.weights)
    for runner in op.runners:
        tactic = runner.get_valid_tactics(of_op, None)[0]
        with flashinfer_api.observed():
            flashinfer_api.file_winner(op.name, runner, op.config, of_op, tactic)
            layer.run(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer.run(inputs)
        graph.replay()
        torch.cuda.synchronize(device)
        assert error_of(layer, 8, out) < TOLERANCE, type(runner).__name__


def test_a_second_start_profiles_nothing(device, clean_tuner, tmp_path):
    layer = OneLayer(shape(), create_moe_runner("flashinfer_cutlass", shape(), device=device), device)
    cold = tune(layer, 64, tmp_path, decode_ceiling=16)
    flashinfer_api.forget_everything()
    warm = tune(layer, 64, tmp_path, decode_ceiling=16)
    assert cold.profiles_tuned > 0 and warm.profiles_tuned == 0
    assert warm.fallbacks == 0 and warm.records.user == cold.records.tuned


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "triton_grouped", "torch_grouped", "portfolio"])
@pytest.mark.parametrize("num_tokens", [1, 8, 1025])
def test_a_runner_can_be_captured_and_follows_its_inputs(device, clean_tuner, backend, num_tokens):
    layer = OneLayer(shape(), create_moe_runner(backend, shape(), device=device), device)
    static = layer.inputs(num_tokens, seed=1)
    layer.run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(static)
    for buffer, fresh in zip(static, layer.inputs(num_tokens), strict=True):
        buffer.copy_(fresh)  # other tokens, other experts, the same memory
    graph.replay()
    torch.cuda.synchronize(device)
    assert error_of(layer, num_tokens, out) < TOLERANCE


def test_the_stages_probe_can_be_captured_with_either_choice(device, clean_tuner, tmp_path):
    layer = OneLayer(shape(), create_moe_runner("flashinfer_cutlass", shape(), device=device), device)
    tune(layer, 256, tmp_path, decode_ceiling=64)
    host = OneLayerHost(layer, Limits((64,), 64, 256))
    probe = host.op_probe(64)
    outputs = []
    for skipped in ((), host.op_names):
        with flashinfer_api.only_defaults(skipped):
            probe.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = probe.run()
        graph.replay()
        torch.cuda.synchronize(device)
        outputs.append(out.float().clone())
    rows, expected = probe.reference(16)
    for out in outputs:
        assert relative_error(out[rows], expected) < TOLERANCE


def test_deterministic_inference_gives_the_same_bits_again(device, clean_tuner):
    runner = create_moe_runner("flashinfer_cutlass", shape(), device=device, deterministic=True)
    layer = OneLayer(shape(), runner, device)
    inputs = layer.inputs(1025)
    first = layer.run(inputs).clone()
    assert all(torch.equal(first, layer.run(inputs)) for _ in range(3))


def test_the_workspace_holds_the_largest_call_and_no_call_allocates_more(device, clean_tuner):
    layer = OneLayer(shape(), create_moe_runner("flashinfer_cutlass", shape(), device=device), device)
    inputs = layer.inputs(MAX_NUM_TOKENS)
    out = layer.run(inputs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    layer.run(inputs)
    torch.cuda.synchronize(device)
    grown = torch.cuda.max_memory_allocated(device) - before
    assert grown < out.nbytes + (8 << 20), f"{grown / 2**20:.1f} MiB"


def test_the_grid_serves_counts_beside_its_edges_from_the_right_bucket():
    assert [bucket_of(n, MAX_NUM_TOKENS) for n in (1023, 1024, 1025, 2001)] == [1024, 1024, 1280, 2048]
