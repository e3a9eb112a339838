"""Continuous batching over the real pools: every sequence gets the tokens it would get alone, and gives all back."""

from __future__ import annotations

import pytest

from sglang.srt.managers.io_struct import AbortRequest, TokenizedRequest
from sglang.srt.model_executor.forward_batch import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from support.scheduler_bench import SchedulerBench, expected_tokens, prompt


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "overlap"])
def overlap(request, monkeypatch):
    """Every test runs with and without overlap of scheduling and forwards."""
    monkeypatch.setattr(SchedulerBench, "overlap", request.param)
    return request.param


def test_requests_of_different_lengths_get_the_tokens_they_would_get_alone():
    bench = SchedulerBench()
    for i, length in enumerate([1, 5, 16, 17, 40, 3]):
        bench.add(f"r{i}", prompt(i, length), num_new=5 + i)
    bench.run()
    for i, length in enumerate([1, 5, 16, 17, 40, 3]):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, length), 5 + i)
        assert bench.reason(f"r{i}") == "length"
    bench.assert_all_is_free()


def test_a_prefill_forward_never_exceeds_the_chunk_and_fills_it():
    bench = SchedulerBench(chunk=16)
    bench.add("long", prompt(1, 40), num_new=2)
    bench.add("short", prompt(2, 10), num_new=2)
    bench.run()
    prefills = [
        n
        for mode, n in zip(bench.device.modes, bench.device.num_tokens, strict=True)
        if mode is ForwardMode.EXTEND
    ]
    assert prefills == [16, 16, 16, 2]
    assert bench.tokens("long") == expected_tokens(prompt(1, 40), 2)
    assert bench.tokens("short") == expected_tokens(prompt(2, 10), 2)


def test_without_chunking_a_prompt_is_cut_only_when_no_forward_could_take_it():
    bench = SchedulerBench(chunk=16, chunked=False)
    bench.add("a", prompt(1, 10), num_new=1)
    bench.add("b", prompt(2, 10), num_new=1)
    bench.add("c", prompt(3, 20), num_new=1)
    bench.run()
    assert bench.device.num_tokens == [10, 10, 16, 4]
    assert bench.tokens("c") == expected_tokens(prompt(3, 20), 1)


def test_decode_batches_reach_but_do_not_exceed_max_running_requests():
    bench = SchedulerBench(max_running=3)
    for i in range(7):
        bench.add(f"r{i}", prompt(i, 4), num_new=6)
    bench.run()
    assert max(bench.device.batch_sizes) == 3
    assert all(bench.tokens(f"r{i}") == expected_tokens(prompt(i, 4), 6) for i in range(7))
    bench.assert_all_is_free()


def test_a_request_that_arrives_later_joins_the_running_batch():
    bench = SchedulerBench()
    bench.add("first", prompt(1, 4), num_new=10)
    for _ in range(4):
        bench.scheduler.step()
    bench.add("second", prompt(2, 4), num_new=10)
    bench.run()
    assert 2 in bench.device.batch_sizes
    assert bench.tokens("first") == expected_tokens(prompt(1, 4), 10)
    assert bench.tokens("second") == expected_tokens(prompt(2, 4), 10)


def test_a_full_pool_puts_the_latest_request_back_and_its_tokens_stay_the_same():
    bench = SchedulerBench(num_slots=60, context_len=60, max_running=4)
    for i in range(4):
        bench.add(f"r{i}", prompt(i, 6), num_new=40, incremental=True)
    bench.run()
    assert bench.state().num_retractions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, 6), 40)
    assert bench.reason("r0") == "length"
    bench.assert_all_is_free()


def test_a_request_that_was_put_back_goes_before_those_that_never_ran():
    bench = SchedulerBench(num_slots=42, context_len=42, max_running=2, chunk=64)
    for i in range(3):
        bench.add(f"r{i}", prompt(i, 5), num_new=20)
    bench.run()
    assert bench.state().num_retractions == 1
    assert bench.device.prefilled == ["r0", "r1", "r1", "r2"]


def test_an_end_token_stops_unless_it_is_ignored():
    tokens = expected_tokens(prompt(3, 5), 20)
    bench = SchedulerBench(eos=(tokens[4],))
    bench.add("stops", prompt(3, 5), num_new=20, ignore_eos=False)
    bench.add("ignores", prompt(3, 5), num_new=20, ignore_eos=True)
    bench.run()
    assert bench.tokens("stops") == tokens[: tokens.index(tokens[4]) + 1]
    assert bench.outputs["stops"][-1].matched_stop == tokens[4]
    assert bench.reason("stops") == "stop"
    assert bench.tokens("ignores") == tokens
    assert bench.reason("ignores") == "length"


def test_a_stop_token_of_the_request_stops_even_when_end_tokens_are_ignored():
    tokens = expected_tokens(prompt(3, 5), 20)
    bench = SchedulerBench()
    bench.add("r", prompt(3, 5), num_new=20, stop_token_ids=[tokens[2]])
    bench.run()
    assert bench.tokens("r") == tokens[:3]
    assert bench.reason("r") == "stop"


def test_the_context_length_ends_a_request():
    bench = SchedulerBench(context_len=20)
    bench.add("r", prompt(1, 12), num_new=100)
    bench.run()
    assert bench.tokens("r") == expected_tokens(prompt(1, 12), 8)
    assert bench.reason("r") == "length"
    bench.assert_all_is_free()


def test_a_prompt_that_can_never_fit_is_refused_and_others_are_served():
    bench = SchedulerBench(num_slots=30, context_len=100)
    bench.add("huge", prompt(1, 30), num_new=4)
    bench.add("fine", prompt(2, 5), num_new=4)
    bench.run()
    assert bench.reason("huge") == "abort"
    assert "30" in bench.outputs["huge"][0].message
    assert bench.tokens("fine") == expected_tokens(prompt(2, 5), 4)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_aborted_request_frees_its_memory_whether_it_waits_prefills_or_runs(num_steps):
    bench = SchedulerBench(chunk=16)
    bench.add("gone", prompt(1, 40), num_new=50, incremental=True)
    bench.add("stays", prompt(2, 5), num_new=12)
    for _ in range(num_steps):
        bench.scheduler.step()
    bench.scheduler.handle([AbortRequest("gone"), AbortRequest("gone"), AbortRequest("never seen")])
    num_sent = len(bench.outputs.get("gone", []))
    bench.run()
    assert len(bench.outputs.get("gone", [])) == num_sent
    assert bench.tokens("stays") == expected_tokens(prompt(2, 5), 12)
    bench.assert_all_is_free()


def test_tokens_come_one_by_one_only_for_requests_that_ask():
    bench = SchedulerBench()
    bench.add("streams", prompt(1, 4), num_new=6, incremental=True)
    bench.add("waits", prompt(2, 4), num_new=6)
    bench.run()
    assert [len(output.token_ids) for output in bench.outputs["streams"]] == [1] * 6
    assert [len(output.token_ids) for output in bench.outputs["waits"]] == [6]


def test_the_stream_interval_spaces_all_but_the_first_token():
    bench = SchedulerBench(stream_interval=4)
    bench.add("r", prompt(1, 4), num_new=10, incremental=True)
    bench.run()
    assert [len(output.token_ids) for output in bench.outputs["r"]] == [1, 4, 4, 1]
    assert bench.tokens("r") == expected_tokens(prompt(1, 4), 10)


def test_the_internal_state_counts_what_runs_waits_and_is_held():
    bench = SchedulerBench(num_slots=200, max_running=2)
    for i in range(3):
        bench.add(f"r{i}", prompt(i, 5), num_new=10)
    bench.scheduler.step()
    state = bench.state()
    assert (state.num_running_reqs, state.num_waiting_reqs, state.num_used_tokens) == (2, 1, 10)
    assert state.max_total_num_tokens == 200
    bench.run()
    assert bench.state().num_used_tokens == 0


def test_the_loop_handles_messages_in_order_and_ends_on_shutdown():
    bench = SchedulerBench()
    bench.inbox = [TokenizedRequest("r", prompt(1, 4), SamplingParams(max_new_tokens=3, ignore_eos=True))]
    bench.scheduler.run()
    assert bench.tokens("r") == expected_tokens(prompt(1, 4), 3)
    bench.assert_all_is_free()


def test_two_ranks_that_receive_the_same_messages_run_the_same_batches():
    def run():
        bench = SchedulerBench(num_slots=60, context_len=60, max_running=4)
        for i in range(6):
            bench.add(f"r{i}", prompt(i, 3 + 4 * i), num_new=20)
            bench.scheduler.step()
            if i == 4:
                bench.scheduler.handle([AbortRequest("r2")])
        bench.run()
        return bench.device.modes, bench.device.num_tokens, bench.device.batch_sizes

    assert run() == run()
