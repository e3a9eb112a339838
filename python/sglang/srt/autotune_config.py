"""From the server's flags and variables to what the autotune stage asks for.

Torch-free: a plan is made from the same values on a machine without a GPU.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from sglang.srt.autotune.identity import EngineIdentity
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs


def identity_of(
    args: ServerArgs, config: ModelConfig, device_type: str, capability: tuple[int, int] | None = None
) -> EngineIdentity:
    """What the records of this engine depend on, on a ``device_type`` of "cuda" (with its capability) or "cpu"."""
    dtype = args.dtype_on(device_type)
    parallel = {"tp": args.tp_size, "pp": args.pp_size, "ep": args.ep_size, "attn_dp": args.attn_dp_size}
    geometry = {
        "model_type": config.model_type,
        "hidden_size": config.moe_hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": config.hidden_act,
    }
    if config.expert_bias:
        geometry["expert_bias"] = True
    if config.swiglu_alpha is not None:
        geometry |= {"swiglu_alpha": config.swiglu_alpha, "swiglu_limit": config.swiglu_limit}
    name = config.dtype if dtype == "auto" else dtype
    moe_runner_backend = args.moe_runner_backend_on(device_type, capability, name)
    return EngineIdentity(
        model=geometry,
        applies={
            **geometry,
            "dtype": name,
            "quantization": config.kernel_quantization,
            "chunked_prefill_size": args.chunked_prefill_size_on(device_type),
            "moe_runner_backend": moe_runner_backend,
            **parallel,
        },
        dtype=name,
        quantization=config.kernel_quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        backends={
            "moe": moe_runner_backend,
            "attention": args.attention_backend_on(device_type),
        },
        parallel=parallel,
    )


def settings_of(args: ServerArgs, run_id: str | None = None) -> StageSettings:
    """The flags and variables of the stage; the only place that reads them."""
    return StageSettings(
        disabled=args.disable_flashinfer_autotune,
        deterministic=args.enable_deterministic_inference,
        skip_ops=tuple(sorted(set(args.flashinfer_autotune_skip_ops))),
        given_records=tuple(Path(path) for path in args.flashinfer_autotune_records),
        report_path=Path(args.flashinfer_autotune_report) if args.flashinfer_autotune_report else None,
        use_cache=envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.get(),
        include_prefill=envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.get(),
        cache_root=Path(envs.SGLANG_CACHE_DIR.get()),
        verify=args.flashinfer_autotune_verify,
        budget_s=args.flashinfer_autotune_budget,
        timeout_s=envs.SGLANG_AUTOTUNE_TIMEOUT.get(),
        run_id=run_id or uuid.uuid4().hex[:12],
    )
