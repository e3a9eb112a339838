"""What the flags of the server may not say together.

The range of one flag stands at its declaration; here are the rules that a single range cannot express.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang.srt.utils.network import split_host_port

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Experts and exchange in one kernel: FlashInfer's on a GPU, a plain one on the CPU.
MEGAMOE_BACKENDS = ("flashinfer_megamoe", "reference_megamoe")


def num_attention_replicas(args: ServerArgs) -> int:
    """What `--attn-dp-size` and its older spelling come to. Raises `ValueError` where they disagree."""
    if not args.enable_dp_attention:
        if args.dp_size > 1:
            raise ValueError(
                f"--dp-size {args.dp_size} asks for separate replicas, which are not built here: add "
                f"--enable-dp-attention, or use --attn-dp-size {args.dp_size}"
            )
        return args.attn_dp_size
    if args.dp_size > 1 and args.attn_dp_size not in (1, args.dp_size):
        raise ValueError(
            f"--dp-size {args.dp_size} and --attn-dp-size {args.attn_dp_size} disagree: give one of them"
        )
    return max(args.attn_dp_size, args.dp_size)


def check_rules(args: ServerArgs) -> None:
    """Raise `ValueError`, with the flags and the remedy, for the first rule that `args` break."""
    _check_numbers(args)
    _check_parallel_sizes(args)
    _check_nodes(args)
    check_backends(args, args.device)
    _check_megamoe(args)
    _check_files(args)


def _check_numbers(args: ServerArgs) -> None:
    if not 0 < args.mem_fraction_static < 1:
        raise ValueError(f"--mem-fraction-static must lie between 0 and 1 (got {args.mem_fraction_static:g})")
    if args.chunked_prefill_size == 0:
        raise ValueError("--chunked-prefill-size must be at least 1, or -1 to turn chunking off (got 0)")
    sizes = args.cuda_graph_bs_decode
    if sizes is not None:
        if not sizes:
            raise ValueError(
                "--cuda-graph-bs-decode needs at least one size; --disable-cuda-graph captures none"
            )
        if len(set(sizes)) != len(sizes):
            raise ValueError(f"--cuda-graph-bs-decode names a size twice (got {' '.join(map(str, sizes))})")
    _ = args.model_overrides  # reading it checks that it is a JSON object


def _check_parallel_sizes(args: ServerArgs) -> None:
    for name, size in (("--attn-dp-size", args.attn_dp_size), ("--ep-size", args.ep_size)):
        if args.tp_size % size:
            raise ValueError(f"{name} must divide --tp-size (got {size} and {args.tp_size})")
    for name, limit in (
        ("--max-running-requests", args.max_running_requests),
        ("--chunked-prefill-size", args.chunked_prefill_size),
    ):
        if limit is not None and 0 < limit < args.attn_dp_size:
            raise ValueError(f"{name} must be at least --attn-dp-size (got {limit} and {args.attn_dp_size})")


def _check_nodes(args: ServerArgs) -> None:
    if args.node_rank >= args.nnodes:
        raise ValueError(f"--node-rank must be less than --nnodes (got {args.node_rank} and {args.nnodes})")
    if args.world_size % args.nnodes:
        raise ValueError(
            f"--nnodes must divide the number of ranks, --tp-size x --pp-size (got {args.nnodes} and "
            f"{args.world_size})"
        )
    if args.dist_init_addr is not None:
        split_host_port(args.dist_init_addr, flag="--dist-init-addr")
    elif args.nnodes > 1:
        raise ValueError("--nnodes above 1 needs --dist-init-addr HOST:PORT, an address of node 0")


def check_backends(args: ServerArgs, device: str) -> None:
    """Refuse kernels that need a GPU where `device`, a value of `--device`, is the CPU."""
    if device != "cpu":
        return
    for name, value in (
        ("--attention-backend", args.attention_backend),
        ("--moe-runner-backend", args.moe_runner_backend),
        ("--moe-a2a-backend", args.moe_a2a_backend),
    ):
        if value in ("flashinfer", "portfolio", "flashinfer_cutlass", "triton_grouped", "flashinfer_megamoe"):
            remedy = "use reference_megamoe" if value == "flashinfer_megamoe" else "leave it out"
            raise ValueError(f"{name} {value} needs a GPU: {remedy} with --device cpu")


def _check_megamoe(args: ServerArgs) -> None:
    """One kernel does both jobs, over all ranks, on each rank's own tokens."""
    runner, a2a = args.moe_runner_backend, args.moe_a2a_backend
    if runner in MEGAMOE_BACKENDS and a2a not in (None, runner):
        raise ValueError(
            f"--moe-runner-backend {runner} exchanges tokens itself: leave --moe-a2a-backend {a2a} out, or name "
            f"{runner} there too"
        )
    if a2a in MEGAMOE_BACKENDS and runner not in ("auto", a2a):
        raise ValueError(
            f"--moe-a2a-backend {a2a} is one kernel with the experts: leave --moe-runner-backend {runner} out, or "
            f"name {a2a} there too"
        )
    name = args.megamoe_backend
    if name is None:
        return
    if name == "reference_megamoe" and args.device == "cuda":
        raise ValueError(
            f"--moe-runner-backend {name} runs on the CPU: use flashinfer_megamoe with --device cuda"
        )
    if args.attn_dp_size != args.tp_size:
        raise ValueError(
            f"--moe-runner-backend {name} works on each rank's own tokens: --attn-dp-size must equal --tp-size "
            f"(got {args.attn_dp_size} and {args.tp_size})"
        )
    if args.ep_size != args.world_size:
        raise ValueError(
            f"--moe-runner-backend {name} spreads the experts over all ranks: --ep-size must equal --tp-size x "
            f"--pp-size (got {args.ep_size} and {args.world_size})"
        )


def _check_files(args: ServerArgs) -> None:
    for path in args.flashinfer_autotune_records:
        if not os.path.isfile(path):
            raise ValueError(f"--flashinfer-autotune-records: there is no file {path}")
