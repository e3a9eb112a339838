"""The engine on MegaMoE with one rank on the CPU: what tuned, skipped, disabled and deterministic starts open."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.fused_moe import moe_layers
from sglang.srt.layers.moe.megamoe import MegaMoERunner
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import prepare_server_args

FLAGS = (
    "--device",
    "cpu",
    "--max-running-requests",
    "4",
    "--chunked-prefill-size",
    "16",
    "--max-total-tokens",
    "512",
)


def start(*flags: str, backend: str = "reference_megamoe") -> ModelRunner:
    args = prepare_server_args([*FLAGS, "--moe-runner-backend", backend, *flags])
    config = ModelConfig.from_path(
        args.model_path, overrides={}, dtype="float32", context_length=128, quantization=args.quantization
    )
    return ModelRunner(args, config, ParallelState.single())


@pytest.fixture
def started():
    """Starts engines and closes their profiles with the test."""
    runners: list[ModelRunner] = []

    def remember(*flags: str, **options: str) -> ModelRunner:
        runners.append(start(*flags, **options))
        return runners[-1]

    yield remember
    for runner in runners:
        if isinstance(runner.moe_runner, MegaMoERunner):
            runner.moe_runner.profiles.close()


def hidden_of(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(num_tokens) * 7 % 251
    return runner.forward_hidden(ForwardBatch.dummy(ForwardMode.EXTEND, [num_tokens], ids))


def test_tuned_and_ordinary_engines_compute_the_same_and_open_what_they_should(started):
    tuned = started()
    assert tuned.moe_runner.profiles.capacities == (1, 2, 4, 16) and tuned.moe_runner.profiles.is_tuned
    assert tuned.autotune_report.megamoe["tuned"] == 4
    assert tuned.autotune_report.plan["capacities"] == [1, 2, 4, 16]
    expected = [hidden_of(tuned, n) for n in (1, 3, 16)]

    for flags in (
        ("--flashinfer-autotune-skip-ops", "flashinfer_megamoe"),
        ("--disable-flashinfer-autotune",),
        ("--enable-deterministic-inference",),
    ):
        ordinary = started(*flags)
        profiles = ordinary.moe_runner.profiles
        assert ordinary.autotune_report.status == "skipped", flags
        assert profiles.capacities == (16,) and not profiles.is_tuned
        for result, n in zip(expected, (1, 3, 16), strict=True):
            assert torch.equal(hidden_of(ordinary, n), result), "tuning changes the speed alone"


def test_megamoe_computes_what_the_ordinary_runner_computes(started):
    mega = started("--disable-flashinfer-autotune")
    plain = started("--disable-flashinfer-autotune", backend="reference")
    torch.testing.assert_close(hidden_of(mega, 9), hidden_of(plain, 9), rtol=1e-3, atol=1e-4)


def test_a_second_start_reuses_the_winners(started):
    started().moe_runner.profiles.close()
    again = started()
    report = again.autotune_report
    assert (report.megamoe["tuned"], report.megamoe["cached"]) == (0, 4)
    assert report.profiles_tuned == 0 and report.records.user == 4


def test_layers_hold_the_prepared_weights_themselves(started):
    runner = started("--disable-flashinfer-autotune")
    layers = moe_layers(runner.model)
    assert [layer.mega_owner for layer in layers] == list(range(len(layers)))
    for layer, weights in zip(layers, runner.moe_runner.profiles.weights, strict=True):
        assert layer.w13.data_ptr() == weights[0].data_ptr() and layer.w2.data_ptr() == weights[1].data_ptr()


def test_a_prompt_above_the_largest_workspace_is_an_error_with_both_numbers(started):
    runner = started()
    with pytest.raises(ValueError, match="17 tokens on one rank and the largest workspace holds 16"):
        hidden_of(runner, 17)
