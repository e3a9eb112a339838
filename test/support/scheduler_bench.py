"""A scheduler without a model.

`FakeDevice` stands where the model and its device would: it stores token ids in a KV cache of its own, at the slots
it is told to, and predicts the next token from what it reads back through the page table. A wrong slot, row, position
or order changes the tokens. With overlap it has no other word of the latest tokens than its own table.
"""

from __future__ import annotations

import torch

from sglang.srt.managers.io_struct import (
    BatchTokenOutput,
    CacheFlushed,
    FlushCache,
    GetInternalState,
    InternalState,
    Shutdown,
    TokenizedRequest,
)
from sglang.srt.managers.request_memory import RequestMemory
from sglang.srt.managers.schedule_policy import PrefillLimits
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool, TokenAllocator
from sglang.srt.mem_cache.radix_cache import RadixCache
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

    def __init__(self, pool: ReqToTokenPool, num_slots: int, overlap: bool = False) -> None:
        self.latest = torch.full((pool.size + 1,), -(10**6)) if overlap else None
        self.num_in_flight = self.most_in_flight = 0
        self.pool = pool
        self.kv = torch.full((num_slots + 1,), -(10**6), dtype=torch.int64)
        self.modes: list[ForwardMode] = []
        self.batch_sizes: list[int] = []
        self.num_tokens: list[int] = []
        self.launched: list[tuple[ForwardMode, list[str], list[int] | None]] = []
        self.all_may_replay: list[bool] = []
        self.prefilled: list[str] = []

    def may_replay(self, forward_batch):
        return forward_batch.mode is not ForwardMode.EXTEND

    def launch(self, forward_batch, reqs):
        assert len(reqs) == forward_batch.batch_size
        self.modes.append(forward_batch.mode)
        self.batch_sizes.append(forward_batch.batch_size)
        self.num_tokens.append(forward_batch.num_tokens)
        if forward_batch.mode is ForwardMode.EXTEND:
            self.prefilled += [req.rid for req in reqs]
        if self.latest is not None and forward_batch.mode is ForwardMode.DECODE:
            forward_batch.input_ids.copy_(self.latest[forward_batch.req_pool_indices])
        self.kv[forward_batch.out_cache_loc] = forward_batch.input_ids
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens_cpu, strict=True)
        tokens = [next_token(self.kv[self.pool.req_to_token[row, :n].long()].tolist()) for row, n in rows]
        if self.latest is not None:
            self.latest[forward_batch.req_pool_indices] = torch.tensor(tokens)
        self.all_may_replay.append(forward_batch.all_may_replay)
        self.launched.append((forward_batch.mode, [req.rid for req in reqs], forward_batch.global_num_tokens))
        if reqs:  # an idle batch has no tokens to take
            self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)

        def take():
            self.num_in_flight -= 1
            return tokens

        return take


class SchedulerBench:
    """A scheduler over real pools, fed by hand one step at a time."""

    overlap = False
    """Whether new ones overlap; a test module sets it for all its tests."""

    def __init__(
        self,
        num_slots=200,
        context_len=100,
        max_running=8,
        chunk=16,
        chunked=True,
        eos=(EOS,),
        stream_interval=1,
        cache=False,
        num_micro_batches=1,
        share_load=None,
    ):
        overlap = self.overlap and num_micro_batches == 1 and share_load is None
        self.pool = ReqToTokenPool(max_running, context_len, "cpu")
        self.allocator = TokenAllocator(num_slots)
        self.cache = RadixCache() if cache else None
        self.device = FakeDevice(self.pool, num_slots, overlap)
        self.outputs: dict[str, list] = {}
        self.states: list[InternalState] = []
        self.flushed: list[bool] = []
        self.inbox: list = []
        self.scheduler = Scheduler(
            executor=self.device,
            memory=RequestMemory(self.pool, self.allocator, self.cache),
            limits=PrefillLimits(chunk, max_running, chunked),
            context_len=context_len,
            eos_token_ids=eos,
            receive=self.receive,
            send=self.send,
            stream_interval=stream_interval,
            num_micro_batches=num_micro_batches,
            share_load=share_load,
            overlap=overlap,
        )

    def receive(self, is_idle):
        messages, self.inbox = self.inbox, []
        return messages or ([Shutdown()] if is_idle else [])

    def send(self, message):
        if isinstance(message, BatchTokenOutput):
            for output in message.outputs:
                self.outputs.setdefault(output.rid, []).append(output)
        elif isinstance(message, CacheFlushed):
            self.flushed.append(message.is_done)
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

    def flush(self):
        self.scheduler.handle([FlushCache(1)])
        return self.flushed[-1]

    def assert_all_is_free(self):
        assert self.allocator.available() == self.allocator.num_tokens
        assert self.pool.available() == self.pool.size


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 17) % VOCAB for i in range(length)]
