"""Reading a model's geometry from config.json, and saying what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import resolve_model_path

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: Any, generation: Any = None) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def read(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    config = {**QWEN3_MOE, **(changes or {})}
    return ModelConfig.from_path(
        write(folder, {key: value for key, value in config.items() if value != "absent"}), **options
    )


def test_qwen3_moe_geometry(tmp_path: Path):
    config = read(tmp_path)
    assert (config.architecture, config.model_type) == ("Qwen3MoeForCausalLM", "qwen3_moe")
    assert (config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size) == (2048, 2048, 768)
    assert (config.num_experts, config.num_experts_per_tok, config.num_shared_experts) == (128, 8, 0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 4, 128)
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)
    assert config.norm_topk_prob and not config.tie_word_embeddings and not config.attention_bias
    assert (config.dtype, config.quantization) == ("bfloat16", None)
    assert config.moe_layer_ids == tuple(range(48))
    assert config.context_length == config.max_position_embeddings == 40960
    assert config.hf_config["vocab_size"] == 151936


def test_head_dim_follows_from_the_heads_when_absent(tmp_path: Path):
    assert read(tmp_path, {"head_dim": "absent"}).head_dim == 64


def test_sparse_step_and_dense_layers(tmp_path: Path):
    config = read(tmp_path, {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.moe_layer_ids == (1, 5)


def test_config_that_transformers_writes_is_read_back(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    written = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dtype="float16",
    )
    written.save_pretrained(tmp_path)
    config = ModelConfig.from_path(str(tmp_path))
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 32)
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (5e5, None, "float16")


def test_rope_scaling_is_kept(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read(tmp_path, {"rope_scaling": scaling}).rope_scaling == scaling


def test_stop_tokens_of_the_generation_config_come_first(tmp_path: Path):
    path = write(tmp_path, QWEN3_MOE, {"eos_token_id": [1, 2], "bos_token_id": 3})
    config = ModelConfig.from_path(path)
    assert (config.eos_token_ids, config.bos_token_id) == ((1, 2), 3)
    assert read(tmp_path / ".." / tmp_path.name).eos_token_ids == (1, 2)


def test_model_without_stop_tokens(tmp_path: Path):
    assert read(tmp_path, {"eos_token_id": None}).eos_token_ids == ()


# dtype, context length, overrides


def test_asked_dtype_wins_over_the_checkpoint(tmp_path: Path):
    assert read(tmp_path, dtype="float32").dtype == "float32"


def test_newer_dtype_entry_is_read(tmp_path: Path):
    assert read(tmp_path, {"torch_dtype": "absent", "dtype": "float16"}).dtype == "float16"


def test_unusable_dtype_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="config.json: dtype 'float8_e4m3fn' is not one of .*--dtype"):
        read(tmp_path, {"torch_dtype": "float8_e4m3fn"})


def test_context_length_is_bounded_by_the_model(tmp_path: Path):
    assert read(tmp_path, context_length=1024).context_length == 1024
    with pytest.raises(ValueError, match="--context-length 50000 .* 40960"):
        read(tmp_path, context_length=50000)
    config = read(tmp_path, context_length=50000, overrides={"max_position_embeddings": 65536})
    assert config.context_length == 50000


def test_override_replaces_an_entry(tmp_path: Path):
    config = read(tmp_path, overrides={"num_hidden_layers": 2})
    assert config.num_hidden_layers == 2 and config.hf_config["num_hidden_layers"] == 2


def test_override_reaches_into_text_config(tmp_path: Path):
    path = write(
        tmp_path, {"model_type": "kimi_k3", "text_config": {**QWEN3_MOE, "model_type": "kimi_linear"}}
    )
    config = ModelConfig.from_path(
        path, overrides={"num_hidden_layers": 3, "text_config": {"num_experts": 16}}
    )
    assert (config.num_hidden_layers, config.num_experts) == (3, 16)


# Other families: geometry only


def test_kimi_k3_wrapped_geometry(tmp_path: Path):
    text = {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "routed_expert_hidden_size": 3584,
        "intermediate_size": 18432,
        "moe_intermediate_size": 3072,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 93,
        "num_attention_heads": 64,
        "vocab_size": 163840,
        "hidden_act": "situ",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"format": "mxfp4-pack-quantized"}},
        },
    }
    path = write(tmp_path, {"model_type": "kimi_k3", "architectures": ["KimiK3"], "text_config": text})
    config = ModelConfig.from_path(path)
    assert (config.architecture, config.model_type) == ("KimiK3", "kimi_k3")
    assert (config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size) == (7168, 3584, 3072)
    assert (config.num_experts, config.num_experts_per_tok, config.num_shared_experts) == (896, 16, 2)
    assert config.moe_layer_ids == tuple(range(1, 93))
    assert config.quantization == "mxfp4"


def test_gpt_oss_experts_have_the_width_of_intermediate_size(tmp_path: Path):
    path = write(
        tmp_path,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    )
    config = ModelConfig.from_path(path)
    assert (config.moe_intermediate_size, config.num_experts, config.attention_bias) == (2880, 128, True)
    assert (config.architecture, config.quantization) == ("GptOssForCausalLM", "mxfp4")


def test_quantization_that_contradicts_the_checkpoint_is_refused(tmp_path: Path):
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert read(tmp_path, stored).quantization == "fp8"
    assert read(tmp_path, stored, quantization="fp8").quantization == "fp8"
    with pytest.raises(ValueError, match="--quantization mxfp4: the checkpoint is stored as fp8"):
        read(tmp_path, stored, quantization="mxfp4")


def test_unknown_quantization_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="config.json: quantization_config says 'gptq'"):
        read(tmp_path, {"quantization_config": {"quant_method": "gptq"}})


# Wrong files


def test_missing_directory_names_the_flag():
    with pytest.raises(ValueError, match="^--model-path /no/such/model: there is no such directory$"):
        ModelConfig.from_path("/no/such/model")


def test_file_in_place_of_a_directory_names_the_flag(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="--model-path .* is a file"):
        ModelConfig.from_path(str(file))


def test_directory_without_config_names_the_flag(tmp_path: Path):
    with pytest.raises(ValueError, match="--model-path .*: there is no config.json"):
        ModelConfig.from_path(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("", "is not valid JSON")],
)
def test_malformed_config_names_the_file(tmp_path: Path, content: str, words: str):
    with pytest.raises(ValueError, match=f"config.json {words}"):
        ModelConfig.from_path(write(tmp_path, content))


def test_unknown_model_type_lists_the_known_ones(tmp_path: Path):
    with pytest.raises(ValueError, match="model_type 'llama' is not known here .*gpt_oss.*qwen3_moe"):
        read(tmp_path, {"model_type": "llama"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": "absent"}, "num_experts is missing"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size must be an integer of at least 1"),
        ({"vocab_size": 1.5}, "vocab_size must be an integer"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 must divide num_attention_heads 32"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of integers"),
        ({"mlp_only_layers": list(range(48))}, "no layer has experts"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
    ],
)
def test_impossible_geometry_names_the_entry(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        read(tmp_path, changes)


# Hugging Face ids


def test_hub_id_resolves_to_the_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[tuple[str, list[str]]] = []

    def download(model_id: str, allow_patterns: list[str]) -> str:  # stands for the hub, another machine
        asked.append((model_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("Qwen/Qwen3-30B-A3B") == str(tmp_path)
    assert resolve_model_path("Qwen/Qwen3-30B-A3B", weights=True) == str(tmp_path)
    assert [("*.safetensors" in patterns) for _, patterns in asked] == [False, True]


def test_hub_that_does_not_answer_is_one_clear_error(monkeypatch: pytest.MonkeyPatch):
    def download(model_id: str, allow_patterns: list[str]) -> str:  # stands for the hub, another machine
        raise OSError("no route to host\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        ValueError, match="--model-path Qwen/none: there is no such directory, .*no route to host"
    ):
        ModelConfig.from_path("Qwen/none")
