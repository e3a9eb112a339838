"""The GPU runners as far as a CPU shows them: arguments, layouts, refusals, and torch_grouped's arithmetic."""

import dataclasses

import pytest
import torch

from sglang.srt.layers.moe import flashinfer_cutlass, registry, torch_grouped
from sglang.srt.layers.moe.activation import MoEActivation
from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.flashinfer_cutlass import CutlassKernels, FlashInferCutlassMoERunner
from sglang.srt.layers.moe.reference import IMPLEMENTATIONS, ReferenceMoE, ReferenceMoERunner
from sglang.srt.layers.moe.torch_grouped import TorchGroupedMoERunner
from support.fake_cutlass import FakeKernels
from support.moe_reference import float32_moe, moe_inputs, moe_weights, relative_error

CPU = torch.device("cpu")
SHAPE = MoEShape(
    hidden_size=32,
    intermediate_size=16,
    num_experts=8,
    num_local_experts=8,
    top_k=2,
    dtype=torch.float32,
    max_num_tokens=4096,
)
SECOND_OF_TWO = dataclasses.replace(SHAPE, num_local_experts=4, ep_size=2, ep_rank=1, tp_size=2, tp_rank=1)

GPT_OSS = dataclasses.replace(SHAPE, activation=MoEActivation(1.702, 1.0, 0.75), has_bias=True)
GPT_OSS_SECOND = dataclasses.replace(GPT_OSS, num_local_experts=4, ep_size=2, ep_rank=1, tp_size=2, tp_rank=1)


def run(runner, shape, num_tokens, seed=0):
    inputs = (*moe_inputs(shape, num_tokens, CPU, seed), *moe_weights(shape, CPU))
    return runner.run(*inputs), float32_moe(shape, *inputs)


@pytest.mark.parametrize("shape", [SHAPE, SECOND_OF_TWO])
def test_flashinfer_runner_hands_its_rank_and_buffers_to_the_op(shape):
    fake = FakeKernels(SHAPE)
    runner = FlashInferCutlassMoERunner(shape, CPU, fake.kernels())
    out, expected = run(runner, shape, 5)
    torch.testing.assert_close(out, expected)
    call = fake.calls[0]
    assert (call["tp_size"], call["tp_rank"]) == (shape.tp_size, shape.tp_rank)
    assert (call["ep_size"], call["ep_rank"]) == (shape.ep_size, shape.ep_rank)
    assert call["tune_max_num_tokens"] == shape.max_num_tokens
    assert call["use_fused_finalize"] is True
    assert call["workspace_buffer"].dtype is torch.uint8
    assert call["workspace_buffer"].numel() == FakeKernels.WORKSPACE_BYTES


def test_the_workspace_is_allocated_once_for_the_largest_call():
    fake = FakeKernels(SHAPE)
    runner = FlashInferCutlassMoERunner(SECOND_OF_TWO, CPU, fake.kernels())
    run(runner, SECOND_OF_TWO, 3)
    run(runner, SECOND_OF_TWO, 7)
    (sizes, options), *more = fake.sized_for
    assert sizes == (4096, 32, 16, 8, 2) and not more, (
        "tokens, hidden, shard of an expert, all experts, top-k"
    )
    assert options["x_dtype"] is options["weight_dtype"] is options["output_dtype"] is torch.float32
    assert fake.calls[0]["workspace_buffer"] is fake.calls[1]["workspace_buffer"]


def test_deterministic_inference_keeps_atomics_out_of_the_sum_over_experts():
    fake = FakeKernels(SHAPE)
    runner = FlashInferCutlassMoERunner(SHAPE, CPU, fake.kernels(), deterministic=True)
    run(runner, SHAPE, 2)
    assert fake.calls[0]["use_fused_finalize"] is False
    assert fake.sized_for[0][1]["use_fused_finalize"] is False


def test_a_flashinfer_without_workspaces_is_called_without_one():
    fake = FakeKernels(SHAPE)
    run(FlashInferCutlassMoERunner(SHAPE, CPU, fake.kernels(with_workspace=False)), SHAPE, 2)
    assert "workspace_buffer" not in fake.calls[0]


def test_the_installed_flashinfer_takes_the_arguments_that_the_runner_passes():
    import inspect

    fake = FakeKernels(SHAPE)
    run(FlashInferCutlassMoERunner(SHAPE, CPU, fake.kernels()), SHAPE, 2)
    kernels = CutlassKernels.load()
    inspect.signature(kernels.fused_moe).bind(*range(6), **fake.calls[0])
    if kernels.workspace_size is not None:
        sizes, options = fake.sized_for[0]
        inspect.signature(kernels.workspace_size).bind(*sizes, **options)


def test_what_the_profiler_will_take_is_reserved():
    runner = FlashInferCutlassMoERunner(SHAPE, CPU, FakeKernels(SHAPE).kernels())
    routed_rows, row_bytes = 4096 * 2, 4 * (32 + 3 * 16)
    assert runner.reserved_bytes() > routed_rows * row_bytes
    assert TorchGroupedMoERunner(SHAPE, CPU).reserved_bytes() == 0


@pytest.mark.parametrize("shape", [GPT_OSS, GPT_OSS_SECOND])
@pytest.mark.parametrize("backend", ["reference", "torch_grouped", "flashinfer_cutlass"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_every_runner_adds_biases_and_takes_the_activation_of_gpt_oss(shape, backend, num_tokens):
    if backend == "flashinfer_cutlass":
        runner = FlashInferCutlassMoERunner(shape, CPU, FakeKernels(SHAPE).kernels())
    else:
        runner = registry.create_moe_runner(backend, shape)
    out, expected = run(runner, shape, num_tokens)
    torch.testing.assert_close(out, expected)
    without_bias = float32_moe(shape, *moe_inputs(shape, num_tokens, CPU), *moe_weights(shape, CPU)[:2])
    assert relative_error(without_bias, expected) > 0.1


@pytest.mark.parametrize("shape", [GPT_OSS, GPT_OSS_SECOND])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_every_reference_implementation_computes_the_experts_of_gpt_oss(shape, num_tokens):
    runner, (hidden, ids, scales) = ReferenceMoERunner(shape), moe_inputs(shape, num_tokens, CPU)
    weights = moe_weights(shape, CPU)
    expected = float32_moe(shape, hidden, ids, scales, *weights)
    inputs = [hidden, runner.shape.local_expert_ids(ids), scales, *weights]
    tactics = [(one, tactic) for one in runner.op.runners for tactic in range(len(one.implementations))]
    assert len(tactics) == len(IMPLEMENTATIONS)
    for one, tactic in tactics:
        torch.testing.assert_close(one.forward(inputs, tactic), expected)


def test_records_of_other_experts_have_other_keys_and_those_of_plain_ones_keep_theirs():
    plain, hidden = ReferenceMoE(), torch.zeros(3, 32)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), moe_weights(GPT_OSS, CPU)
    without = [hidden, ids, torch.zeros(3, 2), *weights[:2]]
    assert plain.get_cache_key_extras(without) == ("torch.float32", 2)
    extras = {
        plain.get_cache_key_extras(without),
        plain.get_cache_key_extras([*without, *weights[2:]]),
        ReferenceMoE(GPT_OSS.activation).get_cache_key_extras(without),
        ReferenceMoE(dataclasses.replace(GPT_OSS.activation, limit=None)).get_cache_key_extras(without),
    }
    assert len(extras) == 4


def test_the_installed_flashinfer_takes_the_arguments_of_gpt_oss():
    import inspect

    fake = FakeKernels(SHAPE)
    run(FlashInferCutlassMoERunner(GPT_OSS, CPU, fake.kernels()), GPT_OSS, 2)
    assert {name for name in fake.calls[0] if name.startswith(("swiglu", "fc"))} == {
        *("fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    }
    inspect.signature(CutlassKernels.load().fused_moe).bind(*range(6), **fake.calls[0])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64])
def test_torch_grouped_equals_the_reference(num_tokens):
    out, expected = run(TorchGroupedMoERunner(SHAPE, CPU), SHAPE, num_tokens)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_torch_grouped_adds_up_its_own_experts_only(ep_rank):
    shape = dataclasses.replace(SHAPE, num_local_experts=4, ep_size=2, ep_rank=ep_rank)
    out, expected = run(TorchGroupedMoERunner(shape, CPU), shape, 9)
    torch.testing.assert_close(out, expected)


def test_rows_that_the_grouped_product_leaves_undefined_reach_no_token():
    shape = dataclasses.replace(SHAPE, num_local_experts=4, ep_size=2)
    runner = TorchGroupedMoERunner(shape, CPU)
    product = runner._product

    def with_garbage(rows, weights, ends):  # as on a GPU, where the rest of the buffer is what it was
        out = product(rows, weights, ends)
        out[int(ends[-1]) :] = float("nan")
        return out

    runner._product = with_garbage
    out, expected = run(runner, shape, 9)
    torch.testing.assert_close(out, expected)


def test_torch_grouped_in_bfloat16_stays_close_to_float32():
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    out, expected = run(TorchGroupedMoERunner(shape, CPU), shape, 33)
    assert out.dtype is torch.bfloat16
    assert relative_error(out, expected) < 1e-2


def test_the_grouped_product_of_this_torch_computes_what_the_loop_does():
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    w13 = moe_weights(shape, CPU).w13
    rows = torch.randn(10, 32, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3, 3, 5, 8, 8, 8, 10], dtype=torch.int32)
    actual = torch_grouped._grouped_on_gpu()(rows, w13, ends)
    torch.testing.assert_close(actual, torch_grouped._grouped_by_loop(rows, w13, ends))


@pytest.mark.parametrize("backend", ["reference", "torch_grouped"])
def test_the_registry_builds_runners_under_their_flag_names(backend):
    runner = registry.create_moe_runner(backend, SHAPE)
    assert runner.name == backend
    assert (runner.op_names == ()) == (backend == "torch_grouped"), (
        "nothing to tune without FlashInfer's tuner"
    )


def test_flashinfer_on_a_cpu_is_refused_by_the_flags_name():
    with pytest.raises(ValueError, match="--moe-runner-backend flashinfer_cutlass needs a GPU"):
        registry.create_moe_runner("flashinfer_cutlass", SHAPE)


def test_an_old_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda = torch.device("cuda", 0)
    for backend in ("flashinfer_cutlass", "torch_grouped"):
        with pytest.raises(
            ValueError, match=rf"{backend} needs compute capability 9.0 .* has 8.0: use"
        ) as error:
            registry.create_moe_runner(backend, SHAPE, device=cuda)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [({"dtype": torch.float32}, "set --dtype bfloat16"), ({"intermediate_size": 12}, "multiple of 8")],
)
def test_shapes_without_a_kernel_are_refused(monkeypatch, changes, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = dataclasses.replace(SHAPE, **{"dtype": torch.bfloat16, **changes})
    with pytest.raises(ValueError, match=words):
        flashinfer_cutlass.check_supported(shape, torch.device("cuda", 0))


def test_a_missing_flashinfer_is_refused_when_named_and_replaced_when_not(monkeypatch, caplog):
    def missing():
        raise ValueError("--moe-runner-backend flashinfer_cutlass: FlashInfer cannot be imported")

    monkeypatch.setattr(flashinfer_cutlass, "check_supported", lambda shape, device: None)
    monkeypatch.setattr(CutlassKernels, "load", missing)
    with pytest.raises(ValueError, match="cannot be imported"):
        registry.create_moe_runner("flashinfer_cutlass", SHAPE)
    with caplog.at_level("WARNING"):
        runner = registry.create_moe_runner("flashinfer_cutlass", SHAPE, may_fall_back=True)
    assert runner.name == "torch_grouped"
    assert [record.getMessage() for record in caplog.records] == [
        "MoE runs on torch_grouped, untuned: --moe-runner-backend flashinfer_cutlass: FlashInfer cannot be imported"
    ]


def test_a_module_that_does_not_load_is_one_clear_line(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("ninja failed\nwith pages of output")

    monkeypatch.setattr(flashinfer_cutlass, "check_supported", lambda shape, device: None)
    monkeypatch.setattr(CutlassKernels, "load", lambda: CutlassKernels(broken, broken))
    with pytest.raises(ValueError, match="neither loads nor builds .ninja failed.; install") as error:
        FlashInferCutlassMoERunner.create(SHAPE, CPU)
    assert "\n" not in str(error.value)
