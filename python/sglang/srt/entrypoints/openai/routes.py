"""The endpoints of the OpenAI API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang.srt.entrypoints.disconnect import EventStream, answer_while_connected
from sglang.srt.entrypoints.openai.body import parse_body
from sglang.srt.entrypoints.openai.call import OpenAICall, check_model
from sglang.srt.entrypoints.openai.chat import ChatCall
from sglang.srt.entrypoints.openai.chat_protocol import CHAT_UNBUILT, ChatCompletionRequest
from sglang.srt.entrypoints.openai.completions import CompletionCall
from sglang.srt.entrypoints.openai.errors import ApiError, json_response
from sglang.srt.entrypoints.openai.protocol import COMPLETION_UNBUILT, CompletionRequest
from sglang.srt.entrypoints.services import Services


def add_openai_routes(app: FastAPI, services: Services) -> None:
    """Serve `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""
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
        parsed = parse_body(await request.body(), CompletionRequest, COMPLETION_UNBUILT)
        check_model(parsed.model, services.model_names)
        call = CompletionCall(parsed, services.model_name, services.manager)
        return await _respond(request, call, bool(parsed.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        services.require_ready()
        parsed = parse_body(await request.body(), ChatCompletionRequest, CHAT_UNBUILT)
        check_model(parsed.model, services.model_names)
        call = ChatCall(parsed, services.model_name, services.manager)
        return await _respond(request, call, bool(parsed.stream))


async def _respond(request: Request, call: OpenAICall, streams: bool) -> Response:
    if streams:
        return EventStream(call.events())
    return json_response(await answer_while_connected(request, call.answer()))
