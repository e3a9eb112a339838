"""The HTTP application: the routes, what becomes of errors, and the key at the door."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from sglang.srt.entrypoints.api_key import RequireKey
from sglang.srt.entrypoints.autotune_routes import add_autotune_routes
from sglang.srt.entrypoints.disconnect import ClientGone
from sglang.srt.entrypoints.native.routes import add_native_routes
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.routes import add_openai_routes
from sglang.srt.entrypoints.openapi import describe_bodies
from sglang.srt.entrypoints.request_limits import LimitBodies
from sglang.srt.entrypoints.services import Services
from sglang.srt.entrypoints.status_routes import add_status_routes
from sglang.srt.environ import envs
from sglang.version import __version__

CLIENT_CLOSED_REQUEST = 499
"""The status written to the access log for a client that left; nobody receives it."""


def build_app(services: Services) -> ASGIApp:
    """The ASGI application over `services`."""
    # Its pages of documentation load scripts from elsewhere; `/openapi.json` is there for tools.
    app = FastAPI(title="SGLang", version=__version__, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    add_status_routes(app, services)
    add_openai_routes(app, services)
    add_native_routes(app, services)
    add_autotune_routes(app, services.status)
    describe_bodies(app)
    limited = LimitBodies(app, envs.SGLANG_MAX_REQUEST_MIB.get() * 2**20)
    key = services.server_args.api_key
    return limited if key is None else RequireKey(limited, key)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)  # within its body
    async def on_client_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            remedy = "; start the server with --enable-metrics" if request.url.path == "/metrics" else ""
            text = f"there is no {request.method} {request.url.path}{remedy}"
            return ApiError(404, text, code="unknown_url").response()
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        # The traceback goes to the log; it is none of the client's business.
        return ApiError(500, "internal error; the server's log has the details").response()
