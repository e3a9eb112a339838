"""Micro-batches that take turns, and attention-DP replicas that take part in each other's forwards."""

from __future__ import annotations

import pytest

from sglang.srt.managers.io_struct import AbortRequest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import NewTokenRatio, PrefillLimits, pick_prefill
from sglang.srt.managers.scheduler import Load
from sglang.srt.model_executor.forward_batch import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from support.scheduler_bench import SchedulerBench, expected_tokens, prompt


def bench_of(num_micro_batches, **changes):
    """A bench whose pool has room for all, unless `changes` say otherwise."""
    return SchedulerBench(
        num_micro_batches=num_micro_batches, eos=(), **{"num_slots": 400, "max_running": 9, **changes}
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_every_request_gets_the_tokens_it_would_get_alone(num_micro_batches):
    bench = bench_of(num_micro_batches)
    lengths = [1, 5, 16, 17, 40, 3, 33, 8, 21, 2, 11, 14]
    for i, length in enumerate(lengths):
        bench.add(f"r{i}", prompt(i, length), 5 + i)
        bench.scheduler.step()
    bench.run()
    for i, length in enumerate(lengths):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, length), 5 + i)
    assert bench.device.most_in_flight == num_micro_batches, (
        "as many batches are under way as there are stages"
    )
    bench.assert_all_is_free()
    assert bench.device.num_in_flight == 0


def test_requests_that_come_together_are_spread_over_the_micro_batches():
    bench = bench_of(3)
    for i in range(6):
        bench.add(f"r{i}", prompt(i, 4), 10)
    bench.run()
    decodes = [rids for mode, rids, _ in bench.device.launched if mode is ForwardMode.DECODE]
    assert [len(rids) for rids in decodes[:9]] == [2] * 9
    assert set(decodes[0]).isdisjoint(decodes[1]) and decodes[0] == decodes[3]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("num_slots", [61, 75, 90])
def test_micro_batches_that_fill_the_pool_make_room_for_each_other(num_slots, cache):
    bench = bench_of(3, num_slots=num_slots, context_len=60, cache=cache)
    for i in range(6):
        bench.add(f"r{i}", prompt(i, 4 + 5 * i), 25 + i)
    bench.run()
    for i in range(6):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, 4 + 5 * i), 25 + i)
    if num_slots > 61:  # in the smallest pool they run one after the other
        assert bench.state().num_retractions > 0
    if cache:
        assert bench.flush()
    bench.assert_all_is_free()
    assert bench.device.num_in_flight == 0


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a_request_aborted_while_its_forward_is_under_way_leaves_nothing_behind(num_steps):
    bench = bench_of(2)
    for i in range(4):
        bench.add(f"r{i}", prompt(i, 20), 12, incremental=True)
    for _ in range(num_steps):
        bench.scheduler.step()
    bench.scheduler.handle([AbortRequest("r1"), AbortRequest("r2")])
    sent = [len(bench.outputs.get(rid, [])) for rid in ("r1", "r2")]
    bench.add("new", prompt(9, 20), 12)
    bench.run()
    for rid, seed in (("r0", 0), ("r3", 3), ("new", 9)):
        assert bench.tokens(rid) == expected_tokens(prompt(seed, 20), 12)
    assert [len(bench.outputs.get(rid, [])) for rid in ("r1", "r2")] == sent, "nothing is said after an abort"
    bench.assert_all_is_free()
    assert bench.device.num_in_flight == 0


@pytest.mark.parametrize(("num_free", "num_taken"), [(0, []), (3, [3]), (50, [16])])
def test_a_prompt_that_was_begun_takes_no_more_than_others_left_of_its_room(num_free, num_taken):
    begun = Req("begun", prompt(1, 40), SamplingParams(), incremental=False, max_total_tokens=100)
    limits, elsewhere = PrefillLimits(16, 8), [begun]
    picked = pick_prefill(begun, [], [], num_free, limits, NewTokenRatio(), None, elsewhere)
    assert [num_new for _, num_new in picked] == num_taken


class OtherReplica:
    """Stands where another replica would: `plan` is what it brings into each step, then nothing. More than
    `most_decoded` tokens are a prefill."""

    def __init__(self, plan: list[int], most_decoded: int = 1) -> None:
        self.plan, self.most_decoded = list(plan), most_decoded
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, num_tokens, is_busy, may_replay):
        self.seen.append((num_tokens, is_busy))
        theirs = self.plan.pop(0) if self.plan else 0
        all_may_replay = may_replay and theirs <= self.most_decoded
        return Load([num_tokens, theirs], is_busy or bool(self.plan) or theirs > 0, all_may_replay)


def test_an_idle_replica_takes_part_in_the_forwards_of_another():
    bench = bench_of(1, share_load=OtherReplica([5, 0, 3]))
    for _ in range(4):
        bench.scheduler.step()
    assert bench.device.launched == [
        (ForwardMode.IDLE, [], [0, 5]),
        (ForwardMode.IDLE, [], [0, 3]),
    ], "a step to which nobody brings tokens has no forward"


def test_a_batch_knows_the_tokens_of_all_replicas():
    other = OtherReplica([7, 1, 1, 0])
    bench = bench_of(1, share_load=other)
    bench.add("r", prompt(1, 6), 5)
    bench.run()
    assert [counts for _, _, counts in bench.device.launched] == [[6, 7], [1, 1], [1, 1], [1, 0], [1, 0]]
    assert bench.tokens("r") == expected_tokens(prompt(1, 6), 5)
    bench.scheduler.step()
    assert other.seen == [(6, True), (1, True), (1, True), (1, True), (1, True), (0, False)]


def test_a_captured_forward_is_replayed_only_where_every_replica_decodes_or_is_idle():
    bench = bench_of(1, share_load=OtherReplica([0, 7, 1, 1]))
    bench.add("r", prompt(1, 6), 3)
    bench.run()
    bench.scheduler.step()  # idle here, a decode there
    counts = [counts for _, _, counts in bench.device.launched]
    assert counts == [[6, 0], [1, 7], [1, 1], [0, 1]]
    assert bench.device.all_may_replay == [False, False, True, True]


def test_a_replica_whose_forward_is_under_way_is_busy_in_the_turn_of_an_empty_micro_batch():
    other = OtherReplica([])
    bench = bench_of(2, share_load=other)
    bench.add("r", prompt(1, 6), 2)
    bench.run()
    assert other.seen == [(6, True), (0, True), (1, True), (0, True)]
