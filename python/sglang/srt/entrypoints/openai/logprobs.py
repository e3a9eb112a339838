"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.managers.io_struct import LogprobParams, TokenLogprobs

MAX_TOP_LOGPROBS = 128
"""Most likely tokens that a request may want to see at each place."""

TokenText = Callable[[int], str]


def logprob_params(num_top: int, prompt_start: int | None, name: str) -> LogprobParams:
    """Raises `ApiError` when `num_top`, which came as the field `name`, is out of range."""
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"{name} must be between 0 and {MAX_TOP_LOGPROBS}, got {num_top}", param=name)
    return LogprobParams(num_top=num_top, prompt_start=prompt_start)


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Entry i of each list is token i of the text; `text_offset` counts characters from the text's begin.

    `top_logprobs` holds the most likely tokens and the one that was taken. The first token of a prompt follows nothing,
    so it has neither.
    """

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: TokenLogprobs, offset: int, text_of: TokenText) -> int:
        """Add tokens whose text begins at `offset`; gives where it ends."""
        for token_id, value, top in zip(token_ids, logprobs.values, logprobs.top, strict=True):
            text = text_of(token_id)
            self.tokens.append(text)
            self.token_logprobs.append(value)
            self.top_logprobs.append(None if value is None else _by_text([*top, (token_id, value)], text_of))
            self.text_offset.append(offset)
            offset += len(text)
        return offset


def _by_text(pairs: list[tuple[int, float]], text_of: TokenText) -> dict[str, float]:
    """Several tokens may look alike, halves of characters above all: the likeliest of them is shown."""
    shown: dict[str, float] = {}
    for token_id, value in pairs:
        shown.setdefault(text_of(token_id), value)
    return shown


class TopLogprob(msgspec.Struct):
    """`bytes` are the token's in UTF-8, null where it is not text by itself."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry for each token of the answer, the one that ended it included."""

    content: list[ChatTokenLogprob]


def chat_logprobs(token_ids: Sequence[int], logprobs: TokenLogprobs, text_of: TokenText) -> ChatLogprobs:
    """The log-probabilities of an answer's tokens."""
    content = []
    for token_id, value, top in zip(token_ids, logprobs.values, logprobs.top, strict=True):
        assert value is not None, "an output token follows the prompt"
        content.append(
            ChatTokenLogprob(
                text_of(token_id),
                value,
                _utf8(text_of(token_id)),
                [
                    TopLogprob(text_of(rival), rival_value, _utf8(text_of(rival)))
                    for rival, rival_value in top
                ],
            )
        )
    return ChatLogprobs(content)


def _utf8(text: str) -> list[int] | None:
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
