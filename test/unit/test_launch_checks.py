"""What is refused before any process starts."""

import pytest

from sglang.srt import launch_checks
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.launch_checks import check_launch
from sglang.srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """Stands where a machine without a GPU would."""
    monkeypatch.setattr(launch_checks, "has_nvidia_driver", lambda: False)


def check(**flags):
    args = ServerArgs(**flags)
    check_launch(args, ModelConfig.from_path(args.model_path))


def test_a_gpu_that_is_not_there_is_named_at_once():
    with pytest.raises(ValueError, match="--device cuda: this machine shows no GPU"):
        check(device="cuda")


@pytest.mark.parametrize(
    "flags", [{"moe_runner_backend": "flashinfer_cutlass"}, {"attention_backend": "flashinfer"}]
)
def test_gpu_kernels_need_a_gpu_also_where_the_device_is_left_out(flags):
    with pytest.raises(ValueError, match="needs a GPU"):
        check(**flags)


def test_the_cpu_and_auto_pass():
    check()
    check(device="cpu")


def test_with_a_driver_nothing_is_assumed(monkeypatch):
    monkeypatch.setattr(launch_checks, "has_nvidia_driver", lambda: True)
    check(device="cuda")
