"""What can be found wrong before any process is started, since a worker's refusal takes seconds and a page of log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang.srt.autotune.ops import unknown_ops
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_path import check_model_path
from sglang.srt.configs.model_support import check_supported
from sglang.srt.configs.parallel_sizes import check_parallel_sizes
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_rules import check_backends
from sglang.srt.utils.device import has_nvidia_driver

logger = logging.getLogger(__name__)


def check_launch(args: ServerArgs, config: ModelConfig) -> None:
    """Raise `ValueError` that names the flag when the model or this machine cannot do what `args` ask."""
    if args.tokenizer_path is not None:
        check_model_path(args.tokenizer_path, "--tokenizer-path")
    check_supported(config, args.load_quantizations)
    check_parallel_sizes(args, config)
    if has_nvidia_driver():
        return
    if args.device == "cuda":
        raise ValueError("--device cuda: this machine shows no GPU; use --device cpu or leave --device out")
    if args.device == "auto":
        check_backends(args, "cpu")  # what auto means here


def warn_of_unknown_ops(args: ServerArgs, moe_runner_backends: Sequence[str]) -> None:
    """Warn of each name in the skip list that these backends ask FlashInfer's tuner for nowhere."""
    for name, words in unknown_ops(args.flashinfer_autotune_skip_ops, moe_runner_backends).items():
        logger.warning(
            "--flashinfer-autotune-skip-ops %s: no kernel here asks for such an op; %s", name, words
        )
