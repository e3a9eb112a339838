"""Training documents of the built-in model, and which of their tokens carry a loss.

Three things are taught. Arithmetic lines, few-shot (``37+58=95``). The same in chat form. And what follows:
where a text could go on in many ways the model repeats the line (or the turn) before, so that greedy output
stays the same under small numerical differences even long after the answer. Tokens that nobody can
predict (a fresh question) carry no loss, therefore the two never contradict each other.
"""

from __future__ import annotations

import random
import string

from sglang.srt.model_loader.train_builtin.tokenizer import IM_END, IM_START, PAD
from sglang.test.arithmetic import Question, draw_question

IGNORED = -100

SHORT_SHARE = 0.2
"""Share of one-digit operands in training."""

CHAT_PHRASES = ("{}=", "{}=", "{}", "What is {}?")
SYSTEM_PROMPTS = ("You are a calculator.", "You are a helpful assistant.")

NEWLINE = 10

Document = list[tuple[int, int]]
"""Token ids, each with the target of the position before it: the token itself, another one, or ``IGNORED``."""


def _trained(text: str) -> Document:
    return [(byte, byte) for byte in text.encode()]


def _untrained(text: str) -> Document:
    return [(byte, IGNORED) for byte in text.encode()]


def random_text(rng: random.Random, max_words: int = 5) -> str:
    """A line of made-up words; content without meaning, to be repeated."""
    words = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 7)))
        for _ in range(rng.randint(1, max_words))
    ]
    if rng.random() < 0.5:
        words[0] = words[0].capitalize()
    if rng.random() < 0.2:
        words.append(str(rng.randrange(1000)))
    return rng.choice((" ", " ", " ", ", ")).join(words) + rng.choice(("", "", ".", "?", ":"))


def _repeat(document: Document, unit: Document, length: int) -> Document:
    """Append ``unit`` fully trained until ``length`` tokens are there."""
    while len(document) < length:
        document = document + [(token, token) for token, _ in unit]
    return document


def _question(rng: random.Random) -> Question:
    return draw_question(rng, held_out=False, short_share=SHORT_SHARE)


def lines_document(rng: random.Random, length: int) -> Document:
    """Answered questions, one per line; often the last one is then repeated to the end."""
    document: Document = []
    num_lines = rng.randint(1, 7) if rng.random() < 0.3 else length
    for _ in range(num_lines):
        question = _question(rng)
        line = _untrained(question.text) + _trained(f"{question.answer}\n")
        document = document + line
        if len(document) >= length:
            break
    return _repeat(document, line, length)


def text_document(rng: random.Random, length: int) -> Document:
    """A line of made-up text, then repeated to the end.

    Inside the first line every target is the newline: a prompt that the model cannot place is ended, and
    then repeated.
    """
    line = [(byte, NEWLINE) for byte in random_text(rng).encode()] + _trained("\n")
    return _repeat(line, line, length)


def _turn(rng: random.Random) -> Document:
    kind = rng.random()
    if kind < 0.1:
        user = answer = random_text(rng, max_words=3)
    else:
        question = _question(rng)
        answer = str(question.answer)
        if kind < 0.25:
            user = "".join(_question(rng).line for _ in range(rng.randint(1, 3))) + question.text
        else:
            spaced = rng.random() < 0.2
            body = f"{question.left} {question.op} {question.right}" if spaced else question.text[:-1]
            user = rng.choice(CHAT_PHRASES).format(body)
    return [
        (IM_START, IM_START),
        *_trained("user\n"),
        *_untrained(user),
        (IM_END, IGNORED),
        *_trained("\n"),
        (IM_START, IM_START),
        *_trained("assistant\n"),
        *_trained(answer),
        (IM_END, IM_END),
        *_trained("\n"),
    ]


def chat_document(rng: random.Random, length: int) -> Document:
    """Turns of a chat, sometimes after a system prompt; sometimes the first turn is then repeated."""
    document: Document = []
    if rng.random() < 0.2:
        system = rng.choice(SYSTEM_PROMPTS)
        document = [
            (IM_START, IGNORED),
            *_untrained("system\n" + system),
            (IM_END, IGNORED),
            (NEWLINE, IGNORED),
        ]
    repeats = rng.random() < 0.3
    while len(document) < length:
        turn = _turn(rng)
        document = document + turn
        if repeats:
            return _repeat(document, turn, length)
    return document


def draw_document(rng: random.Random, length: int) -> Document:
    """One document of the training mixture, at least ``length`` tokens long."""
    kind = rng.random()
    if kind < 0.4:
        return lines_document(rng, length)
    if kind < 0.9:
        return chat_document(rng, length)
    return text_document(rng, length)


def draw_batch(rng: random.Random, num_rows: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Inputs and targets, both ``num_rows`` lists of ``length`` ids; a target of ``IGNORED`` carries no loss."""
    inputs, targets = [], []
    for _ in range(num_rows):
        document = draw_document(rng, length + 1)[: length + 1]
        document += [(PAD, IGNORED)] * (length + 1 - len(document))
        inputs.append([token for token, _ in document[:-1]])
        targets.append([target for _, target in document[1:]])
    return inputs, targets
