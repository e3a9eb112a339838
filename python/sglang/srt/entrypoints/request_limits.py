"""How much a client may send, and how long it may take to: a body is held in memory until all of it is there."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.openai.errors import ApiError

BODY_PAUSE_S = 60.0
"""How long a client may pause within a body."""


class LimitBodies:
    """Answers 413 to bodies of more than `max_bytes`, and 408 when one stops coming, before a handler has it whole."""

    def __init__(self, app: ASGIApp, max_bytes: int, pause_s: float = BODY_PAUSE_S) -> None:
        self._app, self._max_bytes, self._pause_s = app, max_bytes, pause_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        received, is_complete = 0, False

        async def limited() -> Message:
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._pause_s)
            except asyncio.TimeoutError:
                raise ApiError(408, f"nothing of the body came for {self._pause_s:g} s") from None
            received += len(message.get("body", b""))
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request body has more than {self._max_bytes} bytes", code="request_too_large"
        )
