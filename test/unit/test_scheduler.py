"""Continuous batching over the real pools: every sequence gets the tokens it would get alone, and gives all back.

`FakeDevice` stands where the model and its device would: it stores token ids in a KV cache of its own, at the slots
it is told to, and predicts the next token from what it reads back through the page table. A wrong slot, row, position
or order changes the tokens.
"""

from __future__ import annotations

import pytest
import torch

from sglang.srt.managers.io_struct import (
    AbortRequest,
    BatchTokenOutput,
    GetInternalState,
    InternalState,
    Shutdown,
    TokenizedRequest,
)
from sglang.srt.managers.schedule_batch import Req, RequestMemory
from sglang.srt.managers.schedule_policy import PrefillLimits, pick_retracted
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool, TokenAllocator
from sglang.srt.model_executor.forward_batch import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 1000
EOS = 7


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(tokens)) % VOCAB


def expected_tokens(prompt: list[int], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeDevice:
    device = torch.device("cpu")

    def __init__(self, pool: ReqToTokenPool, num_slots: int) -> None:
        self.pool = pool
        self.kv = torch.full((num_slots + 1,), -(10**6), dtype=torch.int64)
        self.modes: list[ForwardMode] = []
        self.batch_sizes: list[int] = []
        self.num_tokens: list[int] = []
        self.prefilled: list[str] = []

    def launch(self, forward_batch, reqs):
        assert len(reqs) == forward_batch.batch_size
        self.modes.append(forward_batch.mode)
        self.batch_sizes.append(forward_batch.batch_size)
        self.num_tokens.append(forward_batch.num_tokens)
        if forward_batch.mode is ForwardMode.EXTEND:
            self.prefilled += [req.rid for req in reqs]
        self.kv[forward_batch.out_cache_loc] = forward_batch.input_ids
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens_cpu, strict=True)
        tokens = [next_token(self.kv[self.pool.req_to_token[row, :n].long()].tolist()) for row, n in rows]
        return lambda: tokens


class Bench:
    """A scheduler over real pools, fed by hand one step at a time."""

    def __init__(
        self,
        num_slots=200,
        context_len=100,
        max_running=8,
        chunk=16,
        chunked=True,
        eos=(EOS,),
        stream_interval=1,
    ):
        self.pool = ReqToTokenPool(max_running, context_len, "cpu")
        self.allocator = TokenAllocator(num_slots)
        self.device = FakeDevice(self.pool, num_slots)
        self.outputs: dict[str, list] = {}
        self.states: list[InternalState] = []
        self.inbox: list = []
        self.scheduler = Scheduler(
            executor=self.device,
            memory=RequestMemory(self.pool, self.allocator),
            limits=PrefillLimits(chunk, max_running, chunked),
            context_len=context_len,
            eos_token_ids=eos,
            receive=self.receive,
            send=self.send,
            stream_interval=stream_interval,
        )

    def receive(self, is_idle):
        messages, self.inbox = self.inbox, []
        return messages or ([Shutdown()] if is_idle else [])

    def send(self, message):
        if isinstance(message, BatchTokenOutput):
            for output in message.outputs:
                self.outputs.setdefault(output.rid, []).append(output)
        else:
            self.states.append(message)

    def add(self, rid, prompt, num_new=8, incremental=False, **sampling):
        sampling = SamplingParams(max_new_tokens=num_new, **{"ignore_eos": True, **sampling})
        self.scheduler.handle([TokenizedRequest(rid, prompt, sampling, incremental)])

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                return
            self.scheduler.step()
        raise AssertionError("the scheduler does not come to an end")

    def tokens(self, rid):
        return [token for output in self.outputs[rid] for token in output.token_ids]

    def reason(self, rid):
        return self.outputs[rid][-1].finish_reason

    def state(self):
        self.scheduler.handle([GetInternalState(1)])
        return self.states[-1]

    def assert_all_is_free(self):
        assert self.allocator.available() == self.allocator.num_tokens
        assert self.pool.available() == self.pool.size


def request(rid: str, num_cached: int) -> Req:
    req = Req(rid, prompt(1, num_cached), SamplingParams(), incremental=False, max_total_tokens=100)
    req.num_cached = num_cached
    return req


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 17) % VOCAB for i in range(length)]


def test_requests_of_different_lengths_get_the_tokens_they_would_get_alone():
    bench = Bench()
    for i, length in enumerate([1, 5, 16, 17, 40, 3]):
        bench.add(f"r{i}", prompt(i, length), num_new=5 + i)
    bench.run()
    for i, length in enumerate([1, 5, 16, 17, 40, 3]):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, length), 5 + i)
        assert bench.reason(f"r{i}") == "length"
    bench.assert_all_is_free()


def test_a_prefill_forward_never_exceeds_the_chunk_and_fills_it():
    bench = Bench(chunk=16)
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
    bench = Bench(chunk=16, chunked=False)
    bench.add("a", prompt(1, 10), num_new=1)
    bench.add("b", prompt(2, 10), num_new=1)
    bench.add("c", prompt(3, 20), num_new=1)
    bench.run()
    assert bench.device.num_tokens == [10, 10, 16, 4]
    assert bench.tokens("c") == expected_tokens(prompt(3, 20), 1)


def test_decode_batches_reach_but_do_not_exceed_max_running_requests():
    bench = Bench(max_running=3)
    for i in range(7):
        bench.add(f"r{i}", prompt(i, 4), num_new=6)
    bench.run()
    assert max(bench.device.batch_sizes) == 3
    assert all(bench.tokens(f"r{i}") == expected_tokens(prompt(i, 4), 6) for i in range(7))
    bench.assert_all_is_free()


def test_a_request_that_arrives_later_joins_the_running_batch():
    bench = Bench()
    bench.add("first", prompt(1, 4), num_new=10)
    for _ in range(4):
        bench.scheduler.step()
    bench.add("second", prompt(2, 4), num_new=10)
    bench.run()
    assert 2 in bench.device.batch_sizes
    assert bench.tokens("first") == expected_tokens(prompt(1, 4), 10)
    assert bench.tokens("second") == expected_tokens(prompt(2, 4), 10)


def test_a_full_pool_puts_the_latest_request_back_and_its_tokens_stay_the_same():
    bench = Bench(num_slots=60, context_len=60, max_running=4)
    for i in range(4):
        bench.add(f"r{i}", prompt(i, 6), num_new=40, incremental=True)
    bench.run()
    assert bench.state().num_retractions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected_tokens(prompt(i, 6), 40)
    assert bench.reason("r0") == "length"
    bench.assert_all_is_free()


def test_the_latest_requests_are_put_back_and_no_more_than_needed():
    running = [request(f"r{i}", 10) for i in range(4)]
    assert [req.rid for req in pick_retracted(running, num_available_tokens=4)] == []
    assert [req.rid for req in pick_retracted(running, num_available_tokens=3)] == ["r3"]
    for req in running:
        req.num_cached = 1
    assert [req.rid for req in pick_retracted(running, num_available_tokens=0)] == ["r3", "r2"]


def test_a_request_that_was_put_back_goes_before_those_that_never_ran():
    bench = Bench(num_slots=42, context_len=42, max_running=2, chunk=64)
    for i in range(3):
        bench.add(f"r{i}", prompt(i, 5), num_new=20)
    bench.run()
    assert bench.state().num_retractions == 1
    assert bench.device.prefilled == ["r0", "r1", "r1", "r2"]


def test_an_end_token_stops_unless_it_is_ignored():
    tokens = expected_tokens(prompt(3, 5), 20)
    bench = Bench(eos=(tokens[4],))
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
    bench = Bench()
    bench.add("r", prompt(3, 5), num_new=20, stop_token_ids=[tokens[2]])
    bench.run()
    assert bench.tokens("r") == tokens[:3]
    assert bench.reason("r") == "stop"


def test_the_context_length_ends_a_request():
    bench = Bench(context_len=20)
    bench.add("r", prompt(1, 12), num_new=100)
    bench.run()
    assert bench.tokens("r") == expected_tokens(prompt(1, 12), 8)
    assert bench.reason("r") == "length"
    bench.assert_all_is_free()


def test_a_prompt_that_can_never_fit_is_refused_and_others_are_served():
    bench = Bench(num_slots=30, context_len=100)
    bench.add("huge", prompt(1, 30), num_new=4)
    bench.add("fine", prompt(2, 5), num_new=4)
    bench.run()
    assert bench.reason("huge") == "abort"
    assert "30" in bench.outputs["huge"][0].message
    assert bench.tokens("fine") == expected_tokens(prompt(2, 5), 4)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_aborted_request_frees_its_memory_whether_it_waits_prefills_or_runs(num_steps):
    bench = Bench(chunk=16)
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
    bench = Bench()
    bench.add("streams", prompt(1, 4), num_new=6, incremental=True)
    bench.add("waits", prompt(2, 4), num_new=6)
    bench.run()
    assert [len(output.token_ids) for output in bench.outputs["streams"]] == [1] * 6
    assert [len(output.token_ids) for output in bench.outputs["waits"]] == [6]


def test_the_stream_interval_spaces_all_but_the_first_token():
    bench = Bench(stream_interval=4)
    bench.add("r", prompt(1, 4), num_new=10, incremental=True)
    bench.run()
    assert [len(output.token_ids) for output in bench.outputs["r"]] == [1, 4, 4, 1]
    assert bench.tokens("r") == expected_tokens(prompt(1, 4), 10)


def test_the_internal_state_counts_what_runs_waits_and_is_held():
    bench = Bench(num_slots=200, max_running=2)
    for i in range(3):
        bench.add(f"r{i}", prompt(i, 5), num_new=10)
    bench.scheduler.step()
    state = bench.state()
    assert (state.num_running_reqs, state.num_waiting_reqs, state.num_used_tokens) == (2, 1, 10)
    assert state.max_total_num_tokens == 200
    bench.run()
    assert bench.state().num_used_tokens == 0


def test_the_loop_handles_messages_in_order_and_ends_on_shutdown():
    bench = Bench()
    bench.inbox = [TokenizedRequest("r", prompt(1, 4), SamplingParams(max_new_tokens=3, ignore_eos=True))]
    bench.scheduler.run()
    assert bench.tokens("r") == expected_tokens(prompt(1, 4), 3)
    bench.assert_all_is_free()


def test_two_ranks_that_receive_the_same_messages_run_the_same_batches():
    def run():
        bench = Bench(num_slots=60, context_len=60, max_running=4)
        for i in range(6):
            bench.add(f"r{i}", prompt(i, 3 + 4 * i), num_new=20)
            bench.scheduler.step()
            if i == 4:
                bench.scheduler.handle([AbortRequest("r2")])
        bench.run()
        return bench.device.modes, bench.device.num_tokens, bench.device.batch_sizes

    assert run() == run()
