"""The server's main process: HTTP first, then the workers; and at the end the workers first, then HTTP.

`launch_server` tells the whole story. One future, `_Server._end`, holds how it ends: whoever resolves it first (a
signal, a worker that dies, a part of this process that fails) decides the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from prometheus_client import CollectorRegistry

from sglang.srt.autotune.metrics import register as register_autotune_metrics
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.parallel_sizes import check_parallel_sizes
from sglang.srt.entrypoints.app import build_app
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.follower import Follower
from sglang.srt.entrypoints.metrics import ServingMetrics
from sglang.srt.entrypoints.services import Services
from sglang.srt.managers.io_struct import Fatal, Ready, StartupProgress, WorkerMessage
from sglang.srt.managers.ipc import Endpoints, private_endpoints
from sglang.srt.managers.launch_plan import LaunchPlan, plan_launch
from sglang.srt.managers.launcher import WorkerGroup
from sglang.srt.managers.tokenizer import TextTokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.worker_ends import WorkerEnds
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import bind_http_socket

logger = logging.getLogger(__name__)

FINISH_GRACE_S = 2.0
"""How long running requests may go on after the server was asked to stop."""

WORKER_GRACE_S = 3.0
"""How long workers may take to leave before they are killed."""


def launch_server(server_args: ServerArgs) -> int:
    """Serve until a signal or a failure. Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 after a failure.

    Raises `ValueError` for a wrong argument, an occupied port included, before any process is started.
    """
    model_config = ModelConfig.from_path(
        server_args.model_path,
        overrides=server_args.model_overrides,
        context_length=server_args.context_length,
        quantization=server_args.quantization,
    )
    check_parallel_sizes(server_args, model_config)
    plan = plan_launch(server_args)
    if not plan.serves_http:
        with private_endpoints() as endpoints:
            return asyncio.run(Follower(server_args, plan, endpoints).run())
    with bind_http_socket(server_args.host, server_args.port) as listener:
        # From here on the port is taken: until somebody listens, a second server could bind it as well.
        listener.listen(2048)
        with private_endpoints() as endpoints:
            return asyncio.run(_Server(server_args, model_config, plan, endpoints).run(listener))


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the workers are stopped first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the server; made outside of the event loop, used inside one."""

    def __init__(
        self, server_args: ServerArgs, model_config: ModelConfig, plan: LaunchPlan, endpoints: Endpoints
    ) -> None:
        self._args = server_args
        self._model_config = model_config
        self._plan = plan
        self._endpoints = endpoints
        self._workers = WorkerGroup()
        self._ends = WorkerEnds()
        # Those of other machines are ready when these are: all wait for each other first.
        self._status = EngineStatus(len(plan.ranks))

    async def run(self, listener: socket.socket) -> int:
        """Start, serve, stop; gives the exit code."""
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        self._hurry = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        metrics = self._metrics() if self._args.enable_metrics else None
        self._manager = TokenizerManager(
            self._args, self._model_config, self._endpoints, self._on_startup_message, metrics
        )
        http = self._http_server(metrics)
        tasks = [asyncio.ensure_future(http.serve(sockets=[listener]))]
        try:
            while not http.started:
                await asyncio.sleep(0.01)
            self._workers.start(self._args, self._endpoints, plan=self._plan)
            self._workers.on_exit(loop.add_reader, self._on_worker_exit)
            tasks += [
                asyncio.ensure_future(self._manager.run()),
                asyncio.ensure_future(self._load_tokenizer()),
            ]
            for task in tasks:
                task.add_done_callback(self._on_task_done)
            exit_code = await self._end
            await self._stop_workers()
        finally:
            for process in self._workers.processes.values():
                loop.remove_reader(process.sentinel)
            self._workers.stop(WORKER_GRACE_S)
        http.should_exit = True
        await asyncio.wait(tasks[:1], timeout=WORKER_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._manager.close()
        return exit_code

    def _metrics(self) -> ServingMetrics:
        registry = CollectorRegistry()
        register_autotune_metrics(lambda: self._status.as_dict()["autotune"], registry)
        return ServingMetrics(self._args.model_name, registry)

    def _http_server(self, metrics: ServingMetrics | None) -> _Uvicorn:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)
        context_length = self._model_config.context_length
        app = build_app(Services(self._args, self._status, self._manager, context_length, metrics))
        return _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=self._args.log_level in ("debug", "info"),
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    async def _load_tokenizer(self) -> None:
        self._manager.set_tokenizer(await asyncio.to_thread(TextTokenizer.load, self._args))
        self._status.on_tokenizer()
        self._greet()

    def _on_startup_message(self, message: WorkerMessage) -> None:
        match message:
            case StartupProgress():
                self._status.on_progress(message)
            case Ready():
                self._status.on_worker_ready(message)
                self._manager.limit_total_tokens(message.info["max_total_num_tokens"])
                self._greet()
            case Fatal():
                self._ends.add_last_words(message)
                self._judge_soon()

    def _greet(self) -> None:
        if self._status.is_ready:
            logger.info("Ready: %s at http://%s:%d", self._args.model_name, self._args.host, self._args.port)

    def _on_signal(self) -> None:
        if self._end.done():
            self._hurry.set()
        else:
            logger.info("Stopping")
            self._end.set_result(0)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not self._end.done() and not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, ValueError):
                logger.error("a task of the server failed", exc_info=error)
            self._fail(str(error))

    def _on_worker_exit(self, rank: int) -> None:
        loop = asyncio.get_running_loop()
        process = self._workers.processes[rank]
        loop.remove_reader(process.sentinel)
        process.join()
        self._ends.add_exit(rank, process.exitcode)
        self._judge_soon()

    def _judge_soon(self) -> None:
        """Stop the server for a worker's end, once it is known whose."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._ends.wait_s(), lambda: self._fail(self._ends.words()))

    def _fail(self, message: str) -> None:
        if not self._end.done():
            logger.error("The server stops: %s", message)
            self._status.phase = "failed"
            self._end.set_result(1)

    async def _stop_workers(self) -> None:
        """Give running requests a moment, end the others, and let the workers leave by themselves."""
        was_ready = self._status.is_ready
        if self._status.phase != "failed":
            self._status.phase = "stopping"
        if was_ready:
            waited_s = 0.0
            while self._manager.num_unfinished and waited_s < FINISH_GRACE_S and not self._hurry.is_set():
                await asyncio.sleep(0.05)
                waited_s += 0.05
        self._manager.fail_all("the server is stopping" if was_ready else "the server failed")
        if was_ready:
            self._manager.shut_down_workers()
            await asyncio.to_thread(self._workers.wait, WORKER_GRACE_S)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether an access is logged: health checks come every second from everywhere."""
    return " /health " not in record.getMessage()
