"""The accuracy checks: each one makes its prompts and judges the answers, and knows nothing of HTTP.

A new check is one class with the members of ``Eval`` and one entry in ``EVALS``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang.test.arithmetic import Question, few_shot_prompt, held_out_questions

Message = dict[str, str]

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Example:
    """One question: as a prompt to complete, as a chat, and the number that answers it."""

    prompt: str
    messages: list[Message]
    answer: float


class Eval(Protocol):
    """What ``run_eval`` needs to know about a check."""

    default_max_tokens: int
    stop: list[str]
    """Where a completion ends; a chat ends by itself."""

    def examples(self, num_examples: int) -> list[Example]:
        """The first ``num_examples`` examples, always the same ones; ``ValueError`` when there are fewer."""
        ...

    def is_right(self, example: Example, text: str) -> bool:
        """Whether ``text``, what the server generated, answers ``example``."""
        ...


def last_number(text: str) -> float | None:
    """The last number in ``text``, thousands separators allowed; None without one."""
    found = NUMBER.findall(text)
    return float(found[-1].rstrip(",").replace(",", "")) if found else None


def few_shot_chat(shots: list[tuple[str, str]], question: str) -> list[Message]:
    """A chat in which the user asked every shot and was answered, and now asks ``question``."""
    messages = []
    for asked, answered in shots:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return [*messages, {"role": "user", "content": question}]


class ArithmeticEval:
    """Held-out additions and subtractions, the task that the built-in model was trained on."""

    default_max_tokens = 16
    stop = ["\n"]

    def __init__(self, num_shots: int = 3, seed: int = 0) -> None:
        self.num_shots, self.seed = num_shots, seed

    def examples(self, num_examples: int) -> list[Example]:
        drawn = held_out_questions(num_examples, self.num_shots, self.seed)
        return [self._example(question, shots) for question, shots in drawn]

    def _example(self, question: Question, shots: list[Question]) -> Example:
        turns = [(shot.text, str(shot.answer)) for shot in shots]
        prompt = few_shot_prompt(question, shots)
        return Example(prompt, few_shot_chat(turns, question.text), float(question.answer))

    def is_right(self, example: Example, text: str) -> bool:
        return last_number(text) == example.answer


class Gsm8kEval:
    """Grade-school word problems from a JSON-lines file with ``question`` and ``answer`` (ending ``#### 42``).

    The first ``num_shots`` problems of the file are the shots, the questions asked follow them.
    """

    default_max_tokens = 512
    stop = ["\nQuestion:"]

    def __init__(self, data_path: str, num_shots: int = 5) -> None:
        self.data_path, self.num_shots = data_path, num_shots
        try:
            lines = Path(data_path).read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
            self.problems = [(row["question"], row["answer"]) for row in rows]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data-path {data_path}: cannot be read ({error})") from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            wanted = 'one JSON object with "question" and "answer" per line'
            raise ValueError(f"--data-path {data_path}: expected {wanted} ({error!r})") from error

    def examples(self, num_examples: int) -> list[Example]:
        shots, rest = self.problems[: self.num_shots], self.problems[self.num_shots :]
        if num_examples > len(rest):
            raise ValueError(
                f"--num-examples {num_examples}: {self.data_path} holds {len(rest)} problems "
                f"after its first {self.num_shots}, which are the shots"
            )
        return [self._example(shots, question, answer) for question, answer in rest[:num_examples]]

    def _example(self, shots: list[tuple[str, str]], question: str, answer: str) -> Example:
        expected = last_number(answer.rpartition("####")[2])
        if expected is None:
            raise ValueError(f"--data-path {self.data_path}: no number in the answer {answer!r}")
        prompt = "".join(f"Question: {asked}\nAnswer: {answered}\n\n" for asked, answered in shots)
        return Example(f"{prompt}Question: {question}\nAnswer:", few_shot_chat(shots, question), expected)

    def is_right(self, example: Example, text: str) -> bool:
        return last_number(text) == example.answer


EVALS = ("arithmetic", "gsm8k")


def create_eval(name: str, *, num_shots: int | None, seed: int, data_path: str | None) -> Eval:
    """The check called ``name``; ``ValueError`` when a flag that it needs is missing."""
    shots = {} if num_shots is None else {"num_shots": num_shots}
    if name == "arithmetic":
        return ArithmeticEval(seed=seed, **shots)
    if name == "gsm8k":
        if data_path is None:
            raise ValueError("--eval-name gsm8k needs --data-path, a local JSON-lines file of the problems")
        return Gsm8kEval(data_path, **shots)
    raise ValueError(f"--eval-name {name}: expected one of {', '.join(EVALS)}")
