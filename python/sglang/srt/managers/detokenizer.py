"""From token ids to text, a few tokens at a time.

A byte-level token can end in the middle of a character, and the text of a token can depend on the one before
it. So the text of the newest tokens is decoded together with a few tokens before them, and a tail that may
still turn into another character is held back. A stop string can likewise begin in one token and end in a
later one, so text that may be the start of one is held back too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_HELD_CHARS = 8
"""More replacement characters than this in a row are not the start of anything: a character has four bytes."""

_MAX_WINDOW_TOKENS = 48
"""Decoding starts this far back at most, so that garbage bytes do not make every step slower than the last."""


class IncrementalDetokenizer:
    """The text of one growing sequence of token ids.

    `decode` maps ids to text. All that `push` and `flush` return, joined, is `decode` of all ids pushed (up to
    the replacement characters that stand for garbage bytes).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # What is decoded each time: `_num_context` tokens whose text is out already, then those that follow.
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted_chars = 0
        self._settled = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; empty while they only begin a character."""
        if self._settled:
            self._restart_window(self._window[self._num_context :], num_held_chars=0)
        self._window.extend(token_ids)
        text = self._decode(self._window)
        stable = text.rstrip(REPLACEMENT)
        num_held_chars = len(text) - len(stable)
        if num_held_chars > _MAX_HELD_CHARS:
            stable, num_held_chars = text[:-1], 1
        new_text = stable[self._num_emitted_chars :]
        self._num_emitted_chars = max(self._num_emitted_chars, len(stable))
        self._settled = num_held_chars == 0 and bool(new_text)
        if not self._settled and len(self._window) > _MAX_WINDOW_TOKENS:
            self._restart_window(self._window[-4:], num_held_chars)
        return new_text

    def flush(self) -> str:
        """Text still held back, with replacement characters for bytes that will never be completed."""
        rest = self._decode(self._window)[self._num_emitted_chars :]
        self._num_emitted_chars += len(rest)
        return rest

    def _restart_window(self, tokens: list[int], num_held_chars: int) -> None:
        self._window = tokens
        self._num_context = len(tokens)
        self._num_emitted_chars = max(0, len(self._decode(tokens)) - num_held_chars)
        self._settled = False


class StopMatcher:
    """Finds the first stop string to be completed in a growing text, wherever the text was cut into pieces.

    Of several that are completed by the same character the longest wins, so the result does not depend on the
    pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is certainly before any stop string. Sets `matched`, after which nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [
            (start + len(stop), -len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            end, negative_length, self.matched = min(found)
            self._held = ""
            return text[: end + negative_length]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text held back, once it is known that no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
