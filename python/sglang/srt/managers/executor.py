"""The device side of the scheduler: one forward and one choice of tokens for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.layers.sampler import SamplingBatchInfo
from sglang.srt.managers.process_life import Watchdog
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class ModelExecutor:
    """Runs batches on a `ModelRunner`, each within the watchdog's bound."""

    def __init__(self, runner: ModelRunner, watchdog: Watchdog) -> None:
        self.device = runner.device
        self._runner = runner
        self._watchdog = watchdog
        self._vocab_size = runner.model_config.vocab_size
        self._reqs: list[Req] = []
        self._sampling: SamplingBatchInfo | None = None

    def execute(self, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> list[int]:
        """The next token of each sequence, on the CPU."""
        with self._watchdog.guard():
            logits = self._runner.forward(forward_batch)
            # The token to be chosen stands right behind the sequence.
            tokens = self._runner.sampler(logits, self._sampling_info(reqs), forward_batch.seq_lens)
            return tokens.tolist()

    def _sampling_info(self, reqs: Sequence[Req]) -> SamplingBatchInfo:
        if self._sampling is None or self._reqs != reqs:
            params = [req.sampling for req in reqs]
            self._reqs = list(reqs)
            self._sampling = SamplingBatchInfo.build(
                temperatures=[p.temperature for p in params],
                top_ps=[p.top_p for p in params],
                top_ks=[p.top_k for p in params],
                min_ps=[p.min_p for p in params],
                seeds=[p.seed or 0 for p in params],
                vocab_size=self._vocab_size,
                device=self.device,
            )
        return self._sampling
