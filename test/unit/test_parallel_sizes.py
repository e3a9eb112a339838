"""Sizes that a model cannot be split over are refused with the rule, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.parallel_sizes import check_parallel_sizes
from sglang.srt.server_args import ServerArgs

BUILTIN = ServerArgs().model_path  # 4 heads, 4 KV heads, 8 experts of width 128, 4 layers
QWEN = str(Path(__file__).parents[1] / "fixtures" / "models" / "qwen3_30b_a3b")  # 32 heads, 4 KV heads


def check(model_path, overrides=None, **sizes):
    check_parallel_sizes(ServerArgs(**sizes), ModelConfig.from_path(model_path, overrides=overrides))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 3}, r"--tp-size must divide the model's attention heads \(got 3 and 4\)"),
        ({"tp_size": 8}, r"--tp-size must divide the model's attention heads \(got 8 and 4\)"),
        (
            {"tp_size": 16, "attn_dp_size": 2},
            r"--tp-size / --attn-dp-size must divide the model's attention heads \(got 8 and 4\)",
        ),
        (
            {"tp_size": 16, "attn_dp_size": 4, "ep_size": 16},
            r"--ep-size must divide the model's experts \(got 16 and 8\)",
        ),
        (
            {"tp_size": 3, "attn_dp_size": 3},
            r"--tp-size must divide the model's expert width .* \(got 3 and 128\)",
        ),
        ({"pp_size": 5}, r"--pp-size must be at most the model's layers.* \(got 5 and 4\)"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_rule(sizes, words):
    with pytest.raises(ValueError, match=words):
        check(BUILTIN, **sizes)


def test_key_value_heads_are_split_or_repeated_but_not_both():
    check(QWEN, tp_size=8)  # two ranks for each of 4 heads
    with pytest.raises(ValueError, match=r"key-value heads or be a multiple of them \(got 8 and 6\)"):
        check(QWEN, {"num_attention_heads": 24, "num_key_value_heads": 6}, tp_size=8)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "pp_size": 4},
        {"tp_size": 4, "ep_size": 2, "attn_dp_size": 2},
        {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8},
    ],
)
def test_sizes_that_fit_are_taken(sizes):
    check(BUILTIN, **sizes)
