"""What is late with overlap, and what is not."""

from __future__ import annotations

import pytest

from sglang.srt.managers.io_struct import AbortRequest
from sglang.srt.model_executor.forward_batch import ForwardMode
from support.scheduler_bench import SchedulerBench, expected_tokens, prompt


@pytest.fixture(autouse=True)
def overlap(monkeypatch):
    monkeypatch.setattr(SchedulerBench, "overlap", True)


def test_a_forward_is_launched_before_the_tokens_of_the_one_before_are_taken():
    bench = SchedulerBench()
    bench.add("r", prompt(1, 4), num_new=6, incremental=True)
    bench.scheduler.step()
    assert bench.device.num_in_flight == 1 and not bench.outputs
    bench.scheduler.step()
    assert bench.device.num_in_flight == 1 and bench.tokens("r") == expected_tokens(prompt(1, 4), 1)
    bench.run()
    assert bench.device.most_in_flight == 2 and bench.device.num_in_flight == 0


def test_a_length_is_known_ahead_so_no_forward_is_wasted_on_it():
    bench = SchedulerBench()
    bench.add("short", prompt(1, 4), num_new=2)
    bench.add("long", prompt(2, 4), num_new=4)
    bench.run()
    assert bench.device.batch_sizes == [2, 2, 1, 1]
    assert bench.reason("short") == bench.reason("long") == "length"


def test_the_token_after_an_end_token_is_dropped():
    tokens = expected_tokens(prompt(3, 5), 20)
    bench = SchedulerBench(eos=(tokens[4],), cache=True)
    bench.add("r", prompt(3, 5), num_new=20, ignore_eos=False, incremental=True)
    bench.run()
    num_said = tokens.index(tokens[4]) + 1
    assert bench.tokens("r") == tokens[:num_said] and bench.reason("r") == "stop"
    decodes = [mode for mode in bench.device.modes if mode is ForwardMode.DECODE]
    assert len(decodes) == num_said, "one forward more than its tokens took"
    assert bench.flush()
    bench.assert_all_is_free()


def test_an_abort_between_launch_and_tokens_leaves_the_others_alone():
    bench = SchedulerBench()
    bench.add("gone", prompt(1, 5), num_new=50, incremental=True)
    bench.add("stays", prompt(2, 5), num_new=12)
    for _ in range(3):
        bench.scheduler.step()
    num_sent = len(bench.outputs["gone"])
    bench.scheduler.handle([AbortRequest("gone")])
    bench.add("next", prompt(3, 20), num_new=9)
    bench.run()
    assert len(bench.outputs["gone"]) == num_sent
    assert bench.tokens("stays") == expected_tokens(prompt(2, 5), 12)
    assert bench.tokens("next") == expected_tokens(prompt(3, 20), 9)


def test_a_request_is_put_back_with_all_of_its_tokens():
    bench = SchedulerBench(num_slots=60, context_len=60, max_running=4)
    for i in range(4):
        bench.add(f"r{i}", prompt(i, 6), num_new=40, incremental=True)
    bench.run()
    assert bench.state().num_retractions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, 6), 40)


def test_the_cache_can_be_flushed_as_soon_as_the_last_token_has_been_sent():
    tokens = expected_tokens(prompt(3, 5), 20)
    bench = SchedulerBench(eos=(tokens[4],), cache=True)
    bench.add("r", prompt(3, 5), num_new=20, ignore_eos=False)
    while "r" not in bench.outputs:
        bench.scheduler.step()
    assert bench.device.num_in_flight == 1
    assert bench.flush() and bench.device.num_in_flight == 0
    bench.assert_all_is_free()
