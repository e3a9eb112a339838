"""The plan: which steps and capacities cover a workload."""

import pytest

from sglang.srt.autotune.plan import (
    Limits,
    Phase,
    Shape,
    bucket_grid,
    bucket_of,
    make_plan,
    spread,
)


def limits(**changes) -> Limits:
    values = dict(
        decode_batch_sizes=(1, 2, 4, 8, 12, 16),
        max_running_requests=16,
        prefill_ceiling=1024,
        moe_gather=1,
        context_length=32768,
    )
    return Limits(**{**values, **changes})


def buckets(plan, phase: Phase) -> list[int]:
    return [step.bucket for step in plan.steps if step.phase is phase]


@pytest.mark.parametrize("top", [1, 8, 256, 300, 2048, 4096, 5000, 8192, 16384])
def test_grid_is_flashinfers(top):
    moe_utils = pytest.importorskip("flashinfer.fused_moe.utils")
    assert bucket_grid(top) == moe_utils.get_hybrid_num_tokens_buckets(top)
    for num_tokens in {*range(1, min(top, 700)), top - 1 or 1, top, top + 1, 2001 % top + 1}:
        assert bucket_of(num_tokens, top) == moe_utils.map_to_hybrid_bucket(num_tokens, top)


def test_a_small_top_is_a_power_of_two_since_flashinfer_maps_past_an_odd_one():
    moe_utils = pytest.importorskip("flashinfer.fused_moe.utils")
    assert moe_utils.map_to_hybrid_bucket(5, 7) == 8, "FlashInfer clamps now: the rounding can go"
    small = limits(max_running_requests=7, prefill_ceiling=7, decode_batch_sizes=(1, 2, 4))
    assert small.max_op_tokens == 8


def test_decode_steps_are_the_buckets_of_captured_sizes_then_prefill_from_the_ceiling_down():
    plan = make_plan(limits())
    assert buckets(plan, Phase.DECODE) == [1, 2, 4, 8, 16]
    assert buckets(plan, Phase.PREFILL) == [1024, 768, 512, 256, 128, 64, 32]
    assert [step.phase for step in plan.steps] == [Phase.DECODE] * 5 + [Phase.PREFILL] * 7


def test_every_token_count_that_serving_can_reach_has_a_step():
    uneven = limits(decode_batch_sizes=(3, 50), max_running_requests=100, prefill_ceiling=5000)
    plan = make_plan(uneven)
    planned = {step.bucket for step in plan.steps}
    assert len(planned) == len(plan.steps)
    assert {bucket_of(n, uneven.max_op_tokens) for n in range(1, 5001)} == planned


def test_a_decode_ceiling_above_the_prefill_ceiling_is_the_top_of_the_grid():
    plan = make_plan(limits(max_running_requests=600, prefill_ceiling=300))
    assert plan.limits.max_op_tokens == 600
    assert {step.bucket for step in plan.steps} == set(bucket_grid(600))


def test_attention_dp_ranks_are_gathered_before_the_op_sees_tokens():
    plan = make_plan(limits(moe_gather=4))
    assert plan.limits.max_op_tokens == 4096
    assert buckets(plan, Phase.DECODE) == [4, 8, 16, 32, 64]
    assert buckets(plan, Phase.PREFILL)[0] == 4096
    assert plan.steps[0].shape.tokens_of_rank == (1, 1, 1, 1)
    smallest = plan.steps[-1].shape
    assert (smallest.op_tokens, smallest.tokens_of_rank) == (1, (1, 0, 0, 0))


def test_capacities_are_powers_of_two_then_the_exact_decode_and_prefill_ceilings():
    assert make_plan(limits(moe_gather=4)).capacities == (1, 2, 4, 8, 16, 1024)
    assert make_plan(limits(max_running_requests=12)).capacities == (1, 2, 4, 8, 12, 1024)
    assert make_plan(limits(prefill_ceiling=8)).capacities == (1, 2, 4, 8, 16)


def test_leaving_prefill_out_keeps_decode_steps_and_capacities():
    full, decode_only = make_plan(limits()), make_plan(limits(), include_prefill=False)
    assert decode_only.steps == tuple(step for step in full.steps if step.phase is Phase.DECODE)
    assert decode_only.capacities == full.capacities


def test_wider_decodes_multiply_the_tokens_of_a_batch():
    plan = make_plan(limits(tokens_per_request=4))
    assert buckets(plan, Phase.DECODE) == [4, 8, 16, 32, 64]
    assert plan.limits.decode_ceiling == 64


def test_a_plan_prints_as_plain_data():
    import json

    printed = json.loads(json.dumps(make_plan(limits()).to_json()))
    assert printed["capacities"] == [1, 2, 4, 8, 16, 1024]
    assert printed["steps"][0] == {
        "phase": "decode",
        "num_tokens": 1,
        "tokens_per_rank": [1],
        "tokens_per_sequence": 1,
    }


def test_prefill_sequences_do_not_exceed_the_context():
    plan = make_plan(limits(context_length=300, prefill_ceiling=1024))
    ceiling = next(step for step in plan.steps if step.bucket == 1024)
    assert ceiling.shape.sequence_lengths(0) == [300, 300, 300, 124]


def test_tokens_spread_evenly_and_leave_the_last_ranks_idle():
    assert spread(10, 4) == (3, 3, 2, 2)
    assert Shape(Phase.DECODE, 2, spread(2, 4)).sequence_lengths(3) == []
