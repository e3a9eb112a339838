"""The bodies of `/v1/chat/completions`: what is accepted, and what is sent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.entrypoints.openai.body import Unbuilt, or_default
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.logprobs import ChatLogprobs, logprob_params
from sglang.srt.entrypoints.openai.sampling_fields import UNBUILT, SamplingFields, Usage
from sglang.srt.managers.io_struct import LogprobParams
from sglang.srt.sampling.sampling_params import SamplingParams

CHAT_UNBUILT: Unbuilt = {
    **UNBUILT,
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The fields of a chat request that have an effect.

    `chat_template_kwargs` and `reasoning_effort` are handed to the model's chat template.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages with text contents. Raises `ApiError` for what is no message or holds more than text."""
        if not self.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        return [_text_message(number, message) for number, message in enumerate(self.messages)]

    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is told beside the messages."""
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        continues = bool(self.continue_final_message)
        arguments["continue_final_message"] = continues
        arguments["add_generation_prompt"] = or_default(self.add_generation_prompt, True) and not continues
        return arguments

    def sampling(self, defaults: SamplingParams, default_max_tokens: int) -> SamplingParams:
        """The sampling parameters; without a limit the answer may fill the context."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_with(defaults, or_default(given, default_max_tokens), name)

    def logprob_params(self) -> LogprobParams | None:
        """What the engine is asked for."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        return logprob_params(or_default(self.top_logprobs, 0), None, "top_logprobs")

    def check(self) -> None:
        """Raise `ApiError` for the fields that are neither the messages' nor the sampler's."""
        self.check_copies(1)


def _text_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"messages[{number}] has no role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(_text_of(number, part) for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise ApiError(
            400, f"messages[{number}].content must be a string or a list of text parts", param="messages"
        )
    return {**message, "content": content}


def _text_of(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ApiError(
            400, f"messages[{number}] has a part of type {kind!r}: only text is served here", param="messages"
        )
    text: str = part["text"]
    return text


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """`matched_stop` is SGLang's: the stop string or token id that ended the text."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    matched_stop: str | int | None = None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds: the role first, then text, and nothing in the last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    matched_stop: str | int | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
