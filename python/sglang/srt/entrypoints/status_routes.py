"""How the server is: health, what it serves and with which arguments, and its metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from sglang.srt.entrypoints.openai.errors import json_response
from sglang.srt.entrypoints.services import Services
from sglang.srt.managers.io_struct import InternalState
from sglang.version import __version__


def add_status_routes(app: FastAPI, services: Services) -> None:
    """Serve `/health`, `/server_info`, and `/metrics` where the server keeps some."""

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if services.status.is_ready else 503)

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(await server_info_of(services))

    metrics = services.metrics
    if metrics is not None:

        @app.get("/metrics")
        async def prometheus() -> Response:
            return Response(metrics.render(await services.internal_states()), media_type=CONTENT_TYPE_LATEST)


async def server_info_of(services: Services) -> dict[str, Any]:
    """What `/server_info` shows: arguments, status, the stage's report, and the schedulers' counts."""
    arguments = dataclasses.asdict(services.server_args)
    if arguments["api_key"] is not None:
        arguments["api_key"] = "***"
    states = await services.internal_states()
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
