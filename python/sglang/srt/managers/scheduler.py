"""Continuous batching on one rank: take what arrived, pick a batch, run it, hand out its tokens, again.

Everything that changes the state comes in through `receive`, and every choice depends on nothing else, so ranks
that receive the same messages and sample the same tokens stay in step without talking about it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang.srt.managers.io_struct import (
    AbortRequest,
    BatchTokenOutput,
    GetInternalState,
    InternalState,
    MainMessage,
    Shutdown,
    TokenizedRequest,
    TokenOutput,
    WorkerMessage,
)
from sglang.srt.managers.schedule_batch import Batch, Req, RequestMemory
from sglang.srt.managers.schedule_policy import NewTokenRatio, PrefillLimits, pick_prefill, pick_retracted
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode

logger = logging.getLogger(__name__)

Receive = Callable[[bool], Sequence[MainMessage]]
"""Called with whether there is nothing else to do; gives the messages to handle now, in order."""


class Executor(Protocol):
    """Runs a batch on the device. The device side of the scheduler is this one method."""

    device: torch.device

    def execute(self, forward_batch: ForwardBatch, reqs: Sequence[Req]) -> list[int]:
        """The next token of each sequence, on the CPU."""
        ...


class Scheduler:
    """The requests of one rank. `receive` and `send` are its only ways in and out."""

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
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._limits = limits
        self._max_total_tokens = min(context_len, memory.num_tokens)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._receive = receive
        self._send = send
        self._stream_interval = stream_interval
        self._ratio = NewTokenRatio()
        self._waiting: deque[Req] = deque()
        self._unfinished: Req | None = None
        self._running: list[Req] = []
        self._num_retractions = 0
        self._is_stopping = False

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._unfinished or self._running)

    def run(self) -> None:
        """Serve until a `Shutdown` arrives."""
        while not self._is_stopping:
            self.handle(self._receive(self.is_idle))
            self.step()

    def handle(self, messages: Sequence[MainMessage]) -> None:
        for message in messages:
            match message:
                case TokenizedRequest():
                    self._add(message)
                case AbortRequest(rid=rid):
                    self._abort(rid)
                case GetInternalState(ticket=ticket):
                    self._send(self._internal_state(ticket))
                case Shutdown():
                    self._is_stopping = True

    def step(self) -> None:
        """One forward, if there is anything to run, and the outputs that come of it."""
        batch = self._next_prefill() or self._next_decode()
        if batch is None:
            return
        forward_batch = self._memory.forward_batch(batch, self._executor.device)
        token_ids = self._executor.execute(forward_batch, batch.reqs)
        self._take_tokens(batch, token_ids)

    def _add(self, message: TokenizedRequest) -> None:
        req = Req.from_message(message, self._max_total_tokens)
        if req.max_new_tokens_left <= 0:
            # The main process refuses these; it may not know this rank's limit yet.
            reason = f"{len(req.prompt_ids)} prompt tokens leave no room below {self._max_total_tokens}"
            self._send(BatchTokenOutput([TokenOutput(req.rid, [], "abort", message=reason)]))
            return
        self._waiting.append(req)

    def _abort(self, rid: str) -> None:
        unfinished = [self._unfinished] if self._unfinished else []
        for req in (*self._running, *unfinished, *self._waiting):
            if req.rid == rid:
                self._memory.release(req)
                self._forget(req)
                return

    def _forget(self, req: Req) -> None:
        if req is self._unfinished:
            self._unfinished = None
        elif req in self._running:
            self._running.remove(req)
        else:
            self._waiting.remove(req)

    def _next_prefill(self) -> Batch | None:
        picked = pick_prefill(
            self._unfinished,
            self._waiting,
            self._running,
            self._memory.num_available,
            self._limits,
            self._ratio,
        )
        if not picked:
            return None
        for req, num_new in picked:
            if req is not self._unfinished:
                assert req is self._waiting[0], "requests start in the order of their arrival"
                self._waiting.popleft()
            self._unfinished = req if num_new < req.num_to_extend else None
        return Batch(ForwardMode.EXTEND, [req for req, _ in picked], [num_new for _, num_new in picked])

    def _next_decode(self) -> Batch | None:
        if not self._running:
            return None
        for req in pick_retracted(self._running, self._memory.num_available):
            self._memory.release(req)
            self._running.remove(req)
            self._waiting.appendleft(req)
            self._num_retractions += 1
            self._ratio.after_retraction()
            logger.info("KV pool is full: request %s waits again, %d run", req.rid, len(self._running))
        self._ratio.after_decode()
        return Batch(ForwardMode.DECODE, list(self._running), [1] * len(self._running))

    def _take_tokens(self, batch: Batch, token_ids: Sequence[int]) -> None:
        outputs = []
        for req, token_id in zip(batch.reqs, token_ids, strict=True):
            if req.num_to_extend > 0:
                continue  # A prompt that goes on in the next forward: nothing was predicted yet.
            req.append(token_id, self._eos_token_ids)
            if batch.mode is ForwardMode.EXTEND:
                self._running.append(req)
            if output := req.take_output(self._stream_interval):
                outputs.append(output)
            if req.finish_reason is not None:
                self._memory.release(req)
        self._running = [req for req in self._running if req.finish_reason is None]
        if outputs:
            self._send(BatchTokenOutput(outputs))

    def _internal_state(self, ticket: int) -> InternalState:
        return InternalState(
            ticket=ticket,
            max_total_num_tokens=self._memory.num_tokens,
            num_used_tokens=self._memory.num_used,
            num_running_reqs=len(self._running) + (self._unfinished is not None),
            num_waiting_reqs=len(self._waiting),
            num_retractions=self._num_retractions,
        )
