"""What a machine without a GPU or weights knows of gpt-oss: flags parse, starts are planned, records told apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sglang import bench_serving
from sglang.cli.autotune import main as autotune
from sglang.srt.autotune_config import identity_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs, prepare_server_args

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
SIZES = {"gpt_oss_20b": (24, 32), "gpt_oss_120b": (36, 128)}


def test_the_published_commands_parse_as_they_are() -> None:
    args = prepare_server_args(["--model-path", "openai/gpt-oss-120b"])
    assert args.model_path == "openai/gpt-oss-120b" and not args.disable_flashinfer_autotune
    untuned = prepare_server_args(["--model", "openai/gpt-oss-120b", "--disable-flashinfer-autotune"])
    assert untuned.disable_flashinfer_autotune
    load = "--backend sglang --dataset-name random --random-input-len 1024 --random-output-len 1024 --num-prompts 2560"
    parsed = bench_serving.parser().parse_args([*load.split(), "--max-concurrency", "512"])
    assert (parsed.num_prompts, parsed.max_concurrency) == (2560, 512)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_read_whole(name: str) -> None:
    config = ModelConfig.from_path(str(MODELS / name))
    assert (config.num_hidden_layers, config.num_experts) == SIZES[name]
    assert (config.moe_intermediate_size, config.num_experts_per_tok, config.head_dim) == (2880, 4, 64)
    assert (config.swiglu_alpha, config.swiglu_limit, config.expert_bias) == (1.702, 7.0, True)
    assert [config.window_of(layer) for layer in range(4)] == [128, None, 128, None]
    assert config.rope_scaling is not None and config.rope_scaling["truncate"] is False
    assert (config.dtype, config.quantization, config.attention_bias) == ("bfloat16", "mxfp4", True)


@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize("name", SIZES)
def test_the_start_is_planned_without_a_gpu(capsys: pytest.CaptureFixture[str], name: str, gpu: str) -> None:
    assert autotune(["plan", "--model-path", str(MODELS / name), "--gpu", gpu, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["decision"]["run"] and not plan["notes"]
    of_portfolio = ["sglang::moe"] if gpu == "H200" else []
    assert plan["ops"] == [*of_portfolio, "trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"]
    assert plan["model"]["quantization"] == "mxfp4" and plan["model"]["num_experts"] == SIZES[name][1]


def identity(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    identity = identity_of(ServerArgs(device="cuda"), dataclasses.replace(config, **changes), "cuda")
    return dataclasses.asdict(identity)


def test_records_depend_on_what_the_experts_compute() -> None:
    config = ModelConfig.from_path(str(MODELS / "gpt_oss_20b"))
    ours = identity(config)
    assert ours != identity(config, swiglu_limit=None)
    assert ours != identity(config, swiglu_alpha=1.0)
    assert ours != identity(config, expert_bias=False)
    assert ours == identity(config, sliding_window=64)


def test_dequantised_and_plain_checkpoints_share_their_records() -> None:
    config = ModelConfig.from_path(str(MODELS / "gpt_oss_20b"))
    assert identity(config) == identity(config, quantization=None, quantization_config=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name one of"),
        ({"layer_types": ["dilated"] * 24}, "layer_types must name one of"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
    ],
)
def test_impossible_layers_name_the_entry(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    published = json.loads((MODELS / "gpt_oss_20b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**published, **changes}))
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        ModelConfig.from_path(str(tmp_path))


def test_a_window_can_be_switched_off() -> None:
    config = ModelConfig.from_path(str(MODELS / "gpt_oss_20b"), overrides={"sliding_window": None})
    assert config.window_of(0) is None
