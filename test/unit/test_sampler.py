"""The sampler: what it may choose, how often, and that company does not change the choice."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.sampler import Sampler, SamplingBatchInfo, invert_cdf, uniform

VOCAB_SIZE = 50
SAMPLE = Sampler()


def info(rows: list[dict[str, Any]], vocab_size: int = VOCAB_SIZE) -> SamplingBatchInfo:
    """Sampling parameters with the defaults of a request where `rows` are silent."""
    return SamplingBatchInfo.build(
        temperatures=[row.get("temperature", 1.0) for row in rows],
        top_ps=[row.get("top_p", 1.0) for row in rows],
        top_ks=[row.get("top_k", -1) for row in rows],
        min_ps=[row.get("min_p", 0.0) for row in rows],
        seeds=[row.get("seed", 0) for row in rows],
        vocab_size=vocab_size,
        device="cpu",
    )


def draw(logits: torch.Tensor, count: int, **row: Any) -> torch.Tensor:
    """`count` draws from one row of logits, at as many positions."""
    batch = info([row] * count, logits.numel())
    return SAMPLE(logits.expand(count, -1), batch, torch.arange(count))


def random_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_greedy_takes_the_most_likely_token_by_temperature_or_top_k() -> None:
    logits = random_logits(3)
    rows = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.1}]
    assert torch.equal(SAMPLE(logits, info(rows), torch.arange(3)), logits.argmax(dim=-1))


def test_greedy_rows_stay_greedy_beside_random_ones() -> None:
    logits = random_logits(4)
    rows = [{"temperature": 0.0}, {"temperature": 5.0, "seed": 1}, {"top_k": 1}, {"top_p": 0.5}]
    chosen = SAMPLE(logits, info(rows), torch.arange(4))
    assert torch.equal(chosen[[0, 2]], logits.argmax(dim=-1)[[0, 2]])


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits, count = torch.tensor([0.0, 1.0, 2.0, -1.0]), 40_000
    for temperature in (0.7, 1.0, 1.6):
        frequencies = torch.bincount(draw(logits, count, temperature=temperature), minlength=4) / count
        wanted = torch.softmax(logits / temperature, dim=0)
        # Five standard deviations of a binomial share.
        assert ((frequencies - wanted).abs() < 5 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_top_k_keeps_exactly_k_tokens_even_among_ties() -> None:
    assert set(draw(torch.zeros(10), 2000, top_k=3).tolist()) == {0, 1, 2}
    best = random_logits()[0].topk(5).indices.tolist()
    assert set(draw(random_logits()[0], 5000, top_k=5, temperature=3.0).tolist()) == set(best)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 3000, top_p=0.45).tolist()) == {0}
    assert set(draw(logits, 3000, top_p=0.79).tolist()) == {0, 1}
    assert set(draw(logits, 3000, top_p=0.9).tolist()) == {0, 1, 2}
    assert set(draw(logits, 3000, top_p=1e-9).tolist()) == {0}


def test_min_p_drops_tokens_far_less_likely_than_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 3000, min_p=0.29).tolist()) == {0, 1, 2}
    assert set(draw(logits, 3000, min_p=1.0).tolist()) == {0}


def test_kept_tokens_keep_their_relative_frequencies() -> None:
    logits, count = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 40_000
    frequencies = torch.bincount(draw(logits, count, top_k=2), minlength=4) / count
    assert abs(frequencies[0].item() - 0.625) < 5 * (0.625 * 0.375 / count) ** 0.5


def test_the_choice_does_not_depend_on_the_batch() -> None:
    logits = random_logits(6, seed=9)
    rows: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "temperature": 0.8, "top_p": 0.9},
        {"seed": 3, "top_k": 7},
        {"temperature": 0.0},
        {"seed": 5, "min_p": 0.1},
        {"seed": 6, "temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    ]
    for start in range(0, 200, 20):
        positions = torch.arange(start, start + 6)
        together = SAMPLE(logits, info(rows), positions)
        alone = [SAMPLE(logits[i : i + 1], info(rows[i : i + 1]), positions[i : i + 1]) for i in range(6)]
        assert torch.equal(together, torch.cat(alone))
        order = torch.tensor([4, 0, 5, 2, 1, 3])
        shuffled = SAMPLE(logits[order], info([rows[i] for i in order.tolist()]), positions[order])
        assert torch.equal(shuffled, together[order])


def test_seed_and_position_both_change_the_draws() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    assert torch.equal(draw(logits, 100, seed=1), draw(logits, 100, seed=1))
    assert not torch.equal(draw(logits, 100, seed=1), draw(logits, 100, seed=2))
    assert draw(logits, 100, seed=1).unique().numel() > 20


def test_uniform_numbers_fill_the_unit_interval_for_neighbouring_seeds_and_positions() -> None:
    seeds, positions = torch.meshgrid(torch.arange(-100, 100), torch.arange(200), indexing="ij")
    numbers = uniform(seeds.flatten(), positions.flatten())
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert numbers.unique().numel() == numbers.numel()
    share = torch.histc(numbers.float(), bins=20, min=0, max=1) / numbers.numel()
    assert ((share - 0.05).abs() < 0.01).all()
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.03
    assert uniform(torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([0, 10**6])).max() < 1.0


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[[2, 5]] = 0.0
    assert set(draw(logits, 4000).tolist()) == {2, 5}


def test_the_ends_of_the_unit_interval_fall_on_tokens_with_a_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.2, 0.0]]).expand(4, -1)
    draws = torch.tensor([0.0, 0.59, 0.61, 1.0 - 2.0**-53], dtype=torch.float64)
    assert invert_cdf(weights, draws).tolist() == [1, 1, 3, 3]
