"""Writes the trained model as a published Qwen3-MoE checkpoint looks: BF16 safetensors, one tensor per expert."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang.srt.model_loader.train_builtin.model import TinyGeometry, TinyMoE
from sglang.srt.model_loader.train_builtin.tokenizer import END_OF_TEXT, IM_END, PAD, write_tokenizer


def hf_config(geometry: TinyGeometry) -> dict:
    """The ``config.json`` document."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": IM_END,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": geometry.num_experts_per_tok * geometry.moe_intermediate_size,
        "max_position_embeddings": geometry.max_positions,
        "mlp_only_layers": [],
        "moe_intermediate_size": geometry.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": geometry.num_heads,
        "num_experts": geometry.num_experts,
        "num_experts_per_tok": geometry.num_experts_per_tok,
        "num_hidden_layers": geometry.num_layers,
        "num_key_value_heads": geometry.num_kv_heads,
        "output_router_logits": False,
        "pad_token_id": PAD,
        "rms_norm_eps": geometry.norm_eps,
        "rope_scaling": None,
        "rope_theta": geometry.rope_theta,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": geometry.vocab_size,
    }


def hf_state_dict(model: TinyMoE) -> dict[str, Tensor]:
    """The weights in BF16 under the published names; a linear weight is ``[out_features, in_features]``."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.to("cpu", torch.bfloat16)
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                tensors[f"model.{prefix}.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"model.{prefix}.experts.{expert}.up_proj.weight"] = up
        elif last == "down_proj":
            for expert, weight in enumerate(tensor):
                tensors[f"model.{prefix}.experts.{expert}.down_proj.weight"] = weight
        else:
            tensors[name if name.startswith("lm_head.") else f"model.{name}"] = tensor
    return {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}


def write_checkpoint(model: TinyMoE, directory: Path) -> None:
    """Write weights, config, generation config and tokenizer into ``directory``, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = {
        "do_sample": False,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": PAD,
    }
    for name, document in (
        ("config.json", hf_config(model.geometry)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory, model.geometry.max_positions)
    save_file(hf_state_dict(model), directory / "model.safetensors", metadata={"format": "pt"})


def round_to_bfloat16(model: TinyMoE) -> None:
    """Give ``model`` the weights that its checkpoint will hold, still in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
