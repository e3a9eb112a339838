"""What can be found wrong before any process is started, since a worker's refusal takes seconds and a page of log."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.parallel_sizes import check_parallel_sizes
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_rules import check_backends
from sglang.srt.utils.device import has_nvidia_driver


def check_launch(args: ServerArgs, config: ModelConfig) -> None:
    """Raise `ValueError` that names the flag when the model or this machine cannot do what `args` ask."""
    check_parallel_sizes(args, config)
    if has_nvidia_driver():
        return
    if args.device == "cuda":
        raise ValueError("--device cuda: this machine shows no GPU; use --device cpu or leave --device out")
    if args.device == "auto":
        check_backends(args, "cpu")  # what auto means here
