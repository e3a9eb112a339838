"""The workers of one engine and the request side that talks to them: all of a server but its HTTP.

`HttpServer` and `Engine` both run one on their event loop. One future, `failure`, says that it is over and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.managers.io_struct import Fatal, Ready, StartupProgress, WorkerMessage
from sglang.srt.managers.ipc import Endpoints
from sglang.srt.managers.launch_plan import LaunchPlan
from sglang.srt.managers.launcher import WorkerGroup
from sglang.srt.managers.tokenizer import TextTokenizer
from sglang.srt.managers.tokenizer_manager import RequestObserver, TokenizerManager
from sglang.srt.managers.worker_ends import WorkerEnds
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FINISH_GRACE_S = 2.0
"""How long running requests may go on after the engine was asked to stop."""

WORKER_GRACE_S = 3.0
"""How long workers may take to leave before they are killed."""


class EngineCore:
    """Made and used inside the event loop that it runs on. `stop` must follow `start`, whatever happens between."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        plan: LaunchPlan,
        endpoints: Endpoints,
        status: EngineStatus,
        *,
        observer: RequestObserver | None = None,
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called once, when requests can be served."""
        self._args, self._plan, self._endpoints = server_args, plan, endpoints
        self._status = status
        self._on_ready = on_ready
        self._workers = WorkerGroup()
        self._ends = WorkerEnds()
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.manager = TokenizerManager(
            server_args, model_config, endpoints, self._on_startup_message, observer
        )

    def start(self) -> None:
        """Spawn the workers, which die with the calling thread, and begin to listen to them."""
        loop = asyncio.get_running_loop()
        self._workers.start(self._args, self._endpoints, plan=self._plan)
        self._workers.on_exit(loop.add_reader, self._on_worker_exit)
        self._tasks = [
            asyncio.ensure_future(self.manager.run()),
            asyncio.ensure_future(self._load_tokenizer()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Give running requests a moment, unless told to `hurry`, end the others, and let the workers leave."""
        was_ready = self._status.is_ready
        if self._status.phase != "failed":
            self._status.phase = "stopping"
        if was_ready:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._requests_finish(hurry), FINISH_GRACE_S)
        self.manager.fail_all("the server is stopping" if was_ready else "the server failed")
        if was_ready:
            self.manager.shut_down_workers()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._workers_leave(), WORKER_GRACE_S)

    async def close(self) -> None:
        """End whatever still runs; may be called without `stop`."""
        loop = asyncio.get_running_loop()
        for process in self._workers.processes.values():
            loop.remove_reader(process.sentinel)
        self._workers.stop(WORKER_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.manager.close()

    async def _requests_finish(self, hurry: asyncio.Event) -> None:
        while self.manager.num_unfinished and not hurry.is_set():
            await asyncio.sleep(0.05)

    async def _workers_leave(self) -> None:
        # Polled, not waited for in a thread: at the end of an interpreter there are no new threads.
        while any(process.is_alive() for process in self._workers.processes.values()):
            await asyncio.sleep(0.02)

    async def _load_tokenizer(self) -> None:
        self.manager.set_tokenizer(await asyncio.to_thread(TextTokenizer.load, self._args))
        self._status.on_tokenizer()
        self._tell_ready()

    def _on_startup_message(self, message: WorkerMessage) -> None:
        match message:
            case StartupProgress():
                self._status.on_progress(message)
            case Ready():
                self._status.on_worker_ready(message)
                self.manager.limit_total_tokens(message.info["max_total_num_tokens"])
                self._tell_ready()
            case Fatal():
                self._ends.add_last_words(message)
                self._judge_soon()

    def _tell_ready(self) -> None:
        if self._status.is_ready:
            self._on_ready()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not self.failure.done() and not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, ValueError):
                logger.error("A task of the server failed", exc_info=error)
            self._fail(str(error))

    def _on_worker_exit(self, rank: int) -> None:
        loop = asyncio.get_running_loop()
        process = self._workers.processes[rank]
        loop.remove_reader(process.sentinel)
        process.join()
        self._ends.add_exit(rank, process.exitcode)
        self._judge_soon()

    def _judge_soon(self) -> None:
        """Fail for a worker's end, once it is known whose."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._ends.wait_s(), lambda: self._fail(self._ends.words()))

    def _fail(self, message: str) -> None:
        if self._status.phase == "stopping" or self.failure.done():
            return  # Workers that leave because they were told to are no failure.
        self._status.phase = "failed"
        self.failure.set_result(message)
