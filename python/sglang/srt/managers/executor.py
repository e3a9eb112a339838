"""The device side of the scheduler: one forward and one choice of tokens for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.logit_adjustments import LogitBias, Penalties, TokenCounts
from sglang.srt.layers.logits_processor import last_token_rows
from sglang.srt.layers.logprobs import ROWS_AT_A_TIME, score_tokens
from sglang.srt.layers.sampler import SamplingBatchInfo
from sglang.srt.managers.logprobs import LogprobPlan
from sglang.srt.managers.pipeline import PipelineLinks
from sglang.srt.managers.process_life import Watchdog
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Tokens
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.utils.transfer import HostCopy, to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class LatestTokens:
    """The latest token of each running request, kept on the device for the forward that follows."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def fill(self, batch: ForwardBatch) -> None:
        """Put them into a decode batch."""
        torch.index_select(self._tokens, 0, batch.req_pool_indices, out=batch.input_ids)

    def note(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Keep the `tokens` `[B]` that were chosen for `batch`."""
        self._tokens.index_copy_(0, batch.req_pool_indices, tokens)


@dataclass(frozen=True)
class BatchSampling:
    """How the tokens of one batch are chosen."""

    info: SamplingBatchInfo
    penalties: Penalties | None
    bias: LogitBias | None


class ModelExecutor:
    """Runs batches on a `ModelRunner`, each within the watchdog's bound.

    All ranks of an attention replica get the tokens that its last pipeline stage chose. With `overlap` a decode batch
    may be launched before the tokens of the one before are known here: it finds them on the device.
    """

    def __init__(self, runner: ModelRunner, watchdog: Watchdog, overlap: bool = False) -> None:
        assert not overlap or runner.parallel.pp.size == 1, "tokens come to the first stage from the host"
        self.device = runner.device
        self._runner = runner
        self._watchdog = watchdog
        self._vocab_size = runner.model_config.vocab_size
        self._attn_tp = runner.parallel.attn_tp
        pp = runner.parallel.pp
        self._links = PipelineLinks(pp) if pp.size > 1 else None
        # Of the batches that take turns; a decode batch keeps its parameters from step to step.
        self._sampling: deque[tuple[list[Req], BatchSampling]] = deque(maxlen=pp.size)
        self._counts = TokenCounts(self._vocab_size, self.device)
        self._latest = LatestTokens(runner.max_running_requests, self.device) if overlap else None

    def may_replay(self, forward_batch: ForwardBatch) -> bool:
        """Whether a captured forward could run `forward_batch`; see `Executor`."""
        graphs = self._runner.decode_graphs
        return graphs is not None and graphs.fits(forward_batch)

    def launch(self, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> Tokens:
        """Run this rank's part of the forward; see `Executor`."""
        with self._watchdog.guard():
            if self._links is not None:
                return self._run_stage(self._links, forward_batch, reqs)
            plan = LogprobPlan(forward_batch, reqs)
            if self._latest is not None and forward_batch.mode is ForwardMode.DECODE:
                self._latest.fill(forward_batch)
            device_words = self._forward_and_sample(forward_batch, reqs, plan, None)
            if self._latest is not None:
                self._latest.note(forward_batch, device_words[: len(reqs)])
            words = HostCopy(device_words)

        def tokens() -> list[int]:
            with self._watchdog.guard():
                return _tokens_of(words.tolist(), len(reqs), plan)

        return tokens

    def _run_stage(self, links: PipelineLinks, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> Tokens:
        config = self._runner.model_config
        plan = LogprobPlan(forward_batch, reqs)
        shape = (forward_batch.num_tokens, config.hidden_size)
        hidden_states = links.receive_hidden(shape, self._runner.dtype, self.device)
        if not links.is_last_stage:
            links.send_hidden(self._runner.forward_hidden(forward_batch, hidden_states))
            receive = links.receive_tokens(len(reqs) + plan.num_words)

            def tokens() -> list[int]:
                with self._watchdog.guard():
                    return _tokens_of(receive(), len(reqs), plan)

            return tokens
        words = self._forward_and_sample(forward_batch, reqs, plan, hidden_states).tolist()
        links.send_tokens(words)
        chosen = _tokens_of(words, len(reqs), plan)
        return lambda: chosen

    def _forward_and_sample(
        self,
        forward_batch: ForwardBatch,
        reqs: Sequence[Req],
        plan: LogprobPlan,
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor:
        """The chosen tokens, then the words of `plan`, in one int64 tensor."""
        runner = self._runner
        if forward_batch.mode is ForwardMode.IDLE:
            runner.take_part(forward_batch, hidden_states)
            return forward_batch.input_ids  # none
        if not plan.prompt_rows:
            logits = runner.forward(forward_batch, hidden_states)
            return self._with_scores(self._choose(logits, forward_batch, reqs), logits, plan, [])
        hidden = runner.forward_hidden(forward_batch, hidden_states)
        logits = runner.compute_logits(last_token_rows(hidden, forward_batch))
        tokens = self._choose(logits, forward_batch, reqs)
        return self._with_scores(tokens, logits, plan, self._score_prompts(hidden, plan))

    def _choose(self, logits: torch.Tensor, batch: ForwardBatch, reqs: Sequence[Req]) -> torch.Tensor:
        """`[B, V]` -> `[B]`, the same on all ranks of the replica."""
        sampling = self._sampling_info(reqs)
        info, penalties = sampling.info, sampling.penalties
        if penalties is not None:
            counts = self._counts.of([reqs[i] for i in penalties.row_list])
            logits = penalties.apply(logits, counts)
        if sampling.bias is not None:
            logits = sampling.bias.apply(logits)
        # The token to be chosen stands right behind the sequence.
        tokens = self._runner.sampler(logits, info, batch.seq_lens)
        if not info.all_greedy:
            # Sums of probabilities on a GPU are not exact to the last bit, and ranks must not part ways over one.
            self._attn_tp.broadcast(tokens)
        if penalties is not None:
            # A prompt that goes on in the next forward gets no token yet.
            is_kept = [n >= req.num_tokens for n, req in zip(batch.seq_lens_cpu, reqs, strict=True)]
            penalties.count(counts, tokens, is_kept)
        return tokens

    def _score_prompts(self, hidden: torch.Tensor, plan: LogprobPlan) -> list[torch.Tensor]:
        """The scores of the prompt tokens that `plan` wants, a few rows at a time: a row of logits is large."""
        rows = to_device(torch.tensor(plan.prompt_rows), self.device).split(ROWS_AT_A_TIME)
        targets = to_device(torch.tensor(plan.prompt_targets), self.device).split(ROWS_AT_A_TIME)
        return [
            score_tokens(self._runner.compute_logits(hidden[some]), tokens, plan.num_top)
            for some, tokens in zip(rows, targets, strict=True)
        ]

    def _with_scores(
        self, tokens: torch.Tensor, logits: torch.Tensor, plan: LogprobPlan, scores: list[torch.Tensor]
    ) -> torch.Tensor:
        """`tokens`, then the prompts' `scores` and those of the chosen tokens, flat."""
        if plan.is_empty:
            return tokens
        if plan.output_rows:
            rows = to_device(torch.tensor(plan.output_rows), self.device)
            scores = [*scores, score_tokens(logits[rows], tokens[rows], plan.num_top)]
        return torch.cat([tokens, *(score.flatten() for score in scores)])

    def _sampling_info(self, reqs: Sequence[Req]) -> BatchSampling:
        for known, sampling in self._sampling:
            if known == reqs:
                return sampling
        params = [req.sampling for req in reqs]
        info = SamplingBatchInfo.build(
            temperatures=[p.temperature for p in params],
            top_ps=[p.top_p for p in params],
            top_ks=[p.top_k for p in params],
            min_ps=[p.min_p for p in params],
            seeds=[p.seed or 0 for p in params],
            vocab_size=self._vocab_size,
            device=self.device,
        )
        sampling = BatchSampling(
            info, Penalties.build(params, self.device), LogitBias.build(params, self.device)
        )
        self._sampling.append((list(reqs), sampling))
        return sampling


def _tokens_of(words: list[int], num_reqs: int, plan: LogprobPlan) -> list[int]:
    """The tokens at the head of `words`; what follows is handed to the requests."""
    plan.note(words[num_reqs:])
    return words[:num_reqs]
