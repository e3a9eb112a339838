"""The bodies of `/v1/completions`: what is accepted, and what is sent."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang.srt.entrypoints.openai.body import Unbuilt, or_default
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs, logprob_params
from sglang.srt.entrypoints.openai.sampling_fields import UNBUILT, SamplingFields, Usage
from sglang.srt.managers.io_struct import LogprobParams
from sglang.srt.managers.tokenizer_manager import Prompt
from sglang.srt.sampling.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""

COMPLETION_UNBUILT: Unbuilt = {**UNBUILT, "suffix": (None, "")}


class CompletionRequest(SamplingFields, kw_only=True):
    """The fields of a completion request that have an effect."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

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

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling parameters, with this endpoint's limit. Raises `ApiError` when one is out of range."""
        return self.sampling_with(defaults, or_default(self.max_tokens, DEFAULT_MAX_TOKENS), "max_tokens")

    def logprob_params(self) -> LogprobParams | None:
        """What the engine is asked for; with `echo` it is the prompt's as well."""
        if self.logprobs is None:
            return None
        return logprob_params(self.logprobs, 0 if self.echo else None, "logprobs")

    def check(self) -> None:
        """Raise `ApiError` for the fields that are neither the prompt's nor the sampler's."""
        self.check_copies(len(self.prompts()))


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`matched_stop` is SGLang's: the stop string or token id that ended the text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
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
