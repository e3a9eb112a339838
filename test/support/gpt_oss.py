"""Small random gpt-oss checkpoints, plain and in MXFP4, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

VOCAB_SIZE = 96

SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=512,
    initializer_range=0.15,
    sliding_window=20,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 15e3,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
)


def save_small_gpt_oss(path: Path, **changes: Any) -> GptOssForCausalLM:
    """Save a random model in float32, its weights large enough for errors to show; returns it."""
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(GptOssConfig(**{**SMALL, **changes}), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.5)
    model.save_pretrained(path, max_shard_size="100KB")
    return model.eval()


def as_mxfp4(source: Path, path: Path) -> GptOssForCausalLM:
    """A copy of checkpoint `source` whose experts are random MXFP4, in one file; returns the model in float32."""
    model = GptOssForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    tensors = {
        name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()
    }
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        shape = (experts, out, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return model.eval()


def logits_of(model: GptOssForCausalLM, ids: list[int]) -> torch.Tensor:
    """`[len(ids), vocab]` float32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()
