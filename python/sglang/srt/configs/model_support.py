"""Which models can be served, as far as config.json and the flags tell: known before any process is started."""

from __future__ import annotations

from collections.abc import Collection

from sglang.srt.configs.model_config import ModelConfig

SERVED_ARCHITECTURES = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")
"""The keys of `models.registry`, which cannot be imported without torch; a test compares the two."""

MXFP4_BLOCK = 32
"""Values that share a scale in an MXFP4 checkpoint."""

MEGAMOE_LOAD_QUANTIZATIONS = ("fp8",)
"""Values of `--quantization` that MegaMoE kernels make of unquantised experts while loading."""


def check_architecture(config: ModelConfig) -> None:
    """Raise `ValueError` where no model class serves the architecture."""
    if config.architecture not in SERVED_ARCHITECTURES:
        raise ValueError(
            f"--model-path {config.model_path}: architecture {config.architecture} cannot be served; "
            f"these can: {', '.join(SERVED_ARCHITECTURES)}"
        )


def check_supported(config: ModelConfig, load_quantizations: Collection[str]) -> None:
    """Refuse what the config asks for and no model class does, rather than answer wrongly.

    Args:
        load_quantizations: `MoERunner.load_quantizations` of the kernels that will serve.

    Raises:
        ValueError: naming the flag or the file.
    """
    check_architecture(config)
    where = f"{config.model_path}/config.json"
    if config.hidden_act != "silu":
        raise ValueError(f"{where}: hidden_act {config.hidden_act} is not supported (silu is)")
    if config.architecture == "GptOssForCausalLM":
        _check_gpt_oss(config, where)
    else:
        _check_qwen3_moe(config, where, load_quantizations)


def _check_qwen3_moe(config: ModelConfig, where: str, load_quantizations: Collection[str]) -> None:
    if config.hf_config.get("use_sliding_window"):
        raise ValueError(f"{where}: use_sliding_window is not supported; set it to false")
    quantised_here = config.quantization_config is None and config.quantization in load_quantizations
    if config.quantization is not None and not quantised_here:
        raise ValueError(f"--quantization {config.quantization} is not supported for {config.architecture}")


def _check_gpt_oss(config: ModelConfig, where: str) -> None:
    if config.quantization not in (None, "mxfp4"):
        raise ValueError(
            f"--quantization {config.quantization} is not supported for {config.architecture}: mxfp4 is"
        )
    if config.quantization != "mxfp4":
        return
    if config.quantization_config is None:
        raise ValueError(
            f"--quantization mxfp4: {where} describes plain weights; leave the flag out (they are not quantised here)"
        )
    if config.hidden_size % MXFP4_BLOCK or config.moe_intermediate_size % MXFP4_BLOCK:
        raise ValueError(f"{where}: MXFP4 needs sizes that are multiples of {MXFP4_BLOCK}")
