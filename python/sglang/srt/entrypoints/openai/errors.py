"""Errors in the shape that OpenAI clients read: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
}


@dataclass
class ApiError(Exception):
    """An answer other than 200. `param` is the request's field at fault, `code` a word that programs can test."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def refusing(cls, error: ValueError, prompt_name: str) -> ApiError:
        """400 for a request that the engine does not take: `error` begins with the parameter at fault, which may be the
        prompt, in this endpoint's field `prompt_name`.
        """
        name = str(error).split()[0]
        return cls(400, str(error), param=prompt_name if name == "prompt" else name)

    def body(self) -> dict[str, Any]:
        error_type = _TYPES.get(self.status, "internal_server_error")
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        return json_response(self.body(), self.status)


def json_response(content: Any, status: int = 200) -> Response:
    """`content` (plain data or msgspec structs) as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
