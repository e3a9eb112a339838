"""The arithmetic task of the built-in model: its questions, its split and its few-shot prompts.

Training and evaluation share this module so that a held-out question cannot leak into training: whether
a question is held out depends on the question alone (a hash), never on a seed or on the order of draws.
The module needs neither torch nor a tokenizer.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

MAX_OPERAND = 99
"""Operands are whole numbers from 0 to this, both ends included."""

HELD_OUT_ONE_IN = 10
"""One question family in this many is never shown in training."""


@dataclass(frozen=True)
class Question:
    """One addition or subtraction, ``left op right``; ``op`` is ``"+"`` or ``"-"``."""

    left: int
    op: str
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.op == "+" else self.left - self.right

    @property
    def text(self) -> str:
        """The question as the model reads it, up to and including the equals sign."""
        return f"{self.left}{self.op}{self.right}="

    @property
    def line(self) -> str:
        """The answered question, one line, as it stands in a few-shot prompt."""
        return f"{self.text}{self.answer}\n"

    @property
    def held_out(self) -> bool:
        """True when training never shows this question, nor the one with its operands swapped."""
        low, high = sorted((self.left, self.right))
        return zlib.crc32(f"{low}{self.op}{high}".encode()) % HELD_OUT_ONE_IN == 0


def draw_question(rng: random.Random, *, held_out: bool, short_share: float = 0.0) -> Question:
    """Draw one question of the wanted side of the split, uniformly over the operands.

    With probability ``short_share`` each operand is drawn from 0 to 9 instead, because one-digit operands
    are otherwise too rare to be learned well.
    """
    while True:
        left, right = (
            rng.randrange(10) if short_share and rng.random() < short_share else rng.randint(0, MAX_OPERAND)
            for _ in range(2)
        )
        question = Question(left, rng.choice("+-"), right)
        if question.held_out == held_out:
            return question


def few_shot_prompt(question: Question, shots: list[Question]) -> str:
    """The answered ``shots``, one per line, then the open question; the answer ends at the next newline."""
    return "".join(shot.line for shot in shots) + question.text


def held_out_questions(
    num_questions: int, num_shots: int, seed: int
) -> list[tuple[Question, list[Question]]]:
    """``num_questions`` different held-out questions, each with ``num_shots`` training questions as its shots.

    The same arguments always give the same list, and a longer list starts with the shorter one.
    Raises ``ValueError`` when more are asked for than exist.
    """
    total = num_held_out()
    if num_questions > total:
        raise ValueError(f"--num-examples {num_questions}: only {total} held-out arithmetic questions exist")
    rng = random.Random(seed)
    drawn: dict[Question, list[Question]] = {}
    while len(drawn) < num_questions:
        question = draw_question(rng, held_out=True)
        if question not in drawn:
            drawn[question] = [draw_question(rng, held_out=False) for _ in range(num_shots)]
    return list(drawn.items())


def num_held_out() -> int:
    """How many held-out questions exist."""
    operands = range(MAX_OPERAND + 1)
    return sum(Question(a, op, b).held_out for a in operands for b in operands for op in "+-")
