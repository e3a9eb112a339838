"""Whether a model can be split over the ranks that were asked for, known from config.json alone.

The layers check what they split themselves; here all of it is checked before any process is started.
"""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs


def check_parallel_sizes(args: ServerArgs, config: ModelConfig) -> None:
    """Raise `ValueError` with the rule and the model's number for the first size that does not fit."""
    attn_tp = "--tp-size" if args.attn_dp_size == 1 else "--tp-size / --attn-dp-size"
    moe_tp = "--tp-size" if args.ep_size == 1 else "--tp-size / --ep-size"
    _must_divide(attn_tp, args.attn_tp_size, "attention heads", config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    # With fewer heads than ranks, neighbours hold the same head.
    if kv_heads % args.attn_tp_size and args.attn_tp_size % kv_heads:
        raise ValueError(
            f"{attn_tp} must divide the model's key-value heads or be a multiple of them (got {args.attn_tp_size} "
            f"and {kv_heads})"
        )
    _must_divide("--ep-size", args.ep_size, "experts", config.num_experts)
    _must_divide(
        moe_tp, args.moe_tp_size, "expert width (moe_intermediate_size)", config.moe_intermediate_size
    )
    if len(config.moe_layer_ids) < config.num_hidden_layers:
        _must_divide(attn_tp, args.attn_tp_size, "MLP width (intermediate_size)", config.intermediate_size)
    if args.pp_size > config.num_hidden_layers:
        raise ValueError(
            f"--pp-size must be at most the model's layers, one for each stage (got {args.pp_size} and "
            f"{config.num_hidden_layers})"
        )


def _must_divide(flag: str, size: int, what: str, total: int) -> None:
    if total % size:
        raise ValueError(f"{flag} must divide the model's {what} (got {size} and {total})")
