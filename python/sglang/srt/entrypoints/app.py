"""The HTTP routes. They know the engine's status and its request side, and nothing of processes."""

from __future__ import annotations

import dataclasses
import hmac
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.autotune_routes import add_autotune_routes
from sglang.srt.entrypoints.disconnect import ClientGone, EventStream, answer_while_connected
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.metrics import ServingMetrics
from sglang.srt.entrypoints.openai.completions import CompletionCall
from sglang.srt.entrypoints.openai.errors import ApiError, json_response
from sglang.srt.entrypoints.openai.protocol import CompletionRequest, parse_body
from sglang.srt.managers.io_struct import InternalState
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

STATE_TIMEOUT_S = 2.0
"""How long `/server_info` waits for the scheduler, which answers between two forwards."""

CLIENT_CLOSED_REQUEST = 499
"""The status written to the access log for a client that left; nobody receives it."""


@dataclass
class Services:
    """What the routes work with."""

    server_args: ServerArgs
    status: EngineStatus
    manager: TokenizerManager
    context_length: int
    metrics: ServingMetrics | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.server_args.model_name

    def require_ready(self) -> None:
        """Raise `ApiError` 503 unless requests can be served."""
        if not self.status.is_ready:
            raise ApiError(503, f"the server is {self.status.phase}", code="not_ready")


def build_app(services: Services) -> ASGIApp:
    """The ASGI application over `services`."""
    app = FastAPI(title="SGLang", version=__version__)
    _add_error_handlers(app)
    _add_status_routes(app, services)
    _add_openai_routes(app, services)
    add_autotune_routes(app, services.status)
    key = services.server_args.api_key
    return app if key is None else _RequireKey(app, key)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGone)
    async def on_client_gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return ApiError(
                404, f"there is no {request.method} {request.url.path}", code="unknown_url"
            ).response()
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        # The traceback goes to the log; it is none of the client's business.
        return ApiError(500, "internal error; the server's log has the details").response()


def _add_status_routes(app: FastAPI, services: Services) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if services.status.is_ready else 503)

    @app.get("/server_info")
    async def server_info() -> Response:
        return json_response(await _server_info(services))

    if services.metrics is not None:
        _add_metrics_route(app, services, services.metrics)


def _add_metrics_route(app: FastAPI, services: Services, metrics: ServingMetrics) -> None:
    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(await _internal_states(services)), media_type=CONTENT_TYPE_LATEST)


async def _internal_states(services: Services) -> list[InternalState]:
    return await services.manager.internal_states(STATE_TIMEOUT_S) if services.status.is_ready else []


async def _server_info(services: Services) -> dict[str, Any]:
    arguments = dataclasses.asdict(services.server_args)
    if arguments["api_key"] is not None:
        arguments["api_key"] = "***"
    states = await _internal_states(services)
    return {
        **arguments,
        "version": __version__,
        "served_model_name": services.model_name,
        "context_length": services.context_length,
        **services.status.as_dict(),
        "internal_states": [_public(state) for state in states],
    }


def _public(state: InternalState) -> dict[str, Any]:
    fields = msgspec.structs.asdict(state)
    del fields["ticket"]
    return fields


def _add_openai_routes(app: FastAPI, services: Services) -> None:
    card = {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "sglang",
        "root": services.server_args.model_path,
        "max_model_len": services.context_length,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        services.require_ready()
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        services.require_ready()
        if name != services.model_name:
            raise ApiError(404, f"there is no model {name!r} here", param="model", code="model_not_found")
        return json_response(card)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        services.require_ready()
        parsed = parse_body(await request.body(), CompletionRequest)
        call = CompletionCall(parsed, services.model_name, services.manager)
        if parsed.stream:
            return EventStream(call.events())
        return json_response(await answer_while_connected(request, call.answer()))


class _RequireKey:
    """Answers 401 to requests without the bearer token, save for health checks and metrics."""

    _OPEN = ("/health", "/health_generate", "/metrics")

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
