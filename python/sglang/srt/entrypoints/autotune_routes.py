"""`GET /autotune`: the autotune stage's report as a page, from the first moment of a start on."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from sglang.srt.autotune.page import CONTENT_SECURITY_POLICY, render_page
from sglang.srt.entrypoints.engine_status import EngineStatus


def add_autotune_routes(app: FastAPI, status: EngineStatus) -> None:
    """Serve the page of what `status` holds under `autotune`."""

    @app.get("/autotune")
    async def autotune() -> Response:
        page = render_page(status.as_dict()["autotune"])
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-store"}
        return HTMLResponse(page, headers=headers)
