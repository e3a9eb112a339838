"""The three request shapes that the load generator speaks, and what their answers say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class Prompt:
    """A prompt of `num_tokens` tokens: its ids, or for chat its text."""

    token_ids: list[int]
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of one run share. `extra` is merged into every body, objects into objects.

    A `model` of None leaves the choice to a server that has only one.
    """

    model: str | None = None
    stream: bool = True
    ignore_eos: bool = True
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class News:
    """What one event (or one whole answer) says. Counts are those of the whole sequence, None where not said."""

    has_text: bool = False
    num_output: int | None = None
    num_prompt: int | None = None
    num_cached: int | None = None


class AnswerError(RuntimeError):
    """The server's own words about why it does not answer."""


@dataclass(frozen=True)
class Backend:
    """One request shape: its route, how a body is made, and how an event is read.

    With `counts_tokens` every event tells how many tokens the sequence has so far.
    """

    path: str
    body: Callable[[Prompt, int, RequestOptions], dict[str, Any]]
    read: Callable[[bytes], News]
    counts_tokens: bool = False

    def encoded_body(self, prompt: Prompt, num_output: int, options: RequestOptions) -> bytes:
        """The body that asks for `num_output` tokens after `prompt`."""
        return msgspec.json.encode(merged(self.body(prompt, num_output, options), options.extra or {}))


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `extra`; an object goes into an object of the same name."""
    result = dict(base)
    for name, value in extra.items():
        own = result.get(name)
        result[name] = {**own, **value} if isinstance(own, dict) and isinstance(value, dict) else value
    return result


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class _NativeEvent(msgspec.Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_native = msgspec.json.Decoder(_NativeEvent).decode
_decode_openai = msgspec.json.Decoder(_OpenAIEvent).decode


def _read_native(data: bytes) -> News:
    event = _decode_native(data)
    _raise_error(event.error)
    meta = event.meta_info or _Meta()
    return News(bool(event.text), meta.completion_tokens, meta.prompt_tokens, meta.cached_tokens)


def _read_openai(data: bytes) -> News:
    event = _decode_openai(data)
    _raise_error(event.error)
    has_text = False
    for choice in event.choices:
        part = choice.delta or choice.message
        has_text |= bool(choice.text or (part and (part.content or part.reasoning_content)))
    usage = event.usage or _Usage()
    details = usage.prompt_tokens_details or _TokenDetails()
    return News(has_text, usage.completion_tokens, usage.prompt_tokens, details.cached_tokens)


def _raise_error(error: Any) -> None:
    if error:
        raise AnswerError(str(error.get("message", error) if isinstance(error, dict) else error))


def _native_body(prompt: Prompt, num_output: int, options: RequestOptions) -> dict[str, Any]:
    return {
        "input_ids": prompt.token_ids,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": num_output,
            "ignore_eos": options.ignore_eos,
        },
        "stream": options.stream,
    }


def _openai_body(num_output: int, options: RequestOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": 0.0,
        "max_tokens": num_output,
        "ignore_eos": options.ignore_eos,
        "stream": options.stream,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _completion_body(prompt: Prompt, num_output: int, options: RequestOptions) -> dict[str, Any]:
    return {**_openai_body(num_output, options), "prompt": prompt.token_ids}


def _chat_body(prompt: Prompt, num_output: int, options: RequestOptions) -> dict[str, Any]:
    return {**_openai_body(num_output, options), "messages": [{"role": "user", "content": prompt.text}]}


BACKENDS: dict[str, Backend] = {
    "sglang": Backend("/generate", _native_body, _read_native, counts_tokens=True),
    "sglang-oai": Backend("/v1/completions", _completion_body, _read_openai),
    "sglang-oai-chat": Backend("/v1/chat/completions", _chat_body, _read_openai),
}
