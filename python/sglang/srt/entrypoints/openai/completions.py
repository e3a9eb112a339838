"""`POST /v1/completions`: one answer, or a stream of server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

import msgspec

from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from sglang.srt.managers.generation import EngineError, Generation, Piece
from sglang.srt.managers.tokenizer_manager import TokenizerManager

DONE = b"data: [DONE]\n\n"


class CompletionCall:
    """One call of the endpoint, from the parsed request to the last byte."""

    def __init__(self, request: CompletionRequest, model: str, manager: TokenizerManager) -> None:
        """Starts the sequences. Raises `ApiError` 400 when the request cannot be served."""
        if request.model is not None and request.model != model:
            raise ApiError(
                404,
                f"there is no model {request.model!r} here: this server has {model!r}",
                param="model",
                code="model_not_found",
            )
        request.check()
        self._request = request
        self._manager = manager
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._prompts = request.prompts()
        try:
            self._generation = manager.generate(
                self._prompts, request.sampling(), request.num_copies, incremental=bool(request.stream)
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None

    async def answer(self) -> CompletionResponse:
        """The whole answer. Cancelling it aborts the sequences."""
        finished: dict[int, Piece] = {}
        async with self._generation as generation:
            try:
                async for piece in generation.pieces():
                    finished[piece.index] = piece
            except EngineError as error:
                raise ApiError(500, str(error)) from None
        choices = [self._choice(piece, is_first=True) for _, piece in sorted(finished.items())]
        return self._response(choices, self._usage(generation, finished))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, one for each piece. Closing the iterator aborts the sequences."""
        seen: dict[int, Piece] = {}
        try:
            async with self._generation as generation:
                async for piece in generation.pieces():
                    yield self._event([self._choice(piece, is_first=piece.index not in seen)])
                    seen[piece.index] = piece
        except EngineError as error:
            # The status is out already: the error travels as an event, where clients look for one too.
            yield b"data: " + msgspec.json.encode(ApiError(500, str(error)).body()) + b"\n\n"
            return
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            yield self._event([], self._usage(generation, seen))
        yield DONE

    def _choice(self, piece: Piece, is_first: bool) -> CompletionChoice:
        text = piece.text
        if self._request.echo and is_first:
            prompt = self._prompts[piece.index // self._request.num_copies]
            text = (prompt if isinstance(prompt, str) else self._manager.decode(prompt)) + text
        return CompletionChoice(
            index=piece.index,
            text=text,
            finish_reason=piece.finish_reason,
            matched_stop=piece.matched_stop,
        )

    def _usage(self, generation: Generation, last_pieces: dict[int, Piece]) -> Usage:
        num_output = sum(piece.num_tokens for piece in last_pieces.values())
        num_prompt = generation.num_prompt_tokens
        return Usage(num_prompt, num_output, num_prompt + num_output)

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return b"data: " + msgspec.json.encode(self._response(choices, usage)) + b"\n\n"

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(**self._head, choices=choices, usage=usage)  # type: ignore[arg-type]
