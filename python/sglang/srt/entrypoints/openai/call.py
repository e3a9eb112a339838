"""What the OpenAI endpoints have in common between a parsed request and the last byte of its answer."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from sglang.srt.entrypoints.events import DONE, event
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.sampling_fields import PromptTokensDetails, SamplingFields, Usage
from sglang.srt.managers.generation import EngineError, Generation, Piece
from sglang.srt.managers.io_struct import LogprobParams
from sglang.srt.managers.tokenizer_manager import Prompt, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams


class OpenAICall(ABC):
    """One call of an endpoint. An endpoint says how finished pieces look in an answer, and new ones in a chunk."""

    id_prefix: str

    def __init__(
        self,
        request: SamplingFields,
        model: str,
        manager: TokenizerManager,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        logprobs: LogprobParams | None,
        prompt_name: str,
    ) -> None:
        """Starts the sequences. Raises `ApiError` 400 that names the field `prompt_name` when they cannot be served."""
        self._request = request
        self._manager = manager
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        try:
            self._generation = manager.generate(
                prompts, sampling, request.num_copies, bool(request.stream), logprobs
            )
        except ValueError as error:
            raise ApiError.refusing(error, prompt_name) from None

    @abstractmethod
    def _answer(self, pieces: list[Piece], usage: Usage) -> msgspec.Struct:
        """The whole answer from the one piece of each sequence."""

    @abstractmethod
    def _chunks(self, piece: Piece, is_first: bool) -> Iterator[list[Any]]:
        """The choices of each chunk that `piece` becomes; `is_first` of its sequence."""

    @abstractmethod
    def _chunk(self, choices: list[Any], usage: Usage | None) -> msgspec.Struct:
        """One chunk of a stream."""

    def _usage(self, generation: Generation, last_pieces: dict[int, Piece]) -> Usage:
        return _usage(generation, last_pieces, self._request.num_copies)

    async def answer(self) -> msgspec.Struct:
        """The whole answer. Cancelling it aborts the sequences."""
        finished: dict[int, Piece] = {}
        async with self._generation as generation:
            try:
                async for piece in generation.pieces():
                    finished[piece.index] = piece
            except EngineError as error:
                raise ApiError(500, str(error)) from None
        pieces = [piece for _, piece in sorted(finished.items())]
        return self._answer(pieces, self._usage(generation, finished))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Closing the iterator aborts the sequences."""
        seen: dict[int, Piece] = {}
        try:
            async with self._generation as generation:
                async for piece in generation.pieces():
                    is_first = piece.index not in seen
                    seen[piece.index] = piece
                    usage = self._usage(generation, seen) if self._request.wants_usage_always else None
                    for choices in self._chunks(piece, is_first):
                        yield event(self._chunk(choices, usage))
        except EngineError as error:
            # The status is out already: the error travels as an event, where clients look for one too.
            yield event(ApiError(500, str(error)).body())
            return
        if self._request.wants_usage:
            yield event(self._chunk([], self._usage(generation, seen)))
        yield DONE


def check_model(requested: str | None, names: Sequence[str]) -> None:
    """Raise `ApiError` 404 when a request names a model that is none of `names`, the first of which is shown."""
    if requested is not None and requested not in names:
        raise ApiError(
            404,
            f"there is no model {requested!r} here: this server has {names[0]!r}",
            param="model",
            code="model_not_found",
        )


def _usage(generation: Generation, last_pieces: dict[int, Piece], num_copies: int) -> Usage:
    num_output = sum(piece.num_tokens for piece in last_pieces.values())
    num_prompt = generation.num_prompt_tokens
    # A prompt counts once, however many copies of it run.
    num_cached = sum(
        piece.num_cached_tokens for index, piece in last_pieces.items() if index % num_copies == 0
    )
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
