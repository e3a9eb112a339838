"""Votes over a store, with threads as ranks; real processes are in test/process."""

import threading

import pytest
import torch.distributed as dist

from sglang.srt.autotune.agreement import Agreement, AgreementError


def on_ranks(num_ranks, body, timeout_s=30.0):
    """Run ``body(agreement)`` as each rank over one store; returns results or exceptions by rank."""
    store = dist.HashStore()
    outcome = {}

    def run(rank):
        agreement = Agreement(store, rank, range(num_ranks), timeout_s)
        try:
            outcome[rank] = body(agreement)
        except Exception as error:
            outcome[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 10)
        assert not thread.is_alive(), "a rank hangs"
    return [outcome[rank] for rank in range(num_ranks)]


def test_every_rank_sees_every_answer():
    answers = on_ranks(4, lambda a: a.gather("coverage", [a.rank, True]))
    assert answers == [{r: [r, True] for r in range(4)}] * 4


def test_alone_there_is_nobody_to_ask():
    alone = Agreement.alone()
    assert alone.gather("anything", {"x": 1}) == {0: {"x": 1}}
    assert alone.mean_times("times", [1.0, float("inf")]) == [1.0, float("inf")]
    alone.all_agree("plan", [1], "remedy")
    alone.announce("step")
    alone.fail("never read")


def test_a_rank_that_does_not_come_is_named_with_what_it_was_doing():
    def body(agreement):
        agreement.announce("step decode 8")
        if agreement.rank == 1:
            return None
        return agreement.gather("coverage", True)

    first, _, third = on_ranks(3, body, timeout_s=1.0)
    for error in (first, third):
        assert isinstance(error, AgreementError)
        assert "rank 1" in str(error) and "step decode 8" in str(error)
        assert "'coverage'" in str(error) and "SGLANG_AUTOTUNE_TIMEOUT" in str(error)


def test_a_rank_that_never_started_is_said_to_have_never_reached_the_stage():
    store = dist.HashStore()
    with pytest.raises(AgreementError, match="rank 1 never reached"):
        Agreement(store, 0, (0, 1), 0.2).gather("plan", 1)


def test_a_failed_rank_is_named_at_once_rather_than_after_the_bound():
    def body(agreement):
        if agreement.rank == 1:
            agreement.fail("OutOfMemoryError: 3 GiB")
            return None
        return agreement.gather("coverage", True)

    first, _ = on_ranks(2, body, timeout_s=60.0)
    assert isinstance(first, AgreementError)
    assert "rank 1 failed" in str(first) and "OutOfMemoryError" in str(first)


def test_ranks_at_different_questions_find_out():
    first, second = on_ranks(2, lambda a: a.gather(f"question {a.rank}", 1))
    assert isinstance(first, AgreementError) and isinstance(second, AgreementError)
    assert "different flags" in str(first)


def test_a_difference_names_the_odd_rank_both_values_and_the_remedy():
    outcome = on_ranks(
        3, lambda a: a.all_agree("skip list", ["x"] if a.rank == 2 else [], "same flags please")
    )
    for error in outcome:
        assert isinstance(error, AgreementError)
        assert "rank 2 differs" in str(error) and "same flags please" in str(error)


def test_times_are_averaged_and_a_failure_anywhere_is_a_failure_everywhere():
    def body(agreement):
        return agreement.mean_times("times", [1.0 + agreement.rank, float("inf") if agreement.rank else 1.0])

    assert on_ranks(2, body) == [[1.5, float("inf")]] * 2


def test_a_smaller_circle_votes_apart_from_the_whole():
    def body(agreement):
        circle = (0, 1) if agreement.rank < 2 else (2, 3)
        inner = agreement.within(circle, "alike")
        return sorted(inner.gather("times", agreement.rank)), sorted(agreement.gather("report", 0))

    assert on_ranks(4, body) == [([0, 1], [0, 1, 2, 3])] * 2 + [([2, 3], [0, 1, 2, 3])] * 2


def test_a_second_circle_of_the_same_name_does_not_see_the_votes_of_the_first():
    def body(agreement):
        return [
            agreement.within((0, 1), "times").gather("t", [attempt, agreement.rank]) for attempt in range(2)
        ]

    for attempts in on_ranks(2, body):
        assert attempts == [{0: [0, 0], 1: [0, 1]}, {0: [1, 0], 1: [1, 1]}]
