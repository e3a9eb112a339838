"""The routing of dummy forwards: that of a trained router, not of one that deals experts out in equal shares."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.moe.topk import typical_topk_ids

CPU = torch.device("cpu")
SIZES = [(1, 8, 128), (3, 2, 16), (64, 8, 128), (100, 3, 8), (256, 4, 32), (17, 8, 8), (5, 1, 6)]


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), SIZES)
def test_each_token_has_different_experts_and_each_part_of_the_experts_its_share(
    num_tokens, top_k, num_experts
):
    ids = typical_topk_ids(num_tokens, top_k, num_experts, CPU)
    assert ids.shape == (num_tokens, top_k) and ids.dtype is torch.int32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    bounds = [k * num_experts // top_k for k in range(top_k + 1)]
    for k in range(top_k):
        assert bounds[k] <= int(ids[:, k].min()) and int(ids[:, k].max()) < bounds[k + 1]


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(256, 8, 128), (1024, 2, 16), (4096, 4, 32)]
)
def test_many_tokens_keep_every_expert_busy_in_shares_as_uneven_as_chance_makes_them(
    num_tokens, top_k, num_experts
):
    counts = torch.bincount(
        typical_topk_ids(num_tokens, top_k, num_experts, CPU).flatten(), minlength=num_experts
    )
    share = top_k / num_experts
    chance = (num_tokens * share * (1 - share)) ** 0.5
    assert int(counts.min()) > 0
    assert 0.5 * chance < float(counts.float().std()) < 1.6 * chance


def test_the_routing_is_the_same_at_every_start():
    assert typical_topk_ids(2, 4, 128, CPU).tolist() == [[2, 63, 67, 107], [29, 39, 75, 120]]
