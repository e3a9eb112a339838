"""A model's geometry, read from its config.json without torch or transformers.

The autotune plan needs nothing else of a model, so this module knows the geometry of more models than can be
served; whether a model can be served is the model loader's question.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.configs.model_path import resolve_model_path

BUILTIN_MODEL_NAME = "builtin"
BUILTIN_MODEL_PATH = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "model_loader", "builtin"
)

# model_type -> architecture to assume when config.json names none
KNOWN_MODEL_TYPES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}
KNOWN_QUANTIZATIONS = ("fp8", "mxfp4", "nvfp4")
DTYPES = ("bfloat16", "float16", "float32")
LAYER_TYPES = ("sliding_attention", "full_attention")

# The same quantity under the names that different families give it; the first one present counts.
_SPELLINGS = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The geometry of one model. Sizes are counts of elements of the whole model, not of one rank's share."""

    model_path: str
    """Local directory with config.json."""
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP of layers that have no experts."""
    moe_intermediate_size: int
    """Width of one expert."""
    moe_hidden_size: int
    """Width of what enters the experts: `hidden_size`, or less in models that project down before the experts."""
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    norm_topk_prob: bool
    tie_word_embeddings: bool
    attention_bias: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    first_k_dense_replace: int
    hidden_act: str
    swiglu_alpha: float | None
    """Gain of the experts' gate inside its sigmoid; None for plain SwiGLU."""
    swiglu_limit: float | None
    """Clamp of the experts' gate and up projections; None for plain SwiGLU."""
    expert_bias: bool
    """Whether both projections of an expert add a bias."""
    sliding_window: int | None
    """Tokens that a layer of type sliding_attention sees, the current one included."""
    layer_types: tuple[str, ...]
    """sliding_attention or full_attention for each layer; empty where all see everything."""
    max_position_embeddings: int
    context_length: int
    """Most tokens of one request, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """Name of the torch dtype of weights and activations: bfloat16, float16 or float32."""
    quantization: str | None
    """fp8, mxfp4 or nvfp4; None for plain weights."""
    quantization_config: dict[str, Any] | None = field(repr=False)
    hf_config: dict[str, Any] = field(repr=False)
    """config.json as read, overrides applied."""
    generation_config: dict[str, Any] = field(repr=False)

    @classmethod
    def from_path(
        cls,
        model_path: str,
        *,
        overrides: dict[str, Any] | None = None,
        dtype: str = "auto",
        context_length: int | None = None,
        quantization: str | None = None,
    ) -> ModelConfig:
        """Read the model at a local directory or Hugging Face id.

        `overrides` replaces entries of config.json (also inside its text_config). `dtype` "auto" is the checkpoint's.
        Raises `ValueError` that names the flag or the file.
        """
        local_path = resolve_model_path(model_path)
        config_file = os.path.join(local_path, "config.json")
        if not os.path.isfile(config_file):
            raise ValueError(f"--model-path {model_path}: there is no config.json in that directory")
        outer = _apply_overrides(_read_json_object(config_file), overrides or {})
        generation_file = os.path.join(local_path, "generation_config.json")
        generation = _read_json_object(generation_file) if os.path.isfile(generation_file) else {}
        return _Reader(config_file, outer, generation).build(local_path, dtype, context_length, quantization)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` (0-based) has experts; the others have one dense MLP."""
        if self.num_experts == 0 or layer in self.mlp_only_layers or layer < self.first_k_dense_replace:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    def window_of(self, layer: int) -> int | None:
        """How many tokens `layer` (0-based) sees, the current one included; None: all."""
        is_sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if is_sliding else None

    @property
    def kernel_quantization(self) -> str | None:
        """The number format that kernels compute with; None where weights are plain, or become so while loading."""
        return None if self.architecture == "GptOssForCausalLM" else self.quantization

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))


class _Reader:
    """Reads one config.json; every complaint names the file and the entry."""

    def __init__(self, config_file: str, outer: dict[str, Any], generation: dict[str, Any]) -> None:
        self.file = config_file
        self.outer = outer
        self.generation = generation
        inner = outer.get("text_config")
        # Multimodal wrappers keep the language model's geometry one level down.
        self.config: dict[str, Any] = inner if isinstance(inner, dict) else outer

    def build(
        self, local_path: str, dtype: str, context_length: int | None, quantization: str | None
    ) -> ModelConfig:
        model_type = self._model_type()
        is_gpt_oss = model_type == "gpt_oss"
        hidden_size = self._count("hidden_size")
        num_heads = self._count("num_attention_heads")
        num_kv_heads = self._count("num_key_value_heads", default=num_heads)
        intermediate_size = self._count("intermediate_size", default=hidden_size)
        rope_theta, rope_scaling = self._rope()
        max_position = self._count(
            "max_position_embeddings", "model_max_length", "max_model_len", default=32768
        )
        quant_config = self.outer.get("quantization_config") or self.config.get("quantization_config")
        config = ModelConfig(
            model_path=local_path,
            architecture=self._architecture(model_type),
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            moe_intermediate_size=self._count("moe_intermediate_size", default=intermediate_size),
            moe_hidden_size=self._count("routed_expert_hidden_size", default=hidden_size),
            num_experts=self._count("num_experts"),
            num_experts_per_tok=self._count("num_experts_per_tok"),
            num_shared_experts=self._count("num_shared_experts", default=0, minimum=0),
            num_hidden_layers=self._count("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=self._count("head_dim", default=max(hidden_size // num_heads, 1)),
            vocab_size=self._count("vocab_size"),
            rms_norm_eps=self._number("rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_topk_prob=bool(self._get("norm_topk_prob", default=model_type != "qwen3_moe")),
            tie_word_embeddings=bool(self._get("tie_word_embeddings", default=False)),
            attention_bias=bool(self._get("attention_bias", default=is_gpt_oss)),
            decoder_sparse_step=self._count("decoder_sparse_step", "moe_layer_freq", default=1),
            mlp_only_layers=tuple(self._integers("mlp_only_layers")),
            first_k_dense_replace=self._count("first_k_dense_replace", default=0, minimum=0),
            hidden_act=str(self._get("hidden_act", default="silu")),
            swiglu_alpha=self._number("swiglu_alpha", default=1.702) if is_gpt_oss else None,
            swiglu_limit=self._number("swiglu_limit", default=7.0) if is_gpt_oss else None,
            expert_bias=is_gpt_oss,
            sliding_window=self._sliding_window() if is_gpt_oss else None,
            layer_types=self._layer_types() if is_gpt_oss else (),
            max_position_embeddings=max_position,
            context_length=_context_length(context_length, max_position),
            eos_token_ids=self._token_ids("eos_token_id"),
            bos_token_id=next(iter(self._token_ids("bos_token_id")), None),
            dtype=self._dtype(dtype),
            quantization=self._quantization(quant_config, quantization),
            quantization_config=quant_config,
            hf_config=self.outer,
            generation_config=self.generation,
        )
        self._check(config)
        return config

    def _model_type(self) -> str:
        candidates = [self.outer.get("model_type"), self.config.get("model_type")]
        for candidate in candidates:
            if candidate in KNOWN_MODEL_TYPES:
                return str(candidate)
        known = ", ".join(sorted(KNOWN_MODEL_TYPES))
        raise ValueError(f"{self.file}: model_type {candidates[0]!r} is not known here (known: {known})")

    def _architecture(self, model_type: str) -> str:
        named = self.outer.get("architectures") or self.config.get("architectures")
        if isinstance(named, list) and named:
            return str(named[0])
        return KNOWN_MODEL_TYPES[model_type]

    def _get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            for spelling in _SPELLINGS.get(name, (name,)):
                if self.config.get(spelling) is not None:
                    return self.config[spelling]
        return default

    def _count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(*names, default=default)
        if value is None:
            raise ValueError(f"{self.file}: {names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{self.file}: {names[0]} must be an integer of at least {minimum} (got {value!r})"
            )
        return value

    def _number(self, name: str, default: float) -> float:
        return self._as_number(name, self._get(name, default=default))

    def _as_number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{self.file}: {name} must be a positive number (got {value!r})")
        return float(value)

    def _integers(self, name: str) -> list[int]:
        values = self._get(name, default=[])
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise ValueError(f"{self.file}: {name} must be a list of integers (got {values!r})")
        return values

    def _rope(self) -> tuple[float, dict[str, Any] | None]:
        """The base of the rotary embedding, and its scaling unless that is the plain kind."""
        parameters = self._get("rope_parameters", "rope_scaling", default={})
        if not isinstance(parameters, dict):
            raise ValueError(f"{self.file}: rope_parameters must be an object (got {parameters!r})")
        theta = self._get("rope_theta", default=parameters.get("rope_theta", 10000.0))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        return self._as_number("rope_theta", theta), None if kind == "default" else scaling

    def _sliding_window(self) -> int | None:
        """gpt-oss as published has 128; an explicit null switches the window off."""
        if "sliding_window" in self.config and self.config["sliding_window"] is None:
            return None
        return self._count("sliding_window", default=128)

    def _layer_types(self) -> tuple[str, ...]:
        num_layers = self._count("num_hidden_layers")
        alternating = [LAYER_TYPES[layer % 2] for layer in range(num_layers)]
        types = self._get("layer_types", default=alternating)
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
            raise ValueError(
                f"{self.file}: layer_types must name one of {' and '.join(LAYER_TYPES)} for each of the {num_layers} "
                f"layers (got {types!r})"
            )
        return tuple(types)

    def _token_ids(self, name: str) -> tuple[int, ...]:
        for source in (self.generation, self.config, self.outer):
            ids = source.get(name)
            if ids is None:
                continue
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) for token in ids):
                raise ValueError(
                    f"{self.file}: {name} must be an integer or a list of integers (got {ids!r})"
                )
            return tuple(ids)
        return ()

    def _dtype(self, asked: str) -> str:
        if asked != "auto":
            name = asked
        else:
            sources = (self.config.get("dtype"), self.config.get("torch_dtype"))
            outer = (self.outer.get("dtype"), self.outer.get("torch_dtype"))
            name = next((str(value) for value in sources + outer if value), "bfloat16").removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"{self.file}: dtype {name!r} is not one of {', '.join(DTYPES)}; set --dtype")
        return name

    def _quantization(self, quant_config: Any, asked: str | None) -> str | None:
        stored = None
        if quant_config is not None:
            if not isinstance(quant_config, dict):
                raise ValueError(f"{self.file}: quantization_config must be an object (got {quant_config!r})")
            stored = _quantization_name(quant_config)
            if stored not in KNOWN_QUANTIZATIONS:
                known = ", ".join(KNOWN_QUANTIZATIONS)
                raise ValueError(
                    f"{self.file}: quantization_config says {stored!r}, which is not known (known: {known})"
                )
        if asked is not None and stored is not None and asked != stored:
            raise ValueError(
                f"--quantization {asked}: the checkpoint is stored as {stored}; leave the flag out"
            )
        return stored or asked

    def _check(self, config: ModelConfig) -> None:
        if config.num_experts_per_tok > config.num_experts:
            raise ValueError(
                f"{self.file}: num_experts_per_tok {config.num_experts_per_tok} is more than num_experts "
                f"{config.num_experts}"
            )
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"{self.file}: num_key_value_heads {config.num_key_value_heads} must divide num_attention_heads "
                f"{config.num_attention_heads}"
            )
        if not config.moe_layer_ids:
            raise ValueError(
                f"{self.file}: no layer has experts; this server is for mixture-of-experts models"
            )


def _quantization_name(quant_config: dict[str, Any]) -> str:
    """The number format behind a checkpoint tool's own name for it."""
    text = json.dumps(quant_config).lower()
    method = str(quant_config.get("quant_method", "")).lower()
    if method in KNOWN_QUANTIZATIONS:
        return method
    if method in ("compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_fp8"):
        for name in ("mxfp4", "nvfp4", "fp8"):
            if re.search(rf'"[^"]*{name}', text):
                return name
    return method or "unnamed"


def _context_length(asked: int | None, max_position: int) -> int:
    if asked is None:
        return max_position
    if asked > max_position:
        raise ValueError(
            f"--context-length {asked} is more than the model's max_position_embeddings {max_position}; "
            "--json-model-override-args can raise that"
        )
    return asked


def _read_json_object(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _apply_overrides(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`config` with entries replaced; an entry that only text_config has is replaced there, objects are merged."""
    result = dict(config)
    inner = result.get("text_config")
    inner = dict(inner) if isinstance(inner, dict) else None
    for key, value in overrides.items():
        target = inner if inner is not None and key in inner and key not in result else result
        old = inner if target is result and key == "text_config" and inner is not None else target.get(key)
        new = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        target[key] = new
        if key == "text_config" and isinstance(new, dict):
            inner = new
    if inner is not None:
        result["text_config"] = inner
    return result
