"""Flags and variables of MegaMoE: what implies what, what is refused, and what limits follow."""

from __future__ import annotations

import logging

import pytest
import torch

from sglang.srt.autotune.ops import MEGAMOE_OP, asks_the_tuner, tunable_ops
from sglang.srt.autotune.plan import capacity_ladder, make_plan
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.environ import envs, unknown_megamoe_variables, warn_of_unknown_megamoe_variables
from sglang.srt.layers.fused_moe import moe_shape
from sglang.srt.layers.moe.megamoe import MegaMoERunner
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.limits import derive_limits
from sglang.srt.server_args import ServerArgs, prepare_server_args

FOUR = ["--tp-size", "4", "--attn-dp-size", "4", "--ep-size", "4"]


def builtin(args: ServerArgs) -> ModelConfig:
    return ModelConfig.from_path(
        args.model_path, overrides={}, dtype="float32", context_length=None, quantization=args.quantization
    )


@pytest.mark.parametrize("name", ["flashinfer_megamoe", "reference_megamoe"])
@pytest.mark.parametrize("flag", ["--moe-runner-backend", "--moe-a2a-backend"])
def test_either_flag_implies_the_other(flag, name):
    args = prepare_server_args([flag, name, *FOUR])
    device = "cpu" if name == "reference_megamoe" else "cuda"
    assert args.moe_runner_backend_on(device) == name and args.uses_megamoe
    both = prepare_server_args(["--moe-runner-backend", name, "--moe-a2a-backend", name, *FOUR])
    assert both.megamoe_backend == name


def test_other_runners_leave_the_exchange_to_collectives():
    args = prepare_server_args(["--moe-a2a-backend", "none", "--moe-runner-backend", "reference"])
    assert not args.uses_megamoe and args.moe_runner_backend_on("cpu") == "reference"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--moe-a2a-backend", "none"], "leave --moe-a2a-backend none out"),
        (
            ["--moe-a2a-backend", "flashinfer_megamoe", "--moe-runner-backend", "reference"],
            "one kernel with the experts",
        ),
        (["--tp-size", "4", "--ep-size", "4"], "--attn-dp-size must equal --tp-size .got 1 and 4."),
        (
            ["--tp-size", "4", "--attn-dp-size", "4"],
            "--ep-size must equal --tp-size x --pp-size .got 1 and 4.",
        ),
        ([*FOUR, "--pp-size", "2"], "--ep-size must equal --tp-size x --pp-size .got 4 and 8."),
        (["--device", "cpu"], "needs a GPU: use reference_megamoe with --device cpu"),
        (
            ["--device", "cuda", "--moe-runner-backend", "reference_megamoe"],
            "use flashinfer_megamoe with --device cuda",
        ),
    ],
)
def test_what_megamoe_cannot_do_is_refused_with_the_flags_and_the_remedy(argv, message):
    with pytest.raises(ValueError, match=message):
        prepare_server_args(["--moe-runner-backend", "flashinfer_megamoe", *argv])


def test_tokens_stay_on_their_ranks_so_the_largest_forward_is_one_ranks():
    argv = [*FOUR, "--max-running-requests", "64", "--chunked-prefill-size", "4096"]
    argv += ["--cuda-graph-max-bs-decode", "64", "--moe-runner-backend", "flashinfer_megamoe"]
    args = prepare_server_args(argv)
    limits = derive_limits(args, builtin(args), "cuda")
    assert limits.moe_gather == 1 and limits.max_op_tokens == 1024
    assert limits.decode_batch_sizes == (1, 2, 4, 8, 12, 16)
    assert capacity_ladder(limits) == (1, 2, 4, 8, 16, 1024)


def test_a_plan_without_ops_of_the_tuner_has_capacities_alone():
    args = prepare_server_args(["--device", "cpu", "--moe-runner-backend", "reference_megamoe"])
    ops = tunable_ops(args.moe_runner_backend_on("cpu"))
    assert ops == (MEGAMOE_OP,) and not asks_the_tuner(ops)
    plan = make_plan(derive_limits(args, builtin(args), "cpu"), include_steps=False)
    assert plan.steps == () and plan.capacities[0] == 1


def create(args: ServerArgs, **changes) -> MegaMoERunner:
    config = builtin(args)
    limits = derive_limits(args, config, "cpu")
    shape = moe_shape(config, ParallelState.single(), torch.float32, limits.max_op_tokens)
    runner = create_moe_runner("reference_megamoe", shape, **changes)
    assert isinstance(runner, MegaMoERunner)
    return runner


def test_the_bootstrap_capacity_is_the_variables_or_the_largest_forward():
    args = prepare_server_args(["--device", "cpu", "--chunked-prefill-size", "512"])
    assert create(args).profiles.bootstrap_capacity == 512
    with envs.SGLANG_FLASHINFER_MEGAMOE_MAX_TOKENS_PER_RANK.override(96):
        assert create(args).profiles.bootstrap_capacity == 96


def test_a_kernel_that_is_not_for_this_device_is_refused():
    args = prepare_server_args(["--device", "cpu"])
    config = builtin(args)
    shape = moe_shape(config, ParallelState.single(), torch.float32, 64)
    with pytest.raises(ValueError, match="flashinfer_megamoe needs a GPU: use reference_megamoe"):
        create_moe_runner("flashinfer_megamoe", shape)


def test_an_unknown_megamoe_variable_is_warned_about_once(monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_FLASHINFER_MEGAMOE_MAX_TOKEN_PER_RANK", "8")
    monkeypatch.setenv("SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE", "bf16")
    assert unknown_megamoe_variables() == ["SGLANG_FLASHINFER_MEGAMOE_MAX_TOKEN_PER_RANK"]
    with caplog.at_level(logging.WARNING):
        warn_of_unknown_megamoe_variables()
        warn_of_unknown_megamoe_variables()
    assert caplog.text.count("MAX_TOKEN_PER_RANK is set, and this version knows no such variable") == 1
