"""Continuous batching on one rank: take what arrived, pick a batch, run it, hand out its tokens, again.

Everything that changes the state comes in through `receive`, and every choice depends on nothing else, so ranks
that receive the same messages and sample the same tokens stay in step without talking about it.

With overlap a batch is launched before the tokens of the one before it are taken, so that the device never waits for
this process. What a request's token decides (an end token, a stop string, an abort) then takes effect one forward
later, and the token which that forward chose for it is dropped. Only the host is late: lengths are known ahead.

With pipeline stages there are as many micro-batches as stages, each with requests of its own, and they take turns:
while the tokens of one are on their way through the stages, this rank runs its part of the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang.srt.managers.io_struct import (
    AbortRequest,
    BatchTokenOutput,
    CacheFlushed,
    FlushCache,
    GetInternalState,
    InternalState,
    MainMessage,
    Shutdown,
    TokenizedRequest,
    TokenOutput,
    WorkerMessage,
)
from sglang.srt.managers.request_memory import RequestMemory
from sglang.srt.managers.schedule_batch import Batch, Req
from sglang.srt.managers.schedule_policy import (
    NewTokenRatio,
    PrefillLimits,
    fair_share,
    pick_prefill,
)
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

logger = logging.getLogger(__name__)

Receive = Callable[[bool], Sequence[MainMessage]]
"""Called with whether there is nothing else to do; gives the messages to handle now, in order."""


Tokens = Callable[[], list[int]]
"""Gives the next token of each sequence of a batch; waits for them if need be."""


class Executor(Protocol):
    """Runs a batch on the device: the device side of the scheduler."""

    device: torch.device

    def may_replay(self, forward_batch: ForwardBatch) -> bool:
        """Whether a captured forward could run `forward_batch` (decode or idle), if those of all replicas could."""
        ...

    def launch(self, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> Tokens:
        """Run this rank's part of the forward. Batches are launched, and their tokens taken, in one order."""
        ...


@dataclass(frozen=True)
class Load:
    """What the attention-DP replicas have to do at this step: the tokens of each, whether one has any work left, and
    whether all could replay a captured forward."""

    num_tokens: list[int]
    is_busy: bool
    all_may_replay: bool = False


ShareLoad = Callable[[int, bool, bool], Load]
"""Called once in each step with this replica's tokens, whether it has work and whether it could replay a captured
forward; gives what all have."""


@dataclass
class Launched:
    """A batch under way. `is_kept[i]` says that request i takes its token: its prompt does not go on after this."""

    batch: Batch
    is_kept: list[bool]
    tokens: Tokens


@dataclass
class MicroBatch:
    """Requests that run together. `unfinished` is the one whose prompt is not all in the KV pool yet."""

    running: list[Req] = field(default_factory=list)
    unfinished: Req | None = None
    in_flight: deque[Launched] = field(default_factory=deque)

    @property
    def reqs(self) -> list[Req]:
        return [*self.running, self.unfinished] if self.unfinished else self.running


class Scheduler:
    """The requests of one rank. `receive` and `send` are its only ways in and out.

    `share_load` is for ranks of attention-DP replicas, which take part in each other's forwards. `overlap` is for a
    single micro-batch and an executor that keeps the latest tokens on the device.
    """

    def __init__(
        self,
        executor: Executor,
        memory: RequestMemory,
        limits: PrefillLimits,
        context_len: int,
        eos_token_ids: Sequence[int],
        receive: Receive,
        send: Callable[[WorkerMessage], None],
        stream_interval: int = 1,
        num_micro_batches: int = 1,
        share_load: ShareLoad | None = None,
        overlap: bool = False,
    ) -> None:
        assert not overlap or (num_micro_batches == 1 and share_load is None)
        self._executor = executor
        self._memory = memory
        self._limits = limits
        self._max_total_tokens = min(context_len, memory.num_tokens)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._receive = receive
        self._send = send
        self._stream_interval = stream_interval
        self._share_load = share_load
        self._overlap = overlap
        self._ratio = NewTokenRatio()
        self._waiting: deque[Req] = deque()
        self._micro_batches = [MicroBatch() for _ in range(num_micro_batches)]
        self._turn = 0
        self._num_retractions = 0
        self._replicas_are_busy = False
        self._is_stopping = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(
            micro_batch.in_flight or micro_batch.reqs for micro_batch in self._micro_batches
        )

    def run(self) -> None:
        """Serve until a `Shutdown` arrives."""
        while True:
            self.handle(self._receive(self.is_idle and not self._replicas_are_busy))
            if self._is_stopping:
                break
            self.step()
        self._drain()

    def handle(self, messages: Sequence[MainMessage]) -> None:
        for message in messages:
            match message:
                case TokenizedRequest():
                    self._add(message)
                case AbortRequest(rid=rid):
                    self._abort(rid)
                case GetInternalState(ticket=ticket):
                    self._send(self._internal_state(ticket))
                case FlushCache(ticket=ticket):
                    if self._overlap:  # The forward under way may be for requests that have ended.
                        self._take_tokens(self._micro_batches[0])
                    if self.is_idle:
                        self._memory.flush()
                    self._send(CacheFlushed(ticket=ticket, is_done=self.is_idle))
                case Shutdown():
                    self._is_stopping = True

    def step(self) -> None:
        """A forward of the micro-batch whose turn it is, if there is anything to run, and the tokens of the next one.

        A single micro-batch is its own next one; with overlap the tokens are those of its forward before.
        """
        micro_batch = self._micro_batches[self._turn]
        self._turn = (self._turn + 1) % len(self._micro_batches)
        batch = self._next_prefill(micro_batch) or self._next_decode(micro_batch)
        if self._share_load is None:
            if batch is not None:
                self._launch(micro_batch, batch, self._memory.forward_batch(batch, self._executor.device))
        else:
            self._launch_with_replicas(self._share_load, micro_batch, batch)
        num_left = 1 if self._overlap and batch is not None else 0
        self._take_tokens(self._micro_batches[self._turn], num_left)

    def _launch_with_replicas(
        self, share_load: ShareLoad, micro_batch: MicroBatch, batch: Batch | None
    ) -> None:
        """Run `batch`, or take part in the forward of other replicas with an idle one."""
        device = self._executor.device
        forward_batch = (
            ForwardBatch.idle(device) if batch is None else self._memory.forward_batch(batch, device)
        )
        load = share_load(
            forward_batch.num_tokens,
            batch is not None or not self.is_idle,
            self._executor.may_replay(forward_batch),
        )
        self._replicas_are_busy = load.is_busy
        if not any(load.num_tokens):
            return
        forward_batch.global_num_tokens = load.num_tokens
        forward_batch.all_may_replay = load.all_may_replay
        if batch is None:
            self._executor.launch(forward_batch, [])
        else:
            self._launch(micro_batch, batch, forward_batch)

    def _launch(self, micro_batch: MicroBatch, batch: Batch, forward_batch: ForwardBatch) -> None:
        tokens = self._executor.launch(forward_batch, batch.reqs)
        is_kept = [req.num_to_extend <= 0 for req in batch.reqs]
        micro_batch.in_flight.append(Launched(batch, is_kept, tokens))
        if batch.mode is ForwardMode.EXTEND:
            self._memory.publish(batch.reqs)
            micro_batch.running += [req for req, kept in zip(batch.reqs, is_kept, strict=True) if kept]

    def _drain(self) -> None:
        """Take what other ranks have sent or will send, so that they can leave as well."""
        for _ in self._micro_batches:
            micro_batch = self._micro_batches[self._turn]
            self._turn = (self._turn + 1) % len(self._micro_batches)
            for launched in micro_batch.in_flight:
                launched.tokens()

    def _add(self, message: TokenizedRequest) -> None:
        req = Req.from_message(message, self._max_total_tokens)
        if req.max_new_tokens_left <= 0:
            # The main process refuses these; it may not know this rank's limit yet.
            reason = f"{len(req.prompt_ids)} prompt tokens leave no room below {self._max_total_tokens}"
            self._send(BatchTokenOutput([TokenOutput(req.rid, [], "abort", message=reason)]))
            return
        self._waiting.append(req)

    def _abort(self, rid: str) -> None:
        waiting = (req for req in self._waiting if req.rid == rid)
        if (req := next(waiting, None)) is not None:
            self._waiting.remove(req)
            return
        for micro_batch in self._micro_batches:
            for req in micro_batch.reqs:
                if req.rid == rid:
                    # A forward that is under way may still use its memory: it comes before any that reuses it.
                    self._memory.release(req)
                    req.finish_reason = "abort"
                    self._forget(micro_batch, req)
                    return

    def _forget(self, micro_batch: MicroBatch, req: Req) -> None:
        if req is micro_batch.unfinished:
            micro_batch.unfinished = None
        else:
            micro_batch.running.remove(req)

    def _elsewhere(self, micro_batch: MicroBatch) -> list[Req]:
        """The requests of the other micro-batches."""
        if len(self._micro_batches) == 1:
            return []
        return [req for other in self._micro_batches if other is not micro_batch for req in other.reqs]

    def _next_prefill(self, micro_batch: MicroBatch) -> Batch | None:
        if not self._waiting and micro_batch.unfinished is None:
            return None
        limits, elsewhere = self._limits, self._elsewhere(micro_batch)
        if len(self._micro_batches) > 1:
            num_reqs = len(self._waiting) + len(elsewhere) + len(micro_batch.reqs)
            limits = fair_share(len(self._micro_batches), num_reqs, limits)
        picked = pick_prefill(
            micro_batch.unfinished,
            self._waiting,
            micro_batch.running,
            self._memory.num_available,
            limits,
            self._ratio,
            self._memory,
            elsewhere,
        )
        if not picked:
            return None
        for req, num_new in picked:
            if req is not micro_batch.unfinished:
                assert req is self._waiting[0], "requests start in the order of their arrival"
                self._waiting.popleft()
            micro_batch.unfinished = req if num_new < req.num_to_extend else None
        return Batch(ForwardMode.EXTEND, [req for req, _ in picked], [num_new for _, num_new in picked])

    def _next_decode(self, micro_batch: MicroBatch) -> Batch | None:
        self._make_room(micro_batch)
        reqs = [req for req in micro_batch.running if not req.is_at_end]
        if not reqs:
            return None
        self._ratio.after_decode()
        return Batch(ForwardMode.DECODE, reqs, [1] * len(reqs))

    def _make_room(self, micro_batch: MicroBatch) -> None:
        """See to it that each running request can get one more token."""
        if self._memory.num_available >= len(micro_batch.running):
            return
        if self._overlap:  # What has ended makes room, and what is put back must be known whole.
            self._take_tokens(micro_batch)
        running = micro_batch.running
        # One request that is alone always fits; with others elsewhere the last one may have to make room for them.
        num_kept = 0 if self._elsewhere(micro_batch) else 1
        while len(running) > num_kept and self._memory.num_available < len(running):
            self._retract(running.pop())
            logger.info("KV pool is full: request %s waits again, %d run", self._waiting[0].rid, len(running))

    def _retract(self, req: Req) -> None:
        """Put `req` back in front of those that wait."""
        self._memory.release(req)
        self._waiting.appendleft(req)
        self._num_retractions += 1
        self._ratio.after_retraction()

    def _take_tokens(self, micro_batch: MicroBatch, num_left: int = 0) -> None:
        """Take the tokens of all but the `num_left` latest forwards under way."""
        while len(micro_batch.in_flight) > num_left:
            self._take_tokens_of(micro_batch.in_flight.popleft(), micro_batch)

    def _take_tokens_of(self, launched: Launched, micro_batch: MicroBatch) -> None:
        outputs = []
        for req, is_kept, token_id in zip(
            launched.batch.reqs, launched.is_kept, launched.tokens(), strict=True
        ):
            if req.finish_reason is not None or not is_kept:
                continue  # It ended meanwhile, or its prompt goes on in the next forward: nothing was predicted.
            req.append(token_id, self._eos_token_ids)
            if output := req.take_output(self._stream_interval):
                outputs.append(output)
            if req.finish_reason is not None:
                self._memory.release(req)
        micro_batch.running = [req for req in micro_batch.running if req.finish_reason is None]
        if outputs:
            self._send(BatchTokenOutput(outputs))

    def _internal_state(self, ticket: int) -> InternalState:
        return InternalState(
            ticket=ticket,
            max_total_num_tokens=self._memory.num_tokens,
            num_used_tokens=self._memory.num_used,
            num_running_reqs=sum(len(micro_batch.reqs) for micro_batch in self._micro_batches),
            num_waiting_reqs=len(self._waiting),
            num_retractions=self._num_retractions,
        )
