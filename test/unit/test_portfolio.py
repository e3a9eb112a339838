"""The portfolio: which implementations it holds, that all answer one question, and how a choice among them serves."""

from __future__ import annotations

import builtins
import dataclasses
import sys

import pytest
import torch
from flashinfer.autotuner import AutoTuner, TunableRunner

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.ops import TUNABLE_OPS
from sglang.srt.layers.moe import flashinfer_cutlass, portfolio, registry
from sglang.srt.layers.moe.activation import MoEActivation
from sglang.srt.layers.moe.base import ExpertWeights, MoEShape, op_inputs, tuning_key
from sglang.srt.layers.moe.flashinfer_cutlass import CutlassKernels
from sglang.srt.layers.moe.portfolio import OP_NAME, PortfolioMoERunner, TritonGroupedMoERunner
from sglang.srt.server_args import ServerArgs
from support.fake_cutlass import FakeKernels
from support.moe_reference import float32_moe, moe_inputs, moe_weights

CPU = torch.device("cpu")
SHAPE = MoEShape(
    hidden_size=32,
    intermediate_size=16,
    num_experts=8,
    num_local_experts=8,
    top_k=2,
    dtype=torch.float32,
    max_num_tokens=64,
)
FIRST_OF_TWO = dataclasses.replace(SHAPE, num_local_experts=4, ep_size=2, ep_rank=0)
LAST_OF_TWO = dataclasses.replace(SHAPE, num_local_experts=4, ep_size=2, ep_rank=1)
GPT_OSS = dataclasses.replace(LAST_OF_TWO, activation=MoEActivation(1.702, 1.0, 0.75), has_bias=True)


class FakeTriton(TunableRunner):
    """Stands where the Triton kernels would; its tactics compile nothing and compute nothing."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.compiled: list[object] = []

    def get_cache_key_extras(self, inputs):
        return tuning_key(inputs, self.shape.activation)

    def get_valid_tactics(self, inputs, profile):
        return [("few", 1)]

    def compile_jobs(self, inputs, tactics):
        return [
            lambda tactic=tactic: self.compiled.append((inputs[0].shape[0], tactic)) for tactic in tactics
        ]

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        return torch.zeros_like(inputs[0])


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """All three implementations as a CPU can have them."""
    monkeypatch.setattr(flashinfer_cutlass, "check_supported", lambda shape, device: None)
    monkeypatch.setattr(CutlassKernels, "load", lambda: FakeKernels(SHAPE).kernels())
    monkeypatch.setattr(portfolio, "_triton_grouped", lambda shape, device: FakeTriton(shape))
    yield
    AutoTuner.get().clear_cache()


def names(runner) -> list[str]:
    return [type(one).__name__ for one in runner.op.runners]


def test_it_holds_all_implementations_and_the_one_that_needs_no_tuning_comes_first():
    runner = registry.create_moe_runner("portfolio", SHAPE)
    assert names(runner) == ["TorchGroupedMoE", "FlashInferCutlassMoE", "FakeTriton"]
    assert runner.op_names == PortfolioMoERunner.op_names + TUNABLE_OPS["portfolio"][1:]
    assert runner.op_names == TUNABLE_OPS["portfolio"]


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"tunes": False}])
def test_where_nothing_tunes_only_the_default_is_built(changes, monkeypatch):
    monkeypatch.setattr(
        CutlassKernels, "load", lambda: pytest.fail("FlashInfer's kernels are loaded for nothing")
    )
    runner = registry.create_moe_runner("portfolio", SHAPE, **changes)
    assert names(runner) == ["TorchGroupedMoE"] and runner.op_names == (OP_NAME,)


def refuse(words):
    def build(*args):
        raise ValueError(words)

    return build


def test_what_is_not_to_be_had_is_left_out_with_one_line_each(monkeypatch, caplog):
    monkeypatch.setattr(CutlassKernels, "load", refuse("FlashInfer's module does not load"))
    monkeypatch.setattr(portfolio, "_triton_grouped", refuse("no Triton"))
    runner = registry.create_moe_runner("portfolio", SHAPE)
    assert names(runner) == ["TorchGroupedMoE"] and runner.op_names == (OP_NAME,)
    assert [record.getMessage() for record in caplog.records] == [
        "The MoE portfolio is one implementation short: FlashInfer's module does not load",
        "The MoE portfolio is one implementation short: no Triton",
    ]


def test_without_any_implementation_the_first_reason_is_told(monkeypatch):
    monkeypatch.setattr(portfolio, "_torch_grouped", refuse("needs compute capability 9.0"))
    monkeypatch.setattr(CutlassKernels, "load", refuse("no FlashInfer"))
    monkeypatch.setattr(portfolio, "_triton_grouped", refuse("no Triton"))
    with pytest.raises(ValueError, match="needs compute capability 9.0"):
        registry.create_moe_runner("portfolio", SHAPE)


def test_a_flashinfer_that_cannot_be_imported_leaves_torch_where_nobody_named_the_portfolio(
    monkeypatch, caplog
):
    monkeypatch.delitem(sys.modules, "sglang.srt.layers.moe.portfolio")
    real = builtins.__import__

    def broken(name, *args, **kwargs):
        if name.startswith("flashinfer"):
            raise OSError("libcudart.so.13 is missing")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ValueError, match="libcudart.* or use --moe-runner-backend torch_grouped"):
        registry.create_moe_runner("portfolio", SHAPE)
    runner = registry.create_moe_runner("portfolio", SHAPE, may_fall_back=True)
    assert runner.name == "torch_grouped"
    assert "MoE runs on torch_grouped, untuned: FlashInfer cannot be imported" in caplog.text


@pytest.mark.parametrize("shape", [SHAPE, FIRST_OF_TWO, LAST_OF_TWO, GPT_OSS])
@pytest.mark.parametrize("chosen", [0, 1])
def test_each_implementation_computes_the_experts_of_this_rank(shape, chosen):
    runner = registry.create_moe_runner("portfolio", shape)
    hidden, ids, scales = moe_inputs(shape, 9, CPU)
    weights = moe_weights(shape, CPU)
    inputs = op_inputs(shape, hidden, ids, scales, weights)
    winner = runner.op.runners[chosen]
    flashinfer_api.file_winner(OP_NAME, winner, runner.op.config, inputs, winner.tactic)
    assert runner.op.choose(inputs) == (winner, winner.tactic)
    expected = float32_moe(shape, hidden, ids, scales, *weights)
    torch.testing.assert_close(runner.run(hidden, ids, scales, *weights), expected)


def test_all_implementations_answer_the_same_question():
    for shape in (SHAPE, GPT_OSS):
        runner = registry.create_moe_runner("portfolio", shape)
        inputs = op_inputs(shape, *moe_inputs(shape, 4, CPU), moe_weights(shape, CPU))
        assert len({one.get_cache_key_extras(inputs) for one in runner.op.runners}) == 1


def test_the_triton_kernels_answer_the_question_of_the_others():
    shape = dataclasses.replace(GPT_OSS, dtype=torch.bfloat16)
    inputs = op_inputs(shape, *moe_inputs(shape, 4, CPU), moe_weights(shape, CPU))
    grouped = pytest.importorskip("sglang.srt.layers.moe.triton_grouped")
    kernels = grouped.TritonGroupedMoE.__new__(grouped.TritonGroupedMoE)
    kernels.shape = shape
    assert kernels.get_cache_key_extras(inputs) == tuning_key(inputs, shape.activation)


def test_what_no_record_answers_is_served_by_torch():
    runner = registry.create_moe_runner("portfolio", SHAPE)
    inputs = op_inputs(SHAPE, *moe_inputs(SHAPE, 4, CPU), moe_weights(SHAPE, CPU))
    assert runner.op.choose(inputs) == (runner.op.runners[0], -1)


def test_the_kernels_that_a_choice_names_can_be_compiled_before_it_runs():
    runner = registry.create_moe_runner("portfolio", SHAPE)
    hidden, ids, scales = moe_inputs(SHAPE, 4, CPU)
    weights = moe_weights(SHAPE, CPU)
    assert runner.compile_jobs(hidden, ids, scales, weights) == [], "torch compiles nothing"
    kernels = runner.op.runners[2]
    inputs = op_inputs(SHAPE, hidden, ids, scales, weights)
    flashinfer_api.file_winner(OP_NAME, kernels, runner.op.config, inputs, ("few", 1))
    (job,) = runner.compile_jobs(hidden, ids, scales, weights)
    job()
    assert kernels.compiled == [(4, ("few", 1))]


@pytest.mark.parametrize("shape", [SHAPE, GPT_OSS])
def test_a_frozen_choice_is_the_tuners_at_every_number_of_tokens(shape):
    runner, weights = registry.create_moe_runner("portfolio", shape), moe_weights(shape, CPU)

    def inputs(num_tokens: int) -> list[torch.Tensor]:
        return op_inputs(shape, *moe_inputs(shape, num_tokens, CPU), weights)

    for num_tokens in (2, 16, 64):
        flashinfer_api.file_winner(
            OP_NAME, runner.op.runners[2], runner.op.config, inputs(num_tokens), ("few", 1)
        )
    expected = [runner.op.choose(inputs(n)) for n in range(1, 65)]
    assert 0 < sum(tactic == ("few", 1) for _, tactic in expected) < 64
    runner.freeze()
    asked: list[tuple[TunableRunner, object]] = []
    for one in runner.op.runners:
        one.forward = lambda inputs, tactic=-1, one=one, **rest: asked.append((one, tactic)) or inputs[0]
    for n in range(1, 65):
        runner.run(*moe_inputs(shape, n, CPU), *weights)
    assert asked == expected


def test_a_frozen_op_asks_the_tuner_nothing(monkeypatch):
    runner, weights = registry.create_moe_runner("portfolio", SHAPE), moe_weights(SHAPE, CPU)
    before = runner.run(*moe_inputs(SHAPE, 4, CPU), *weights)
    runner.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(AutoTuner, "get", lambda *args: pytest.fail("the tuner was asked"))
        assert torch.equal(runner.run(*moe_inputs(SHAPE, 4, CPU), *weights), before)


def test_memory_is_set_aside_for_what_is_kept_and_for_one_call():
    runner = registry.create_moe_runner("portfolio", SHAPE)
    kept = runner.op.runners[1].reserved_bytes()
    assert kept > 0
    assert runner.reserved_bytes() == kept + 64 * 2 * 3 * (32 + 16) * 4


def test_a_runner_alone_is_tuned_under_the_same_name():
    runner = registry.create_moe_runner("triton_grouped", SHAPE)
    assert isinstance(runner, TritonGroupedMoERunner) and names(runner) == ["FakeTriton"]
    assert runner.op_names == (OP_NAME,) == TUNABLE_OPS["triton_grouped"]


@pytest.mark.parametrize("shape", [FIRST_OF_TWO, LAST_OF_TWO])
def test_ids_of_this_ranks_experts_survive_being_counted_within_it(shape):
    ids = torch.arange(8, dtype=torch.int32).view(4, 2)
    local = shape.local_expert_ids(ids)
    first = shape.first_local_expert
    expected = [expert - first if first <= expert < first + 4 else 4 for expert in range(8)]
    assert local.flatten().tolist() == expected and local.dtype is torch.int32
    back = shape.global_expert_ids(local)
    assert back.dtype is torch.int32
    for expert, there in zip(range(8), back.flatten().tolist(), strict=True):
        if first <= expert < first + 4:
            assert there == expert
        else:
            assert 0 <= there < 8 and not first <= there < first + 4


# What auto means


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        ((9, 0), "bfloat16", "portfolio"),
        ((9, 0), "float16", "flashinfer_cutlass"),
        ((10, 0), "bfloat16", "flashinfer_cutlass"),
        ((12, 0), "bfloat16", "flashinfer_cutlass"),
        (None, None, "flashinfer_cutlass"),
    ],
)
def test_auto_is_the_portfolio_in_bfloat16_on_hopper(capability, dtype, backend):
    assert ServerArgs().moe_runner_backend_on("cuda", capability, dtype) == backend
    named = ServerArgs(moe_runner_backend="triton_grouped")
    assert named.moe_runner_backend_on("cuda", capability, dtype) == "triton_grouped"


@pytest.mark.parametrize("backend", ["portfolio", "triton_grouped"])
def test_kernels_of_a_gpu_are_refused_on_a_cpu(backend):
    with pytest.raises(ValueError, match=f"--moe-runner-backend {backend} needs a GPU"):
        ServerArgs(moe_runner_backend=backend, device="cpu")


def test_weights_are_handed_on_as_they_are():
    weights = moe_weights(SHAPE, CPU)
    inputs = op_inputs(SHAPE, *moe_inputs(SHAPE, 4, CPU), weights)
    assert inputs[3] is weights.w13 and inputs[4] is weights.w2 and len(inputs) == 5
    with_bias = ExpertWeights(*weights[:2], b13=torch.zeros(1), b2=torch.zeros(1))
    assert len(op_inputs(SHAPE, *moe_inputs(SHAPE, 4, CPU), with_bias)) == 7
