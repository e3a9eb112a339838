"""Penalties and biases: what they do to logits, and that a request's counts follow it from batch to batch."""

from __future__ import annotations

import gc

import pytest
import torch

from sglang.srt.layers.logit_adjustments import LogitBias, Penalties, TokenCounts
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 20


class Owner:
    """Stands where a request would: all that counts of it is which one it is."""


def random_logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def penalised_one_by_one(logits: list[float], given: list[int], params: SamplingParams) -> list[float]:
    """The rules as a loop over the vocabulary."""
    changed = list(logits)
    for token in set(given):
        value = changed[token] - params.frequency_penalty * given.count(token) - params.presence_penalty
        changed[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    return changed


PARAMS = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=-0.5, presence_penalty=0.25, repetition_penalty=0.8),
]


def build(params: list[SamplingParams]) -> Penalties:
    penalties = Penalties.build(params, "cpu")
    assert penalties is not None
    return penalties


def test_penalties_weigh_on_the_tokens_given_so_far_and_on_no_other_row():
    logits, penalties = random_logits(len(PARAMS)), build(PARAMS)
    counts = TokenCounts(VOCAB, "cpu").of([Owner() for _ in penalties.row_list])
    given: list[list[int]] = [[] for _ in PARAMS]
    for step in range(6):
        tokens = torch.tensor([(3 * i + step // 2) % VOCAB for i in range(len(PARAMS))])
        penalties.count(counts, tokens, [True] * len(PARAMS))
        for row, token in zip(given, tokens.tolist(), strict=True):
            row.append(token)
        expected = [
            penalised_one_by_one(logits[i].tolist(), given[i], params) for i, params in enumerate(PARAMS)
        ]
        torch.testing.assert_close(penalties.apply(logits, counts), torch.tensor(expected))
        assert torch.equal(penalties.apply(logits, counts)[1], logits[1])


def test_logits_stay_as_they_were():
    logits = random_logits(1)
    before, penalties = logits.clone(), build([SamplingParams(presence_penalty=1.0)])
    counts = TokenCounts(VOCAB, "cpu").of([Owner()])
    penalties.count(counts, torch.tensor([3]), [True])
    penalties.apply(logits, counts)
    LogitBias.build([SamplingParams(logit_bias={2: 5.0})], "cpu").apply(logits)
    assert torch.equal(logits, before)


def test_a_token_of_a_prompt_that_goes_on_is_not_counted():
    penalties = build([SamplingParams(presence_penalty=1.0)] * 2)
    counts = TokenCounts(VOCAB, "cpu").of([Owner(), Owner()])
    penalties.count(counts, torch.tensor([4, 5]), [False, True])
    assert counts.nonzero().tolist() == [[1, 5]]


def test_counts_follow_their_request_into_other_batches_and_back():
    counts, (a, b, c) = TokenCounts(VOCAB, "cpu"), (Owner(), Owner(), Owner())
    counts.of([a, b])[0, 1] += 1
    counts.of([a, b])[1, 2] += 2
    together = counts.of([c, a, b])
    assert together.nonzero().tolist() == [[1, 1], [2, 2]]
    together[1, 1] += 4
    assert counts.of([a, b])[:, 1].tolist() == [5, 0]
    assert counts.of([b])[0, 2] == 2
    assert counts.of([c, b, a])[:, 1].tolist() == [0, 0, 5]


def test_the_same_batch_keeps_its_tensor():
    counts, owners = TokenCounts(VOCAB, "cpu"), [Owner(), Owner()]
    assert counts.of(owners) is counts.of(owners)
    assert counts.of(owners[:1]) is not counts.of(owners)


def test_counts_end_with_their_request():
    counts, owner = TokenCounts(VOCAB, "cpu"), Owner()
    counts.of([owner])
    del owner
    gc.collect()
    assert len(counts._places) == 0


def test_a_bias_is_added_to_its_tokens_of_its_row():
    logits = random_logits(3)
    params = [SamplingParams(), SamplingParams(logit_bias={2: 5.0, 7: -100.0}), SamplingParams()]
    changed = LogitBias.build(params, "cpu").apply(logits) - logits
    expected = torch.zeros(3, VOCAB)
    expected[1, 2], expected[1, 7] = 5.0, -100.0
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=0)


def test_a_batch_without_penalties_or_biases_has_neither():
    assert Penalties.build([SamplingParams()] * 3, "cpu") is None
    assert LogitBias.build([SamplingParams()] * 3, "cpu") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("logit_bias", {3: 101.0}),
        ("frequency_penalty", float("nan")),
    ],
)
def test_a_penalty_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SamplingParams(**{name: value}).check()
