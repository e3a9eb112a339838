"""The fields that completions and chats share: sampling, stopping, copies, streaming."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.body import Unbuilt
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.sampling.sampling_params import SamplingParams

MAX_SEQUENCES = 4096
"""Most sequences that one request may ask for, over all its prompts."""

UNBUILT: Unbuilt = {
    "best_of": (None, 1),
    "custom_logit_processor": (None,),
    "custom_params": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "length_penalty": (None, 1),
    "lora_path": (None,),
    "min_tokens": (None, 0),
    "no_stop_trim": (None, False),
    "regex": (None,),
    "response_format": (None, {"type": "text"}),
    "return_hidden_states": (None, False),
    "session_params": (None,),
    "stop_regex": (None, [], ""),
    "structural_tag": (None,),
    "use_beam_search": (None, False),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CommonSampling(msgspec.Struct, kw_only=True):
    """What `/generate` has as well; a null stands for the default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(CommonSampling, kw_only=True):
    """Fields that have an effect; a null stands for the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_copies(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream tells the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event of a stream tells the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling_with(
        self, defaults: SamplingParams, max_tokens: int, max_tokens_name: str
    ) -> SamplingParams:
        """The sampling parameters; the limit came as `max_tokens_name`. Raises `ApiError` for one out of range."""
        return completed(self, defaults, max_new_tokens_name=max_tokens_name, max_new_tokens=max_tokens)

    def check_copies(self, num_prompts: int) -> None:
        """Raise `ApiError` for a wrong `n`, too many sequences, or stream options without a stream."""
        if self.num_copies < 1:
            raise ApiError(400, f"n must be at least 1, got {self.n}", param="n")
        if num_prompts * self.num_copies > MAX_SEQUENCES:
            raise ApiError(
                400, f"{num_prompts} prompts times n = {self.n or 1} are more than {MAX_SEQUENCES} sequences"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


def completed(
    fields: msgspec.Struct,
    defaults: SamplingParams,
    max_new_tokens_name: str = "max_new_tokens",
    **others: Any,
) -> SamplingParams:
    """`defaults` with what `fields` has of the same names, unless it is null, and with `others`.

    Raises `ApiError` that names the parameter which is out of range.
    """
    given = {
        name: getattr(fields, name) for name in SamplingParams.__struct_fields__ if hasattr(fields, name)
    }
    given |= others
    if isinstance(given["stop"], str):
        given["stop"] = [given["stop"]]
    given["stop"] = [text for text in given["stop"] or [] if text]
    sampling = msgspec.structs.replace(
        defaults, **{name: value for name, value in given.items() if value is not None}
    )
    try:
        sampling.check()
    except ValueError as error:
        message = str(error).replace("max_new_tokens", max_new_tokens_name)
        raise ApiError(400, message, param=message.split()[0]) from None
    return sampling


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` were found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
