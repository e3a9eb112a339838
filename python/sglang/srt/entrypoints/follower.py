"""A process of the server that has ranks but not the first one: another machine's, or one of torchrun's.

It serves no HTTP. It starts its workers, watches them, and ends when they do: they leave by themselves when the
server stops, since the first rank tells all of them.
"""

from __future__ import annotations

import asyncio
import logging
import signal

import msgspec
import zmq
import zmq.asyncio

from sglang.srt.managers.io_struct import Fatal, Ready, WorkerMessage
from sglang.srt.managers.ipc import Endpoints, without_limits
from sglang.srt.managers.launch_plan import LaunchPlan
from sglang.srt.managers.launcher import WorkerGroup
from sglang.srt.managers.worker_ends import WorkerEnds
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LEAVE_WITHIN_S = 6.0
"""How long workers may take to leave when all processes are asked to stop: the first rank ends its requests first."""

WORKER_GRACE_S = 3.0
"""How long workers may take to leave before they are killed."""


class Follower:
    """One run; gives the exit code: 0 after a clean stop of the server or a signal, 1 after a failure."""

    def __init__(self, server_args: ServerArgs, plan: LaunchPlan, endpoints: Endpoints) -> None:
        self._args, self._plan, self._endpoints = server_args, plan, endpoints
        self._workers = WorkerGroup()
        self._ends = WorkerEnds()
        self._running = set(plan.ranks)
        self._is_stopping = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        context = zmq.asyncio.Context()
        pull = without_limits(context.socket(zmq.PULL))
        pull.bind(self._endpoints.to_main)
        listening = asyncio.ensure_future(self._listen(pull))
        try:
            self._workers.start(self._args, self._endpoints, plan=self._plan)
            self._workers.on_exit(loop.add_reader, self._on_worker_exit)
            return await self._end
        finally:
            for rank in self._running:
                loop.remove_reader(self._workers.processes[rank].sentinel)
            self._workers.stop(WORKER_GRACE_S)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            pull.close()
            context.term()

    async def _listen(self, pull: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(WorkerMessage)
        num_ready = 0
        while True:
            match decoder.decode(await pull.recv()):
                case Ready():
                    num_ready += 1
                    if num_ready == len(self._plan.ranks):
                        ranks = self._plan.ranks
                        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
                        logger.info("Ready: %s of %s", which, self._args.model_name)
                case Fatal() as message:
                    self._ends.add_last_words(message)
                    self._judge_soon()

    def _on_worker_exit(self, rank: int) -> None:
        loop, process = asyncio.get_running_loop(), self._workers.processes[rank]
        loop.remove_reader(process.sentinel)
        self._running.discard(rank)
        process.join()
        self._ends.add_exit(rank, process.exitcode)
        if process.exitcode == 0 and not self._running:
            self._finish(0)
        elif process.exitcode != 0:
            self._judge_soon()

    def _judge_soon(self) -> None:
        asyncio.get_running_loop().call_later(self._ends.wait_s(), self._fail)

    def _fail(self) -> None:
        if not self._end.done() and not self._is_stopping:
            logger.error("This part of the server stops: %s", self._ends.words())
            self._finish(1)

    def _on_signal(self) -> None:
        if self._is_stopping:
            self._finish(0)
            return
        logger.info("Stopping")
        self._is_stopping = True
        asyncio.get_running_loop().call_later(LEAVE_WITHIN_S, self._finish, 0)

    def _finish(self, exit_code: int) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)
