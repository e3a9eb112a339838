"""What is refused before any process starts."""

import pytest

from sglang.srt import launch_checks
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.launch_checks import check_launch, warn_of_unknown_ops
from sglang.srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """Stands where a machine without a GPU would."""
    monkeypatch.setattr(launch_checks, "has_nvidia_driver", lambda: False)


def check(**flags):
    args = ServerArgs(**flags)
    check_launch(args, read_model_config(args))


def test_a_gpu_that_is_not_there_is_named_at_once():
    with pytest.raises(ValueError, match="--device cuda: this machine shows no GPU"):
        check(device="cuda")


@pytest.mark.parametrize(
    "flags",
    [
        {"moe_runner_backend": "flashinfer_cutlass"},
        {"moe_runner_backend": "flashinfer_megamoe"},
        {"moe_a2a_backend": "flashinfer_megamoe"},
        {"attention_backend": "flashinfer"},
    ],
)
def test_gpu_kernels_need_a_gpu_also_where_the_device_is_left_out(flags):
    ((name, value),) = flags.items()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value} needs a GPU"):
        check(**flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 is not supported for Qwen3MoeForCausalLM"),
        (
            {"json_model_override_args": '{"architectures": ["LlamaForCausalLM"]}'},
            "architecture LlamaForCausalLM cannot be served",
        ),
        ({"json_model_override_args": '{"hidden_act": "gelu"}'}, "hidden_act gelu is not supported"),
        ({"tokenizer_path": "/no/such"}, "^--tokenizer-path /no/such: there is no such directory"),
        ({"tokenizer_path": __file__}, "^--tokenizer-path .* is a file"),
    ],
)
def test_what_no_worker_could_serve_is_refused_before_one_starts(flags, words):
    with pytest.raises(ValueError, match=words):
        check(**flags)


def test_the_cpu_and_auto_pass():
    check()
    check(device="cpu")
    check(moe_runner_backend="reference_megamoe", quantization="fp8")
    check(tokenizer_path="somebody/tokenizer")


def test_with_a_driver_nothing_is_assumed(monkeypatch):
    monkeypatch.setattr(launch_checks, "has_nvidia_driver", lambda: True)
    check(device="cuda")


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({}, ["sglang::meo", "flashinfer_megamoe"]),
        (
            {"moe_runner_backend": "reference"},
            ["sglang::meo", "flashinfer_megamoe", "trtllm::fused_moe::gemm1"],
        ),
        (
            {"moe_a2a_backend": "reference_megamoe"},
            ["sglang::moe", "sglang::meo", "trtllm::fused_moe::gemm1"],
        ),
    ],
)
def test_a_start_warns_of_skipped_ops_that_no_backend_of_these_flags_asks_for(caplog, flags, warned):
    names = ["sglang::moe", "sglang::meo", "flashinfer_megamoe", "trtllm::fused_moe::gemm1"]
    args = ServerArgs(flashinfer_autotune_skip_ops=names, **flags)
    warn_of_unknown_ops(args, args.moe_runner_backends)
    assert [record.args[0] for record in caplog.records] == warned


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("capability", [None, (9, 0), (10, 0)])
@pytest.mark.parametrize("name", ["auto", "torch_grouped", "reference_megamoe"])
def test_the_backend_of_every_device_is_among_those_that_a_start_checks(device, capability, name):
    args = ServerArgs(moe_runner_backend=name)
    assert args.moe_runner_backend_on(device, capability, "bfloat16") in args.moe_runner_backends
