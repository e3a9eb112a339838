"""`POST /v1/completions`: one answer, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.entrypoints.openai.call import OpenAICall
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.entrypoints.openai.protocol import CompletionChoice, CompletionRequest, CompletionResponse
from sglang.srt.entrypoints.openai.sampling_fields import Usage
from sglang.srt.managers.generation import Piece
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class CompletionCall(OpenAICall):
    """One call of the endpoint, from the parsed request to the last byte."""

    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, model: str, manager: TokenizerManager) -> None:
        """Starts the sequences. Raises `ApiError` 400 when the request cannot be served."""
        request.check()
        self._prompts = request.prompts()
        self._echo = bool(request.echo)
        self._offsets: dict[int, int] = {}
        super().__init__(
            request,
            model,
            manager,
            self._prompts,
            request.sampling(manager.default_sampling),
            request.logprob_params(),
            "prompt",
        )

    def _answer(self, pieces: list[Piece], usage: Usage) -> CompletionResponse:
        return self._chunk([self._choice(piece, is_first=True) for piece in pieces], usage)

    def _chunks(self, piece: Piece, is_first: bool) -> Iterator[list[CompletionChoice]]:
        yield [self._choice(piece, is_first)]

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(**self._head, choices=choices, usage=usage)  # type: ignore[arg-type]

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if piece.logprobs is None and piece.prompt_logprobs is None:
            return None
        logprobs, offset = CompletionLogprobs(), self._offsets.get(piece.index, 0)
        text_of = self._manager.token_text
        if piece.prompt_logprobs is not None:
            prompt_ids = self._generation.prompt_ids[piece.index // self._request.num_copies]
            offset = logprobs.add(prompt_ids, piece.prompt_logprobs, offset, text_of)
        if piece.logprobs is not None:
            offset = logprobs.add(piece.token_ids, piece.logprobs, offset, text_of)
        self._offsets[piece.index] = offset
        return logprobs

    def _choice(self, piece: Piece, is_first: bool) -> CompletionChoice:
        text = piece.text
        if self._echo and is_first:
            prompt = self._prompts[piece.index // self._request.num_copies]
            text = (prompt if isinstance(prompt, str) else self._manager.decode(prompt)) + text
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            matched_stop=piece.matched_stop,
        )
