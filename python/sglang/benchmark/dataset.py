"""Prompts of random tokens with exact lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.benchmark.backends import Prompt


@dataclass(frozen=True)
class RandomLengths:
    """Lengths are drawn evenly from `ratio` times the given one, at least 1, up to it; a ratio of 1 is exact."""

    input_len: int
    output_len: int
    ratio: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of one prompt and of its answer."""
        return self._draw(self.input_len, rng), self._draw(self.output_len, rng)

    def _draw(self, longest: int, rng: random.Random) -> int:
        return rng.randint(min(longest, max(1, int(longest * self.ratio))), longest)


def plain_token_ids(tokenizer: Any) -> list[int]:
    """The ids of a Hugging Face tokenizer that stand for text, in order."""
    special = set(tokenizer.all_special_ids)
    special |= set(getattr(tokenizer, "added_tokens_decoder", {}))
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    if not ids:
        raise ValueError("--tokenizer: its vocabulary has special tokens only")
    return ids


def random_prompts(
    token_ids: Sequence[int], lengths: RandomLengths, num_prompts: int, rng: random.Random
) -> list[tuple[Prompt, int]]:
    """`num_prompts` prompts of ids drawn from `token_ids`, each with the length of its answer."""
    drawn = [lengths.draw(rng) for _ in range(num_prompts)]
    return [(Prompt(rng.choices(token_ids, k=num_input)), num_output) for num_input, num_output in drawn]


def ids_of_whole_text(tokenizer: Any, token_ids: Sequence[int], rng: random.Random) -> list[int]:
    """Some of `token_ids` that survive a round trip through text: most ids of a byte-level vocabulary do, and parts of
    characters do not.
    """
    tried = rng.sample(token_ids, min(len(token_ids), 4000))
    whole = [i for i in tried if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]]
    if not whole:
        raise ValueError(
            "--tokenizer: none of its tokens is a text by itself, which --backend sglang-oai-chat needs"
        )
    return whole


def with_text(prompt: Prompt, tokenizer: Any, token_ids: Sequence[int], rng: random.Random) -> Prompt:
    """`prompt` as text, of as many tokens or as near to that as a few tries come: neighbours may merge."""
    wanted, ids = prompt.num_tokens, list(prompt.token_ids)
    for _ in range(8):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == wanted:
            return Prompt(ids, text)
        ids = ids[:wanted] + rng.choices(token_ids, k=max(0, wanted - len(ids)))
    text = tokenizer.decode(ids)
    return Prompt(tokenizer.encode(text, add_special_tokens=False), text)
