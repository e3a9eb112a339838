"""The body of `/generate`, SGLang's own endpoint: what is accepted.

A batch is a list of prompts; parameters are then one for all of them, or a list with one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.openai.body import Unbuilt, or_default, parse_fields
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.logprobs import logprob_params
from sglang.srt.entrypoints.openai.sampling_fields import MAX_SEQUENCES, CommonSampling, completed
from sglang.srt.managers.io_struct import LogprobParams
from sglang.srt.managers.tokenizer_manager import Prompt
from sglang.srt.sampling.sampling_params import SamplingParams

T = TypeVar("T")

GENERATE_UNBUILT: Unbuilt = {
    "audio_data": (None, []),
    "custom_logit_processor": (None,),
    "data_parallel_rank": (None,),
    "image_data": (None, []),
    "input_embeds": (None,),
    "lora_path": (None,),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "routed_dp_rank": (None,),
    "session_params": (None,),
    "token_ids_logprob": (None,),
    "video_data": (None, []),
}

SAMPLING_UNBUILT: Unbuilt = {
    "custom_params": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "min_new_tokens": (None, 0),
    "no_stop_trim": (None, False),
    "regex": (None,),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, [], ""),
    "stream_interval": (None,),
    "structural_tag": (None,),
}


class NativeSampling(CommonSampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`. A null is the default, save for `max_new_tokens`, where it is no limit."""

    max_new_tokens: int | None = 128
    sampling_seed: int | None = None

    def sampling(self, defaults: SamplingParams, max_total_tokens: int) -> SamplingParams:
        """The sampling parameters. Raises `ApiError` when one is out of range."""
        return completed(
            self,
            defaults,
            max_new_tokens=or_default(self.max_new_tokens, max_total_tokens),
            seed=self.seed if self.sampling_seed is None else self.sampling_seed,
        )


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The fields of `/generate` that have an effect."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None

    @property
    def prompt_name(self) -> str:
        return "input_ids" if self.text is None else "text"

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, even when it holds one output."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    def prompts(self) -> list[Prompt]:
        """The prompts; raises `ApiError` unless exactly one of `text` and `input_ids` gives some."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give either text or input_ids", param="text")
        given = self.text if self.text is not None else self.input_ids
        if not given:
            raise ApiError(400, f"{self.prompt_name} must not be empty", param=self.prompt_name)
        if isinstance(given, str):
            return [given]
        if len({isinstance(item, list) for item in given}) > 1:
            raise ApiError(400, "input_ids must be token ids, or lists of token ids", param="input_ids")
        return given if self.is_batch else [given]  # type: ignore[list-item, return-value]

    def samplings(
        self, num_prompts: int, defaults: SamplingParams, max_total_tokens: int
    ) -> tuple[list[SamplingParams], int]:
        """The sampling parameters of each prompt, and the copies of every one. Raises `ApiError` for a wrong one."""
        given = _for_each("sampling_params", or_default(self.sampling_params, {}), num_prompts)
        parsed = [parse_fields(fields, NativeSampling, SAMPLING_UNBUILT) for fields in given]
        copies = {or_default(params.n, 1) for params in parsed}
        if len(copies) > 1:
            raise ApiError(400, "n must be the same for all prompts of a batch", param="n")
        num_copies = copies.pop()
        if num_copies < 1:
            raise ApiError(400, f"n must be at least 1, got {num_copies}", param="n")
        if num_prompts * num_copies > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"{num_prompts} prompts times n = {num_copies} are more than {MAX_SEQUENCES} sequences",
                param="n",
            )
        return [params.sampling(defaults, max_total_tokens) for params in parsed], num_copies

    def logprobs(self, num_prompts: int) -> list[LogprobParams | None]:
        """What is wanted for each prompt. A start of -1 is behind the prompt."""
        wanted = _for_each("return_logprob", or_default(self.return_logprob, False), num_prompts)
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        starts: list[int] = _for_each("logprob_start_len", start, num_prompts)
        num_top: list[int] = _for_each("top_logprobs_num", self.top_logprobs_num or 0, num_prompts)
        return [
            logprob_params(top, None if start < 0 else start, "top_logprobs_num") if is_wanted else None
            for is_wanted, start, top in zip(wanted, starts, num_top, strict=True)
        ]

    def ids(self, num_prompts: int) -> list[str] | None:
        """The names that the client gave its requests, if it did."""
        return None if self.rid is None else _for_each("rid", self.rid, num_prompts)


def _for_each(name: str, value: T | list[T], num_prompts: int) -> list[T]:
    """One value for each prompt, from a list of them or from one for all."""
    if not isinstance(value, list):
        return [value] * num_prompts
    return list(_checked_length(name, value, num_prompts))


def _checked_length(name: str, values: Sequence[T], num_prompts: int) -> Sequence[T]:
    if len(values) != num_prompts:
        raise ApiError(400, f"{name} has {len(values)} entries for {num_prompts} prompts", param=name)
    return values
