"""The sequences that one client request asked for, while their tokens come in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sglang.srt.managers.detokenizer import IncrementalDetokenizer, StopMatcher
from sglang.srt.managers.io_struct import FinishReason, TokenLogprobs, TokenOutput
from sglang.srt.managers.tokenizer import TextTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams


class EngineError(RuntimeError):
    """The engine cannot finish a request; the message is for the client."""


@dataclass(frozen=True)
class Piece:
    """What sequence `index` of a generation gained. `num_tokens` counts all of its output so far.

    `matched_stop` is the stop string or token id that ended it, if one did. `token_ids` are the new tokens, among
    them the one that ended it, and `logprobs` theirs where they were asked for. `prompt_logprobs` come with the first
    piece of a sequence.
    """

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    token_ids: Sequence[int] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0


class SequenceState:
    """Turns the token outputs of one sequence into text, up to the first stop string.

    Without `incremental` the text is kept back until the sequence ends.
    """

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        tokenizer: TextTokenizer,
        incremental: bool,
    ) -> None:
        self._index = index
        self._incremental = incremental
        self._wants_output = sampling.max_new_tokens > 0
        self._num_tokens = 0
        self._kept = _Kept()
        self._has_stops = bool(sampling.stop)
        decode = partial(tokenizer.decode, skip_special_tokens=sampling.skip_special_tokens)
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stops = StopMatcher(sampling.stop)

    def take(self, output: TokenOutput) -> Piece | None:
        """The piece that `output` completes, or None while there is none to give. A stop string ends the sequence."""
        if not self._wants_output:
            # It ran for its prompt's sake, and no forward is without a next token.
            output = TokenOutput(output.rid, [], "length", prompt_logprobs=output.prompt_logprobs)
        kept, num_before = self._kept, self._num_tokens
        kept.text += self._new_text(output)
        num_new = self._num_tokens - num_before
        kept.token_ids += output.token_ids[:num_new]
        if output.logprobs is not None:
            kept.logprobs.extend(output.logprobs.cut(0, num_new))
            kept.has_logprobs = True
        kept.prompt_logprobs = output.prompt_logprobs or kept.prompt_logprobs
        matched = self._stops.matched
        finish_reason = output.finish_reason if matched is None else "stop"
        if finish_reason is None and not (self._incremental and kept.text):
            return None
        self._kept = _Kept()
        return Piece(
            self._index,
            kept.text,
            self._num_tokens,
            finish_reason,
            output.matched_stop if matched is None else matched,
            kept.token_ids,
            kept.logprobs if kept.has_logprobs else None,
            kept.prompt_logprobs,
            output.num_cached_tokens,
        )

    def _new_text(self, output: TokenOutput) -> str:
        # Where text may end the sequence the tokens are taken one by one, to count up to the one that ends it.
        step = 1 if self._has_stops else max(1, len(output.token_ids))
        text = ""
        for start in range(0, len(output.token_ids), step):
            token_ids = output.token_ids[start : start + step]
            self._num_tokens += len(token_ids)
            if output.matched_stop is not None and start + step >= len(output.token_ids):
                token_ids = token_ids[:-1]  # It ended the sequence: counted, but no part of the text.
            if token_ids:
                text += self._stops.push(self._detokenizer.push(token_ids))
            if self._stops.matched is not None:
                return text
        if output.finish_reason is not None:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        return text


@dataclass
class _Kept:
    """What a sequence gained since its last piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    has_logprobs: bool = False
    prompt_logprobs: TokenLogprobs | None = None


class Generation:
    """An async context manager over the pieces of one or more sequences.

    Leaving the `async with` block in any way aborts what has not finished: a client that goes away, a handler
    that fails and a task that is cancelled free the engine alike.
    """

    def __init__(self, prompt_ids: list[list[int]], num_unfinished: int, abort: Callable[[], None]) -> None:
        self.prompt_ids = prompt_ids
        self._num_unfinished = num_unfinished
        self._abort = abort
        self._pieces: asyncio.Queue[Piece | EngineError] = asyncio.Queue()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompt_ids)

    def put(self, piece: Piece | EngineError) -> None:
        self._pieces.put_nowait(piece)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._num_unfinished:
            self._abort()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come, until every sequence has finished. Raises `EngineError` when one cannot."""
        while self._num_unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, EngineError):
                raise piece
            if piece.finish_reason is not None:
                self._num_unfinished -= 1
            yield piece
