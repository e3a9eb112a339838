"""SGLang's own endpoints."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from sglang.srt.entrypoints.disconnect import EventStream, answer_while_connected
from sglang.srt.entrypoints.native.generate import GenerateCall
from sglang.srt.entrypoints.native.protocol import GENERATE_UNBUILT, GenerateRequest
from sglang.srt.entrypoints.openai.body import parse_body
from sglang.srt.entrypoints.openai.errors import ApiError, json_response
from sglang.srt.entrypoints.services import Services
from sglang.srt.managers.generation import EngineError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

HEALTH_TIMEOUT_S = 20.0
"""How long `/health_generate` waits for a token."""

FLUSH_TIMEOUT_S = 5.0
"""How long `/flush_cache` waits for the schedulers, which answer between two forwards."""


def add_native_routes(app: FastAPI, services: Services) -> None:
    """Serve `/generate`, `/model_info`, `/flush_cache` and `/health_generate`."""

    @app.post("/generate")
    @app.put("/generate")
    async def generate(request: Request) -> Response:
        services.require_ready()
        parsed = parse_body(await request.body(), GenerateRequest, GENERATE_UNBUILT)
        call = GenerateCall(parsed, services.manager)
        if parsed.stream:
            return EventStream(call.events())
        return json_response(await answer_while_connected(request, call.answer()))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        args = services.server_args
        return json_response(
            {
                "model_path": args.model_path,
                "tokenizer_path": args.tokenizer,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    @app.post("/flush_cache")
    @app.get("/flush_cache")
    async def flush_cache() -> Response:
        services.require_ready()
        if await services.manager.flush_cache(FLUSH_TIMEOUT_S):
            return Response("Cache flushed.\n", media_type="text/plain")
        raise ApiError(400, "the cache is flushed only while no request runs or waits", code="busy")

    @app.get("/health_generate")
    async def health_generate() -> Response:
        is_healthy = services.status.is_ready and await _answers(services.manager)
        return Response(status_code=200 if is_healthy else 503)


async def _answers(manager: TokenizerManager) -> bool:
    """Whether the engine gives a token in time; one of another request counts, since this one may have to wait."""
    asked_s = time.monotonic()
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    try:
        async with manager.generate([[0]], sampling) as generation:
            await asyncio.wait_for(anext(generation.pieces()), HEALTH_TIMEOUT_S)
    except EngineError:
        return False
    except asyncio.TimeoutError:
        return manager.last_output_s > asked_s
    return True
