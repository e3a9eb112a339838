"""Train the built-in model and write its checkpoint: ``python -m sglang.srt.model_loader.train_builtin``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from sglang.srt.model_loader.train_builtin.checkpoint import round_to_bfloat16, write_checkpoint
from sglang.srt.model_loader.train_builtin.trainer import TrainOptions, accuracy, train

REQUIRED_ACCURACY = 0.97


def main(argv: list[str] | None = None) -> int:
    """Train, judge the rounded weights on 1000 held-out questions, and write them if they are good enough."""
    defaults = TrainOptions()
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.model_loader.train_builtin", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="of the weights and of the corpus (%(default)s)"
    )
    parser.add_argument(
        "--num-steps", type=int, default=defaults.num_steps, help="optimizer steps (%(default)s)"
    )
    parser.add_argument(
        "--tokens-per-step", type=int, default=defaults.tokens_per_step, help="batch (%(default)s)"
    )
    parser.add_argument("--device", default=defaults.device, help="cpu or cuda (%(default)s)")
    parser.add_argument("--num-threads", type=int, help="CPU threads (torch's choice)")
    args = parser.parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)

    # Only with this fixed workspace does cuBLAS give the same bits in every run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    start = time.perf_counter()
    options = TrainOptions(args.seed, args.num_steps, args.tokens_per_step, device=args.device)
    model = train(options, log=lambda line: print(line, flush=True))
    round_to_bfloat16(model)
    score = accuracy(model, num_questions=1000)
    print(f"{score:.3f} of 1000 held-out questions right in BF16, {time.perf_counter() - start:.0f} s")
    if score < REQUIRED_ACCURACY:
        print(f"error: below {REQUIRED_ACCURACY}, nothing written; train longer", file=sys.stderr)
        return 1
    write_checkpoint(model, args.output)
    print(f"Written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
