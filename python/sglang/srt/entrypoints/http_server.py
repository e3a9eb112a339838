"""The server's main process: HTTP first, then the workers; and at the end the workers first, then HTTP.

`launch_server` tells the whole story, after `prepare_launch` has found nothing wrong with the flags. One future,
`_Server._end`, holds how it ends: whoever resolves it first (a signal, the engine that fails, or HTTP) decides the exit
code.
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
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.entrypoints.app import build_app
from sglang.srt.entrypoints.engine_core import WORKER_GRACE_S, EngineCore
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.follower import Follower
from sglang.srt.entrypoints.metrics import ServingMetrics
from sglang.srt.entrypoints.services import Services
from sglang.srt.launch_checks import check_launch, warn_of_unknown_ops
from sglang.srt.managers.ipc import Endpoints, private_endpoints
from sglang.srt.managers.launch_plan import LaunchPlan, plan_launch
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import bind_http_socket

logger = logging.getLogger(__name__)


def prepare_launch(server_args: ServerArgs) -> tuple[ModelConfig, LaunchPlan]:
    """What `launch_server` needs beside the flags.

    Raises `ValueError` that names the flag when the model or this machine cannot do what the flags ask.
    """
    model_config = read_model_config(server_args)
    check_launch(server_args, model_config)
    return model_config, plan_launch(server_args)


def launch_server(server_args: ServerArgs, model_config: ModelConfig, plan: LaunchPlan) -> int:
    """Serve until a signal or a failure. Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 after a failure.

    Raises `ValueError` for an address or a port that cannot be had, before any process is started.
    """
    if not plan.serves_http:
        with private_endpoints() as endpoints:
            return asyncio.run(Follower(server_args, plan, endpoints).run())
    warn_of_unknown_ops(server_args, server_args.moe_runner_backends)
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
        core = EngineCore(
            self._args,
            self._model_config,
            self._plan,
            self._endpoints,
            self._status,
            observer=metrics,
            on_ready=self._greet,
        )
        core.failure.add_done_callback(self._on_failure)
        http = self._http_server(core.manager, metrics)
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        try:
            while not http.started:
                await asyncio.sleep(0.01)
            serving.add_done_callback(self._on_http_done)
            url = f"http://{self._args.host}:{self._args.port}"
            logger.info("Starting %s; %s/autotune shows how far it is", self._args.model_name, url)
            core.start()
            exit_code = await self._end
            await core.stop(self._hurry)
        finally:
            await core.close()
        http.should_exit = True
        await asyncio.wait([serving], timeout=WORKER_GRACE_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return exit_code

    def _metrics(self) -> ServingMetrics:
        registry = CollectorRegistry()
        register_autotune_metrics(lambda: self._status.as_dict()["autotune"], registry)
        return ServingMetrics(self._args.model_name, registry)

    def _http_server(self, manager: TokenizerManager, metrics: ServingMetrics | None) -> _Uvicorn:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)
        context_length = self._model_config.context_length
        app = build_app(Services(self._args, self._status, manager, context_length, metrics))
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

    def _greet(self) -> None:
        logger.info("Ready: %s at http://%s:%d", self._args.model_name, self._args.host, self._args.port)

    def _on_signal(self) -> None:
        if self._end.done():
            self._hurry.set()
        else:
            logger.info("Stopping")
            self._end.set_result(0)

    def _on_failure(self, failure: asyncio.Future[str]) -> None:
        if not failure.cancelled() and not self._end.done():
            logger.error("The server stops: %s", failure.result())
            self._end.set_result(1)

    def _on_http_done(self, serving: asyncio.Task[None]) -> None:
        if not self._end.done() and not serving.cancelled() and (error := serving.exception()) is not None:
            logger.error("The server stops: HTTP failed", exc_info=error)
            self._status.phase = "failed"
            self._end.set_result(1)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether an access is logged: health checks come every second from everywhere."""
    return " /health " not in record.getMessage()
