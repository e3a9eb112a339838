"""The largest forwards that a configuration can produce, per rank.

One place turns flags into limits: the scheduler obeys them, the KV pool and the captured graphs are sized by
them, and the autotune plan covers them. Torch-free, so that a plan can be printed anywhere.
"""

from __future__ import annotations

from sglang.srt.autotune.plan import Limits
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

#: Requests per attention replica when --max-running-requests is not given.
DEFAULT_RUNNING_REQUESTS = {"cuda": 256, "cpu": 64}


def standard_batch_sizes(largest: int) -> list[int]:
    """SGLang's list of captured decode batch sizes, up to ``largest``: 1 2 4 8 12 16 24 32 ... ."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
    return [size for size in sizes if size <= largest]


def derive_limits(args: ServerArgs, config: ModelConfig, device: str) -> Limits:
    """Limits of one rank on ``device`` ("cuda" or "cpu").

    Raises:
        ValueError: a flag leaves a rank with nothing to do.
    """
    dp = args.attn_dp_size
    origins = {}

    if args.max_running_requests is not None:
        max_running = args.max_running_requests // dp
        origins["max_running_requests"] = f"--max-running-requests {args.max_running_requests}{_over(dp)}"
    else:
        max_running = DEFAULT_RUNNING_REQUESTS[device]
        origins["max_running_requests"] = f"default on {device}"

    chunk = args.chunked_prefill_size_on(device)
    if chunk is not None:
        prefill = chunk // dp
        given = (
            "--chunked-prefill-size"
            if args.chunked_prefill_size is not None
            else f"default chunk on {device}:"
        )
        origins["prefill_ceiling"] = f"{given} {chunk}{_over(dp)}"
    else:
        # Without chunking one prompt may be as long as the context, even where that exceeds the batch limit.
        prefill = max(args.max_prefill_tokens, config.context_length)
        origins["prefill_ceiling"] = (
            f"--chunked-prefill-size -1: the larger of --max-prefill-tokens {args.max_prefill_tokens} "
            f"and the context length {config.context_length}"
        )

    if args.cuda_graph_bs_decode is not None:
        sizes = sorted(size for size in args.cuda_graph_bs_decode if size <= max_running)
        origins["decode_batch_sizes"] = f"--cuda-graph-bs-decode, up to {max_running} requests"
        if not sizes:
            raise ValueError(
                f"--cuda-graph-bs-decode: every size is above the {max_running} requests that a rank can run; "
                "raise --max-running-requests or give smaller sizes"
            )
    else:
        largest = min(args.cuda_graph_max_bs_decode or max_running, max_running)
        sizes = standard_batch_sizes(largest)
        flag = (
            f"--cuda-graph-max-bs-decode {args.cuda_graph_max_bs_decode}"
            if args.cuda_graph_max_bs_decode
            else "default"
        )
        origins["decode_batch_sizes"] = f"standard list, {flag}, clamped to {max_running} requests"

    return Limits(
        decode_batch_sizes=tuple(sizes),
        max_running_requests=max_running,
        prefill_ceiling=prefill,
        moe_gather=1 if args.uses_megamoe else dp,  # MegaMoE leaves tokens where they are
        context_length=config.context_length,
        origins=origins,
    )


def _over(dp: int) -> str:
    return f" over {dp} attention-DP ranks" if dp > 1 else ""
