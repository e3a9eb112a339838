"""The device side of the scheduler: one forward and one choice of tokens for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.sampler import SamplingBatchInfo
from sglang.srt.managers.pipeline import PipelineLinks
from sglang.srt.managers.process_life import Watchdog
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Tokens
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class ModelExecutor:
    """Runs batches on a `ModelRunner`, each within the watchdog's bound.

    All ranks of an attention replica get the tokens that its last pipeline stage chose.
    """

    def __init__(self, runner: ModelRunner, watchdog: Watchdog) -> None:
        self.device = runner.device
        self._runner = runner
        self._watchdog = watchdog
        self._vocab_size = runner.model_config.vocab_size
        self._attn_tp = runner.parallel.attn_tp
        pp = runner.parallel.pp
        self._links = PipelineLinks(pp) if pp.size > 1 else None
        # Of the batches that take turns; a decode batch keeps its parameters from step to step.
        self._sampling: deque[tuple[list[Req], SamplingBatchInfo]] = deque(maxlen=pp.size)

    def launch(self, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> Tokens:
        """Run this rank's part of the forward; see `Executor`."""
        with self._watchdog.guard():
            if self._links is None:
                chosen = self._forward_and_sample(forward_batch, reqs, None).tolist()
                return lambda: chosen
            return self._run_stage(self._links, forward_batch, reqs)

    def _run_stage(self, links: PipelineLinks, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> Tokens:
        config = self._runner.model_config
        shape = (forward_batch.num_tokens, config.hidden_size)
        hidden_states = links.receive_hidden(shape, self._runner.dtype, self.device)
        if not links.is_last_stage:
            links.send_hidden(self._runner.forward_hidden(forward_batch, hidden_states))
            receive = links.receive_tokens(len(reqs))

            def tokens() -> list[int]:
                with self._watchdog.guard():
                    return receive()

            return tokens
        chosen = self._forward_and_sample(forward_batch, reqs, hidden_states).tolist()
        links.send_tokens(chosen)
        return lambda: chosen

    def _forward_and_sample(
        self, forward_batch: ForwardBatch, reqs: Sequence[Req], hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        if forward_batch.mode is ForwardMode.IDLE:
            self._runner.forward_hidden(forward_batch, hidden_states)
            return forward_batch.input_ids  # none
        logits = self._runner.forward(forward_batch, hidden_states)
        sampling = self._sampling_info(reqs)
        # The token to be chosen stands right behind the sequence.
        tokens = self._runner.sampler(logits, sampling, forward_batch.seq_lens)
        if not sampling.all_greedy:
            # Sums of probabilities on a GPU are not exact to the last bit, and ranks must not part ways over one.
            self._attn_tp.broadcast(tokens)
        return tokens

    def _sampling_info(self, reqs: Sequence[Req]) -> SamplingBatchInfo:
        for known, sampling in self._sampling:
            if known == reqs:
                return sampling
        params = [req.sampling for req in reqs]
        sampling = SamplingBatchInfo.build(
            temperatures=[p.temperature for p in params],
            top_ps=[p.top_p for p in params],
            top_ks=[p.top_k for p in params],
            min_ps=[p.min_p for p in params],
            seeds=[p.seed or 0 for p in params],
            vocab_size=self._vocab_size,
            device=self.device,
        )
        self._sampling.append((list(reqs), sampling))
        return sampling
