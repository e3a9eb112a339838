"""What `/openapi.json` says of bodies: handlers read and write them themselves, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from sglang.srt.entrypoints.native.protocol import GenerateRequest
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.protocol import CompletionRequest

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/generate": GenerateRequest,
}
#: Endpoints whose answers are no JSON. None: an empty body.
_ANSWERS: dict[str, str | None] = {
    "/health": None,
    "/health_generate": None,
    "/flush_cache": "text/plain",
    "/metrics": "text/plain",
    "/autotune": "text/html",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_bodies(app: FastAPI) -> None:
    """Complete the document that `app` serves; call it once all routes are there."""
    plain = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(plain())
        return app.openapi_schema

    app.openapi = complete  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    template = "#/components/schemas/{name}"
    references, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template=template)
    document.setdefault("components", {}).setdefault("schemas", {}).update({**schemas, "Error": _ERROR})
    error = {
        "description": "what was wrong",
        "content": {"application/json": {"schema": {"$ref": template.format(name="Error")}}},
    }
    body_of = dict(zip(_BODIES, references, strict=True))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            kind = _ANSWERS.get(path, "application/json")
            answer: dict[str, Any] = {"description": "the answer"}
            failed: dict[str, Any] = error if kind is not None else {"description": "not ready"}
            if kind is not None:
                answer["content"] = {kind: {}}
            if path in body_of:
                answer["content"]["text/event-stream"] = {}
                content = {"application/json": {"schema": body_of[path]}}
                operation["requestBody"] = {"required": True, "content": content}
            # Wrong fields are answered with 400, not with FastAPI's 422.
            operation["responses"] = {"200": answer, "default": failed}
    return document
