"""Device memory that is set aside before the KV pool is sized, because it will be wanted after it.

The pool takes what is left of `--mem-fraction-static`, so whatever a start or a forward allocates later is
counted here. A step of the autotune stage that is found to be without memory is left out; it should not come
to that.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.autotune.plan import Limits, Shape, make_plan
from sglang.srt.layers.attention.flashinfer_kernels import WORKSPACE_BYTES
from sglang.srt.layers.logprobs import ROWS_AT_A_TIME

SAMPLING_BYTES_PER_LOGIT = 72
"""Logits as they came and with penalties, the penalties' counts, probabilities, and their sort and sums for top-k and
top-p, each of 4 or 8 bytes for a token of the vocabulary."""
SCORING_BYTES_PER_LOGIT = 16
"""Logits of a prompt's rows in the model's dtype and in float32, and their log-softmax."""
LAZY_BYTES = 256 << 20
"""What CUDA, cuBLAS and FlashInfer take when a kernel is first used. With nothing set aside for it a start on an H200
ended 0.10 GiB above its share."""
WRAPPER_BYTES = 8 << 20
"""Plan of one FlashInfer wrapper; there is one for each captured batch size."""


def forward_reserve_bytes(
    limits: Limits,
    vocab_size: int,
    step_memory_bytes: Callable[[Shape], int],
    *,
    num_captured: int,
    num_windows: int = 1,
) -> int:
    """Bytes that the largest forward takes beside weights and KV pool, tuning and sampling included.

    The plan's steps reach up to the largest prefill and decode that `limits` allow, so the largest step is also the
    largest forward of serving. `num_captured` counts the decode graphs, 0 where none are captured, and `num_windows`
    the different sliding windows of the layers, each with wrappers of its own.
    """
    largest_step = max(step_memory_bytes(step.shape) for step in make_plan(limits).steps)
    sampling = vocab_size * max(
        limits.max_running_requests * SAMPLING_BYTES_PER_LOGIT, ROWS_AT_A_TIME * SCORING_BYTES_PER_LOGIT
    )
    wrappers = WRAPPER_BYTES * (num_captured + 2) * num_windows
    return largest_step + sampling + WORKSPACE_BYTES + LAZY_BYTES + wrappers
