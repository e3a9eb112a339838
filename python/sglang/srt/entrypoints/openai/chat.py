"""`POST /v1/chat/completions`: messages through the model's chat template, and the answer as a message."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.entrypoints.openai.call import OpenAICall
from sglang.srt.entrypoints.openai.chat_protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatMessage,
)
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.logprobs import ChatLogprobs, chat_logprobs
from sglang.srt.entrypoints.openai.sampling_fields import Usage
from sglang.srt.managers.generation import Piece
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class ChatCall(OpenAICall):
    """One call of the endpoint, from the parsed request to the last byte."""

    id_prefix = "chatcmpl"

    def __init__(self, request: ChatCompletionRequest, model: str, manager: TokenizerManager) -> None:
        """Starts the sequences. Raises `ApiError` 400 when the request cannot be served."""
        request.check()
        try:
            prompt = manager.chat_prompt(request.conversation(), request.template_arguments())
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        sampling = request.sampling(manager.default_sampling, default_max_tokens=manager.max_total_tokens)
        super().__init__(request, model, manager, [prompt], sampling, request.logprob_params(), "messages")

    def _answer(self, pieces: list[Piece], usage: Usage) -> ChatCompletionResponse:
        choices = [
            ChatChoice(
                index=piece.index,
                message=ChatMessage(content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                matched_stop=piece.matched_stop,
            )
            for piece in pieces
        ]
        return ChatCompletionResponse(**self._head, choices=choices, usage=usage)  # type: ignore[arg-type]

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        return chat_logprobs(piece.token_ids, piece.logprobs, self._manager.token_text)

    def _chunks(self, piece: Piece, is_first: bool) -> Iterator[list[ChatChunkChoice]]:
        if is_first:
            yield [ChatChunkChoice(index=piece.index, delta=ChatDelta(role="assistant", content=""))]
        logprobs = self._logprobs(piece)
        if piece.text or (logprobs is not None and logprobs.content):
            yield [ChatChunkChoice(index=piece.index, delta=ChatDelta(content=piece.text), logprobs=logprobs)]
        if piece.finish_reason is not None:
            yield [
                ChatChunkChoice(
                    index=piece.index,
                    delta=ChatDelta(),
                    finish_reason=piece.finish_reason,
                    matched_stop=piece.matched_stop,
                )
            ]

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage)  # type: ignore[arg-type]
