"""Keys, tactics and policies: what FlashInfer writes is read back, and nothing is ever evaluated."""

from __future__ import annotations

import pytest

from sglang.srt.autotune.records.record import (
    Record,
    describe_policy,
    parse_key,
    policy_from_json,
    tactic_from_json,
    tactic_to_json,
)

CUTLASS = (
    "('trtllm::fused_moe::gemm1', 'MoERunner', ((8, 2048), (128, 1536, 2048)), (torch.bfloat16, 8, True))"
)


def test_a_key_gives_op_runner_shapes_and_bucket():
    key = parse_key(CUTLASS)
    assert key.custom_op == "trtllm::fused_moe::gemm1"
    assert key.runner == "MoERunner"
    assert key.profile == ((8, 2048), (128, 1536, 2048))
    assert key.extras == ("torch.bfloat16", 8, True)
    assert key.num_tokens == 8


def test_keys_that_flashinfer_builds_are_read_back():
    flashinfer_autotuner = pytest.importorskip("flashinfer.autotuner")
    torch = pytest.importorskip("torch")
    from flashinfer.tllm_enums import ActivationType

    extras = (
        torch.float8_e4m3fn,
        torch.device("cpu"),
        ActivationType.Swiglu,
        "it's, (odd)",
        -3,
        None,
        ("a", 1.5),
        False,
    )
    built = flashinfer_autotuner.ProfilingCacheKey("ns::op", "R", 123, ((16, 64), (0,), (-1, 3), ()), extras)
    key = parse_key(built.file_key)
    assert (key.custom_op, key.runner, key.profile) == ("ns::op", "R", ((16, 64), (0,), (-1, 3), ()))
    assert key.extras[:4] == (
        "torch.float8_e4m3fn",
        "device(type='cpu')",
        "ActivationType.Swiglu",
        "it's, (odd)",
    )
    assert key.extras[4:] == (-3, None, "('a', 1.5)", False)


@pytest.mark.parametrize(
    ("profile", "bucket"),
    [("((0,), (32, 5))", 32), ("((), (-1, 2), (4,))", 4), ("((0,),)", None), ("()", None)],
)
def test_the_bucket_is_the_first_dimension_of_the_first_input_that_has_one(profile, bucket):
    assert parse_key(f"('op', 'R', {profile}, ())").num_tokens == bucket


@pytest.mark.parametrize(
    "text",
    ["", "_comment", "('op',)", "('op', 'R', (1, 2), ())", "('op', 'R', ((1,),), 5)", "('op', 'R', ((1,),), ()",
     "('op', R, ((1,),), ())", "(" * 5000, "('op', 'R', ((1,", "('o\\"],
)  # fmt: skip
def test_text_that_is_no_key_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_key(text)


def test_a_key_is_never_evaluated(tmp_path):
    target = tmp_path / "made"
    hostile = f"('op', 'R', ((1,),), (open({str(target)!r}, 'w'),))"
    assert parse_key(hostile).extras == (f"open({str(target)!r}, 'w')",)
    assert not target.exists()


@pytest.mark.parametrize("tactic", [-1, 7, (128, 4), (2, (128, 64), False), ("a", None, 1.5)])
def test_tactics_survive_json(tactic):
    assert tactic_from_json(tactic_to_json(tactic)) == tactic


@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, [float("nan")], 2**70, [[[[[[[[[[1]]]]]]]]]], "\x1b[2J", [0] * 1000]
)
def test_values_that_no_runner_could_mean_are_refused(value):
    with pytest.raises(ValueError):
        tactic_from_json(value)


@pytest.mark.parametrize("value", ["hot", [["nested"]], [float("inf")], [1] * 100])
def test_policies_are_short_flat_lists(value):
    with pytest.raises(ValueError):
        policy_from_json(value)


def test_policies_read_in_words():
    assert describe_policy(("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")) == "eager, hot L2"
    assert (
        describe_policy(("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold")) == "graph x1, cold L2"
    )
    assert describe_policy(None) == "unknown"
    assert describe_policy(("other", 1)) == "other, 1"


def test_a_record_writes_flashinfers_entry():
    assert Record("k", "R", (128, 4)).to_json_entry() == ["R", [128, 4]]
    assert Record("k", "R", 1, ("a", None)).to_json_entry() == ["R", 1, ["a", None]]
