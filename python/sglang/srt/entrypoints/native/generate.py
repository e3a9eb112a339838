"""`POST /generate`: SGLang's own endpoint, and what `Engine.generate` does in process."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.entrypoints.events import DONE, event
from sglang.srt.entrypoints.native.protocol import GenerateRequest
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.logprobs import TokenText
from sglang.srt.managers.generation import EngineError, Piece
from sglang.srt.managers.io_struct import LogprobParams, TokenLogprobs
from sglang.srt.managers.tokenizer_manager import TokenizerManager

Output = dict[str, Any]
Entry = tuple[float | None, int, str | None]


@dataclass
class _Sequence:
    """What one sequence has said so far."""

    id: str
    prompt_ids: list[int]
    logprobs: LogprobParams | None
    text_of: TokenText | None
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    prompt_logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.output_ids += piece.token_ids
        if piece.logprobs is not None:
            self.output_logprobs.extend(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.last = piece

    def output(self, started_s: float) -> Output:
        """The answer's entry. It repeats all that came before: clients of a stream cut off what they have."""
        assert self.last is not None
        return {
            "text": self.text,
            "output_ids": list(self.output_ids),
            "meta_info": {
                "id": self.id,
                "finish_reason": _finish_reason(self.last),
                "prompt_tokens": len(self.prompt_ids),
                "completion_tokens": self.last.num_tokens,
                "cached_tokens": self.last.num_cached_tokens,
                "weight_version": "default",
                **self._logprob_fields(),
                "e2e_latency": time.monotonic() - started_s,
            },
        }

    def _logprob_fields(self) -> Output:
        """Lists of (log-probability, token id, text or null), one entry for each token."""
        if self.logprobs is None:
            return {}
        prompt, output = self.prompt_logprobs, self.output_logprobs
        scored_ids = self.prompt_ids[len(self.prompt_ids) - len(prompt.values) :]
        fields: Output = {
            "input_token_logprobs": self._entries(prompt.values, scored_ids),
            "output_token_logprobs": self._entries(output.values, self.output_ids),
        }
        if self.logprobs.num_top:
            for name, logprobs in (("input_top_logprobs", prompt), ("output_top_logprobs", output)):
                fields[name] = [
                    self._entries([v for _, v in top], [i for i, _ in top]) or None for top in logprobs.top
                ]
        return fields

    def _entries(self, values: Sequence[float | None], token_ids: list[int]) -> list[Entry]:
        text_of = self.text_of
        return [
            (value, i, None if text_of is None else text_of(i))
            for value, i in zip(values, token_ids, strict=True)
        ]


class GenerateCall:
    """One call, from the parsed request to the last output."""

    def __init__(self, request: GenerateRequest, manager: TokenizerManager) -> None:
        """Starts the sequences. Raises `ApiError` 400 when the request cannot be served."""
        self._started_s = time.monotonic()
        prompts = request.prompts()
        samplings, num_copies = request.samplings(
            len(prompts), manager.default_sampling, manager.max_total_tokens
        )
        ids, logprobs = request.ids(len(prompts)), request.logprobs(len(prompts))
        self._is_list = request.is_batch or num_copies > 1
        try:
            self._generation = manager.generate(
                prompts, samplings, num_copies, bool(request.stream), logprobs
            )
        except ValueError as error:
            raise ApiError.refusing(error, request.prompt_name) from None
        text_of = manager.token_text if request.return_text_in_logprobs else None
        self._sequences = [
            _Sequence(_id(ids, prompt, copy, num_copies), prompt_ids, logprobs[prompt], text_of)
            for prompt, prompt_ids in enumerate(self._generation.prompt_ids)
            for copy in range(num_copies)
        ]

    async def answer(self) -> Output | list[Output]:
        """The whole answer: one output, or a list of them for a batch or several copies. Cancelling it aborts."""
        async with self._generation as generation:
            try:
                async for piece in generation.pieces():
                    self._sequences[piece.index].add(piece)
            except EngineError as error:
                raise ApiError(500, str(error)) from None
        outputs = [sequence.output(self._started_s) for sequence in self._sequences]
        return outputs if self._is_list else outputs[0]

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """An output for each piece, with its `index` where there are several. Raises `EngineError`; closing aborts."""
        async with self._generation as generation:
            async for piece in generation.pieces():
                sequence = self._sequences[piece.index]
                sequence.add(piece)
                output = sequence.output(self._started_s)
                yield {"index": piece.index, **output} if self._is_list else output

    async def events(self) -> AsyncGenerator[bytes, None]:
        """`outputs` as server-sent events."""
        outputs = self.outputs()
        try:
            async for output in outputs:
                yield event(output)
        except EngineError as error:
            yield event(ApiError(500, str(error)).body())
            return
        finally:
            await outputs.aclose()
        yield DONE


def _id(given: list[str] | None, prompt: int, copy: int, num_copies: int) -> str:
    if given is None:
        return uuid.uuid4().hex
    return given[prompt] if num_copies == 1 else f"{given[prompt]}_{copy}"


def _finish_reason(piece: Piece) -> dict[str, Any] | None:
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "length":
        return {"type": "length", "length": piece.num_tokens}
    return {"type": piece.finish_reason, "matched": piece.matched_stop}
