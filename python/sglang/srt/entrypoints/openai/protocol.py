"""The bodies of `/v1/completions`: what is accepted, and what is sent.

Parameters that this server does not have are refused when they ask for something, since leaving them out would
change the answer without a word. Unknown fields are ignored, as other servers do.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.managers.tokenizer_manager import Prompt
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""

MAX_SEQUENCES = 4096
"""Most sequences that one request may ask for, over all its prompts."""

_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    # name: values that ask for nothing
    "best_of": (None, 1),
    "custom_logit_processor": (None,),
    "ebnf": (None,),
    "frequency_penalty": (None, 0),
    "json_schema": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "lora_path": (None,),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class CompletionRequest(msgspec.Struct, kw_only=True):
    """The fields of a completion request that have an effect; a null stands for the default."""

    model: str | None = None
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_copies(self) -> int:
        return 1 if self.n is None else self.n

    def prompts(self) -> list[Prompt]:
        """The prompts of the four accepted shapes: text, texts, token ids, lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt must not be an empty list", param="prompt")
        for kind in (str, int, list):
            if all(isinstance(item, kind) for item in self.prompt):
                return [self.prompt] if kind is int else self.prompt  # type: ignore[list-item, return-value]
        raise ApiError(
            400,
            "prompt must be a string, a list of strings, a list of token ids or a list of those",
            param="prompt",
        )

    def sampling(self) -> SamplingParams:
        """The sampling parameters, with this endpoint's defaults. Raises `ApiError` when one is out of range."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        sampling = SamplingParams(
            max_new_tokens=_or(self.max_tokens, DEFAULT_MAX_TOKENS),
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, TOP_K_ALL),
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            stop=[text for text in stop or [] if text],
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=_or(self.skip_special_tokens, True),
        )
        try:
            sampling.check()
        except ValueError as error:
            message = str(error).replace("max_new_tokens", "max_tokens")
            raise ApiError(400, message, param=message.split()[0]) from None
        return sampling

    def check(self) -> None:
        """Raise `ApiError` for the fields that are neither the prompt's nor the sampler's."""
        if self.num_copies < 1:
            raise ApiError(400, f"n must be at least 1, got {self.n}", param="n")
        num_prompts = len(self.prompts())
        if num_prompts * self.num_copies > MAX_SEQUENCES:
            raise ApiError(
                400, f"{num_prompts} prompts times n = {self.n or 1} are more than {MAX_SEQUENCES} sequences"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`matched_stop` is SGLang's: the stop string or token id that ended the text."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    matched_stop: str | int | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def parse_body(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`; raises `ApiError` 400 that names the field at fault."""
    if not body.strip():
        raise ApiError(400, "the request has no body: send a JSON object")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the request body must be a JSON object")
    for name in fields.keys() & _NOT_BUILT.keys():
        if fields[name] not in _NOT_BUILT[name]:
            raise ApiError(400, f"{name} is not supported by this server", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        named = re.search(r"at `\$\.(\w+)", str(error)) or re.search(r"required field `(\w+)`", str(error))
        raise ApiError(400, str(error), param=named.group(1) if named else None) from None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
