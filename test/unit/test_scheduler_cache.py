"""Prefix reuse under the scheduler: nothing is computed twice that need not be, and no token changes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.managers.io_struct import AbortRequest
from sglang.srt.model_executor.forward_batch import ForwardMode
from support.scheduler_bench import SchedulerBench, expected_tokens, prompt


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "overlap"])
def overlap(request, monkeypatch):
    """Every test runs with and without overlap of scheduling and forwards."""
    monkeypatch.setattr(SchedulerBench, "overlap", request.param)
    return request.param


def bench_of(**options):
    return SchedulerBench(**{"cache": True, **options})


def num_prefilled(bench):
    return sum(
        n
        for mode, n in zip(bench.device.modes, bench.device.num_tokens, strict=True)
        if mode is ForwardMode.EXTEND
    )


def run_alone(bench, rid, prompt_ids, num_new=5):
    """Run one request to its end; gives how many of its tokens were prefilled and how many it says were cached."""
    before = num_prefilled(bench)
    bench.add(rid, prompt_ids, num_new=num_new)
    bench.run()
    assert bench.tokens(rid) == expected_tokens(prompt_ids, num_new)
    return num_prefilled(bench) - before, bench.outputs[rid][0].num_cached_tokens


def test_a_prompt_that_was_seen_is_computed_from_its_last_token_on():
    bench = bench_of()
    assert run_alone(bench, "a", prompt(1, 20)) == (20, 0)
    assert run_alone(bench, "b", prompt(1, 20)) == (1, 19)
    assert run_alone(bench, "c", [*prompt(1, 20), 1, 2, 3]) == (3, 20)
    assert run_alone(bench, "d", prompt(2, 20)) == (20, 0)


def test_an_answer_is_a_prefix_of_the_next_question_too():
    bench = bench_of()
    run_alone(bench, "a", prompt(1, 20), num_new=6)
    said = prompt(1, 20) + expected_tokens(prompt(1, 20), 6)
    assert run_alone(bench, "b", [*said, 4]) == (2, 25)  # the last token of an answer was never computed


def test_a_running_request_shares_its_prompt():
    bench = bench_of()
    bench.add("first", prompt(1, 16), num_new=30)
    bench.scheduler.step()
    bench.add("second", [*prompt(1, 16), 5], num_new=30)
    bench.scheduler.step()
    assert bench.state().num_used_tokens == 16 + 1
    bench.run()
    assert bench.outputs["second"][0].num_cached_tokens == 16
    assert bench.tokens("second") == expected_tokens([*prompt(1, 16), 5], 30)
    assert bench.tokens("first") == expected_tokens(prompt(1, 16), 30)


def test_equal_prompts_of_one_forward_end_in_one_copy():
    bench = bench_of(chunk=64)
    for rid in ("a", "b", "c"):
        bench.add(rid, prompt(1, 12), num_new=4)
    bench.scheduler.step()
    assert bench.state().num_used_tokens == 12
    bench.run()
    for rid in ("a", "b", "c"):
        assert bench.tokens(rid) == expected_tokens(prompt(1, 12), 4)


def test_a_chunk_can_be_reused_while_the_prompt_goes_on():
    bench = bench_of(chunk=16)
    bench.add("long", prompt(1, 40), num_new=2)
    bench.scheduler.step()
    bench.scheduler.handle([AbortRequest("long")])
    assert run_alone(bench, "again", prompt(1, 40)) == (24, 16)


def test_a_request_that_was_put_back_finds_its_tokens_again():
    bench = bench_of(num_slots=60, context_len=60, max_running=4)
    for i in range(4):
        bench.add(f"r{i}", prompt(i, 6), num_new=40)
    bench.run()
    assert bench.state().num_retractions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, 6), 40)
        assert bench.outputs[f"r{i}"][0].num_cached_tokens == 0, "what it lost itself is no hit"


def test_old_prefixes_make_room_before_a_running_request_must():
    bench = bench_of(num_slots=50, context_len=50)
    for i in range(5):
        run_alone(bench, f"r{i}", prompt(i, 20), num_new=10)
    assert bench.state().num_retractions == 0
    assert bench.cache.num_tokens > 20


def test_a_prefix_of_a_waiting_request_that_does_not_fit_is_not_kept():
    bench = bench_of(num_slots=40, context_len=40)
    run_alone(bench, "old", prompt(1, 20), num_new=2)
    bench.add("runs", prompt(2, 15), num_new=20)
    bench.scheduler.step()
    bench.add("waits", [*prompt(1, 20), 3], num_new=15)
    bench.run()
    assert bench.tokens("runs") == expected_tokens(prompt(2, 15), 20)
    assert bench.tokens("waits") == expected_tokens([*prompt(1, 20), 3], 15)
    assert bench.state().num_used_tokens == 0


def test_the_cache_is_flushed_when_nothing_runs_only():
    bench = bench_of()
    bench.add("r", prompt(1, 20), num_new=5)
    bench.scheduler.step()
    assert bench.flush() is False
    bench.run()
    assert bench.allocator.available() < bench.allocator.num_tokens
    assert bench.flush() is True
    bench.assert_all_is_free()
    assert run_alone(bench, "again", prompt(1, 20)) == (20, 0)


def test_without_a_cache_there_is_nothing_to_flush():
    bench = bench_of(cache=False)
    assert run_alone(bench, "a", prompt(1, 20)) == run_alone(bench, "b", prompt(1, 20)) == (20, 0)
    assert bench.flush() is True


def check_memory(bench):
    """Every slot is free, or in the tree once, or one request's own; and locks are those of the requests that run."""
    allocator, cache, host = bench.allocator, bench.cache, bench.pool.host
    free = allocator._free[: allocator.available()].tolist()
    in_tree = [slot for node in cache.nodes() for slot in node.slots.tolist()]
    own, users = [], dict.fromkeys(cache.nodes(), 0)
    for micro_batch in bench.scheduler._micro_batches:
        for req in micro_batch.reqs:
            row = host[req.row]
            own += row[req.num_shared : req.num_cached].tolist()
            assert row[: req.num_shared].tolist() == cache.slots_of(req.cache_node).tolist()
            node = req.cache_node
            while node.parent is not None:
                users[node] += 1
                node = node.parent
    assert sorted(free + in_tree + own) == list(range(1, allocator.num_tokens + 1))
    assert all(node.num_users == count for node, count in users.items())
    assert cache.num_evictable == sum(len(node.tokens) for node, count in users.items() if not count)


@dataclasses.dataclass
class Asked:
    prompt_ids: list[int]
    num_new: int
    is_aborted: bool = False


prompts = st.builds(
    lambda head, tail: [3, 1, 4, 1, 5, 9][:head] + tail,
    st.integers(0, 6),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.tuples(prompts, st.integers(1, 15))),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("flush"), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(todo=events, num_slots=st.integers(36, 70), chunk=st.integers(3, 20))
def test_random_requests_never_leak_share_wrongly_or_change(todo, num_slots, chunk):
    bench = bench_of(num_slots=num_slots, context_len=36, max_running=3, chunk=chunk)
    asked: dict[str, Asked] = {}
    for name, value in todo:
        if name == "add":
            rid = f"r{len(asked)}"
            asked[rid] = Asked(*value)
            bench.add(rid, value[0], num_new=value[1], incremental=True)
        elif name == "abort" and asked:
            rid = f"r{value % len(asked)}"
            asked[rid].is_aborted |= not bench.outputs.get(rid) or bench.reason(rid) is None
            bench.scheduler.handle([AbortRequest(rid)])
        elif name == "step":
            for _ in range(value):
                bench.scheduler.step()
                check_memory(bench)
        elif name == "flush":
            bench.flush()
        check_memory(bench)
    bench.run()
    check_memory(bench)
    for rid, request in asked.items():
        if not request.is_aborted:
            assert bench.tokens(rid) == expected_tokens(request.prompt_ids, request.num_new)
    assert bench.state().num_used_tokens == 0
    assert bench.flush()
    bench.assert_all_is_free()
