"""The models whose shapes are measured, as their config.json; weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers.moe.activation import PLAIN_SWIGLU, MoEActivation
from sglang.srt.layers.moe.base import MoEShape

#: Qwen3-30B-A3B as published, without its tokenizer's end-of-text tokens: random weights must not stop early.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}

#: What one expert-parallel rank of a larger model holds; no hand-made table of tile shapes exists for it.
WIDE_SHARE: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}

#: gpt-oss-20b as published, in BF16.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "moe_intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}

GEOMETRIES = {"qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B}


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A model folder with config.json alone, which `--load-format dummy` fills."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=1) + "\n")
    return folder


def shape_of(config: dict[str, Any], max_num_tokens: int) -> MoEShape:
    """The MoE of one layer, whole, on one GPU."""
    is_gpt_oss = config["model_type"] == "gpt_oss"
    return MoEShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
        num_experts=config["num_experts"],
        num_local_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        dtype=getattr(torch, config["torch_dtype"]),
        max_num_tokens=max_num_tokens,
        activation=MoEActivation(config["swiglu_alpha"], 1.0, config["swiglu_limit"])
        if is_gpt_oss
        else PLAIN_SWIGLU,
        has_bias=is_gpt_oss,
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer that has a word for every id, so that each token of random weights shows as text at once."""
    words = {f"t{number}": number for number in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(parts),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
