"""Log-probabilities: right values, and each handed to the token that it belongs to, however the prompt was cut."""

from __future__ import annotations

import torch

from sglang.srt.layers.logprobs import score_tokens
from sglang.srt.managers.io_struct import LogprobParams, TokenizedRequest
from sglang.srt.managers.logprobs import LogprobPlan
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT = [10, 11, 12, 13, 14, 15, 16]


def logits_of(rows: int, vocab: int = 50) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))


def test_scores_are_a_float32_log_softmax_of_the_logits_and_its_largest_entries():
    logits, tokens = logits_of(5), torch.tensor([0, 49, 3, 7, 20])
    words = score_tokens(logits, tokens, 3)
    expected = torch.log_softmax(logits, dim=-1)
    assert torch.equal(words[:, 0].view(torch.float64).float(), expected[torch.arange(5), tokens])
    best = expected.sort(dim=-1, descending=True)
    assert torch.equal(words[:, 1:4], best.indices[:, :3])
    assert torch.equal(words[:, 4:].contiguous().view(torch.float64).float(), best.values[:, :3])
    assert torch.equal(score_tokens(logits, tokens, 0), words[:, :1])


def request(prompt_start: int | None, num_top: int = 0) -> Req:
    message = TokenizedRequest(
        "r", PROMPT, SamplingParams(), logprobs=LogprobParams(num_top=num_top, prompt_start=prompt_start)
    )
    return Req.from_message(message, max_total_tokens=100)


def extend(reqs: list[Req], chunks: list[tuple[int, int]]) -> LogprobPlan:
    """The plan of a forward that takes tokens `start` to `stop` of each request."""
    batch = ForwardBatch.extend(
        input_ids=[0] * sum(stop - start for start, stop in chunks),
        extend_seq_lens=[stop - start for start, stop in chunks],
        extend_prefix_lens=[start for start, _ in chunks],
        req_pool_indices=[0] * len(reqs),
        out_cache_loc=torch.zeros(1),
        device="cpu",
    )
    return LogprobPlan(batch, reqs)


def note(plan: LogprobPlan, values: list[float]) -> None:
    """Answer a plan without top tokens by `values`."""
    assert plan.num_words == len(values)
    plan.note(torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist())


def test_a_whole_prompt_is_scored_from_the_token_that_was_asked_for():
    req = request(prompt_start=3)
    plan = extend([req], [(0, 7)])
    assert plan.prompt_targets == [13, 14, 15, 16]
    assert plan.prompt_rows == [2, 3, 4, 5]
    note(plan, [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert req.logprobs.prompt.values == [-1.0, -2.0, -3.0, -4.0]
    assert req.logprobs.output.values == [-5.0]


def test_the_first_token_of_all_has_no_probability():
    req = request(prompt_start=0)
    note(extend([req], [(0, 7)]), [float(-i) for i in range(7)])
    assert req.logprobs.prompt.values == [None, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


def test_chunks_give_every_prompt_token_once_and_only_the_last_gives_an_output():
    req = request(prompt_start=0)
    targets, outputs = [], []
    for chunk in [(0, 3), (3, 4), (4, 7)]:
        plan = extend([req], [chunk])
        targets += plan.prompt_targets
        outputs += plan.output_rows
        note(plan, [-1.0] * plan.num_words)
    assert targets == PROMPT[1:]
    assert outputs == [0]


def test_a_prompt_that_is_computed_again_is_not_scored_again_but_its_next_token_is():
    req = request(prompt_start=0)
    note(extend([req], [(0, 7)]), [-1.0] * 7)
    req.output_ids = [20, 21]
    req.logprobs.note_output(1, -2.0, [])
    plan = extend([req], [(0, 9)])
    assert plan.prompt_rows == []
    note(plan, [-3.0])
    assert req.logprobs.output.values == [-1.0, -2.0, -3.0]


def test_a_token_that_is_chosen_again_replaces_the_first_choice():
    req = request(prompt_start=None)
    note(extend([req], [(0, 7)]), [-1.0])
    note(extend([req], [(0, 7)]), [-2.0])
    assert req.logprobs.output.values == [-2.0]


def test_rows_of_neighbours_are_told_apart_and_each_gets_as_many_top_tokens_as_it_wants():
    silent = Req.from_message(TokenizedRequest("s", PROMPT, SamplingParams()), max_total_tokens=100)
    few, many = request(prompt_start=5, num_top=1), request(prompt_start=None, num_top=2)
    plan = extend([silent, few, many], [(0, 7), (4, 7), (0, 7)])
    assert plan.prompt_rows == [7, 8] and plan.output_rows == [1, 2]
    logits = logits_of(4)
    words = score_tokens(logits, torch.tensor([*plan.prompt_targets, 1, 2]), plan.num_top)
    plan.note(words.flatten().tolist())
    best = logits.topk(2, dim=-1).indices.tolist()
    assert [[token for token, _ in top] for top in few.logprobs.prompt.top] == [best[0][:1], best[1][:1]]
    assert [token for token, _ in few.logprobs.output.top[0]] == best[2][:1]
    assert [token for token, _ in many.logprobs.output.top[0]] == best[3]


def test_a_cached_prefix_ends_before_the_first_row_that_is_wanted():
    assert request(prompt_start=None).num_reusable == 6
    assert request(prompt_start=0).num_reusable == 0
    req = request(prompt_start=4)
    assert req.num_reusable == 3
    note(extend([req], [(3, 7)]), [-1.0] * 4)
    assert req.num_reusable == 6


def test_outputs_carry_the_log_probabilities_of_their_tokens():
    req = request(prompt_start=6)
    req.incremental = True
    note(extend([req], [(0, 7)]), [-1.0, -2.0])
    req.append(20, frozenset())
    first = req.take_output(1)
    assert (first.logprobs.values, first.prompt_logprobs.values) == ([-2.0], [-1.0])
    req.logprobs.note_output(1, -3.0, [])
    req.append(21, frozenset([21]))
    last = req.take_output(1)
    assert (last.logprobs.values, last.prompt_logprobs) == ([-3.0], None)
