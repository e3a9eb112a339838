"""One stored winner and the text that addresses it.

FlashInfer addresses a winner by ``str((custom_op, runner_class, nearest_profile, extras))`` and offers no
inverse: the extras may print things that are no Python literals (``torch.float32``, enum members). The
parser here reads back what people and reports need from such a key without ever evaluating it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Tactic: TypeAlias = int | float | str | bool | None | tuple["Tactic", ...]
Policy: TypeAlias = tuple[int | float | str | bool | None, ...]

SOURCES = ("seed", "user", "given", "tuned")
MAX_TACTIC_DEPTH = 8
MAX_TACTIC_ITEMS = 256
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Record:
    """A winner: at ``key`` the op runs ``runner`` with ``tactic``.

    ``policy`` is how FlashInfer timed it, e.g. ``("cuda_graph_profile_replays", None, "l2_cache_policy",
    "hot")``; None means unknown, which FlashInfer reads as its legacy policy. ``source`` is one of
    ``SOURCES``. ``tuned_at`` is an ISO-8601 UTC time. ``default_ms`` and ``tuned_ms`` are the times of
    FlashInfer's default and of this tactic where they were measured.
    """

    key: str
    runner: str
    tactic: Tactic
    policy: Policy | None = None
    pinned: bool = False
    source: str = "user"
    tuned_at: str | None = None
    default_ms: float | None = None
    tuned_ms: float | None = None

    def __post_init__(self) -> None:
        assert self.source in SOURCES, f"unknown record source {self.source!r}"

    def same_choice(self, other: Record) -> bool:
        """Whether both name the same runner and tactic for the same key."""
        # By their text: True and 1.0 are equal to 1 and mean something else to a kernel.
        return (self.key, self.runner, repr(self.tactic)) == (other.key, other.runner, repr(other.tactic))

    def with_source(self, source: str) -> Record:
        return self if source == self.source else replace(self, source=source)

    def to_json_entry(self) -> list[Any]:
        """FlashInfer's value for this key: ``[runner, tactic]`` or ``[runner, tactic, policy]``."""
        entry: list[Any] = [self.runner, tactic_to_json(self.tactic)]
        if self.policy is not None:
            entry.append(list(self.policy))
        return entry


@dataclass(frozen=True)
class StepEntry:
    """What one tuning step was seen to ask for, so that a later start can tell whether it is covered.

    ``step`` is the step's name, such as ``decode:8``; ``keys`` the record keys that its forward looked up.
    """

    step: str
    keys: tuple[str, ...]
    default_ms: float | None = None
    tuned_ms: float | None = None
    tuned_at: str | None = None


@dataclass(frozen=True)
class RecordSet:
    """Records with what travels beside them; the common currency of files, seeds and merging.

    ``namespaces`` are FlashInfer's namespaced records: ``{namespace: {key: JSON value}}``.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, StepEntry] = field(default_factory=dict)


def tactic_to_json(tactic: Tactic) -> Any:
    """Tuples become lists, recursively; scalars stay."""
    if isinstance(tactic, tuple):
        return [tactic_to_json(part) for part in tactic]
    return tactic


def tactic_from_json(value: Any, depth: int = 0) -> Tactic:
    """The inverse of :func:`tactic_to_json`; ``ValueError`` when no FlashInfer runner could mean it."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if not -_INT64_MAX <= value <= _INT64_MAX:
            raise ValueError("an integer in the tactic does not fit 64 bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number in the tactic is not finite")
        return value
    if isinstance(value, str):
        if len(value) > 1024 or not value.isprintable():
            raise ValueError("a text in the tactic is too long or not printable")
        return value
    if isinstance(value, (list, tuple)):
        if depth >= MAX_TACTIC_DEPTH or len(value) > MAX_TACTIC_ITEMS:
            raise ValueError("the tactic is nested too deeply or too long")
        return tuple(tactic_from_json(part, depth + 1) for part in value)
    raise ValueError(f"a tactic cannot hold a JSON {_json_type(value)}")


def describe_choice(runner: str, tactic: Any) -> str:
    """Runner and tactic (in JSON or Python form) in a few words: ``MoERunner [128, 4]``, ``R few 16,4 / 8,2``."""
    return f"{runner} {describe_tactic(tactic)}"


def describe_tactic(tactic: Any) -> str:
    """A tactic as JSON; FlashInfer's -1 is the default, and a name before flat groups is spelled ``few 16,4 / 8,2``."""
    if tactic == -1 and not isinstance(tactic, bool):
        return "default"
    if isinstance(tactic, (list, tuple)) and tactic and isinstance(tactic[0], str):
        groups = [
            ",".join(map(str, part)) if isinstance(part, (list, tuple)) else str(part) for part in tactic[1:]
        ]
        return f"{tactic[0]} {' / '.join(groups)}".rstrip()
    return json.dumps(tactic_to_json(tactic))


def policy_from_json(value: Any) -> Policy:
    """A flat list of scalars as a tuple; ``ValueError`` otherwise."""
    if not isinstance(value, (list, tuple)) or len(value) > 32:
        raise ValueError("the policy is not a short list")
    for part in value:
        if not (part is None or isinstance(part, (bool, int, float, str))):
            raise ValueError(f"the policy holds a JSON {_json_type(part)}")
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError("a number in the policy is not finite")
    return tuple(value)


def describe_policy(policy: Policy | None) -> str:
    """In words: ``graph x1, cold L2``. FlashInfer's form is pairs of name and value."""
    if policy is None:
        return "unknown"
    pairs = dict(zip(policy[::2], policy[1::2], strict=False))
    if set(pairs) != {"cuda_graph_profile_replays", "l2_cache_policy"}:
        return ", ".join(str(part) for part in policy)
    replays = pairs["cuda_graph_profile_replays"]
    timing = "eager" if replays is None else f"graph x{replays}"
    return f"{timing}, {pairs['l2_cache_policy']} L2"


@dataclass(frozen=True)
class RecordKey:
    """A record key taken apart.

    ``profile`` holds one shape per input, ``(0,)`` for an input that is no tensor and -1 for a derived
    dimension. ``extras_text`` is the extras as written; ``extras`` its top-level parts, ints, bools, None and
    strings decoded, anything else left as its text.
    """

    custom_op: str
    runner: str
    profile: tuple[tuple[int, ...], ...]
    extras_text: str
    extras: tuple[Any, ...]

    @property
    def num_tokens(self) -> int | None:
        """The bucket: the first dimension of the first input that has one; None when no input does."""
        for shape in self.profile:
            if shape and shape[0] > 0:
                return shape[0]
        return None


_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_INT = re.compile(r"-?\d+")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_OPENERS = {"(": ")", "[": "]", "{": "}"}


def parse_key(key: str) -> RecordKey:
    """Take a FlashInfer file key apart; ``ValueError`` when it is not one."""
    reader = _KeyReader(key)
    reader.expect("(")
    custom_op = reader.string()
    reader.expect(",")
    runner = reader.string()
    reader.expect(",")
    profile = reader.shapes()
    reader.expect(",")
    extras_text = reader.rest_before_final(")")
    if not (extras_text.startswith("(") and extras_text.endswith(")")):
        raise ValueError("the extras of the key are not a tuple")
    extras = tuple(_atom(part) for part in _split_top_level(extras_text[1:-1]))
    return RecordKey(custom_op, runner, profile, extras_text, extras)


def parsed_key(key: str) -> RecordKey | None:
    """`parse_key`, or None for a text that is no key."""
    try:
        return parse_key(key)
    except ValueError:
        return None


def bucket_in(key: str) -> int | None:
    """The tokens that a key names; None where it names none or is no key."""
    parsed = parsed_key(key)
    return None if parsed is None else parsed.num_tokens


@functools.lru_cache(maxsize=8192)
def _runner_span(key: str) -> tuple[int, int] | None:
    """Where the runner's name stands in a key, quotes included; None when it is no key."""
    try:
        reader = _KeyReader(key)
        reader.expect("(")
        reader.string()
        reader.expect(",")
        reader.peek()  # skips blanks
        begin = reader.at
        reader.string()
        return begin, reader.at
    except ValueError:
        return None


def question_of(key: str) -> str:
    """What a key asks, whoever answers it: the key without its runner. The one rule of what is one question.

    FlashInfer's tuner looks each runner of an op up by a key of its own and takes the first that has one, so of two
    records with one question the better or the newer may never be seen: only one may be in force. That runners of
    one op give the same extras is up to them. A text that is no key is a question of its own.
    """
    span = _runner_span(key)
    return key if span is None else key[: span[0]] + key[span[1] :]


def with_runner(key: str, runner: str) -> str:
    """The key under which ``runner`` would answer the same question; a text that is no key stays."""
    span = _runner_span(key)
    return key if span is None else key[: span[0]] + repr(runner) + key[span[1] :]


def by_question(records: Iterable[Record]) -> dict[str, Record]:
    """One record for each question: of several a pinned one, else the newest, else the last."""
    answers: dict[str, Record] = {}
    for record in records:
        question = question_of(record.key)
        present = answers.get(question)
        if present is None or _age_order(record) >= _age_order(present):
            answers[question] = record
    return answers


def _age_order(record: Record) -> tuple[bool, str]:
    return record.pinned, record.tuned_at or ""


class _KeyReader:
    """A cursor over the fixed head of a key: two strings and a tuple of integer tuples."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def peek(self) -> str:
        self._skip_blanks()
        return self.text[self.at : self.at + 1]

    def expect(self, char: str) -> None:
        if self.peek() != char:
            raise ValueError(f"expected {char!r} at character {self.at} of the key")
        self.at += 1

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._skip_blanks()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"expected {what} at character {self.at} of the key")
        self.at = match.end()
        return match.group()

    def string(self) -> str:
        return _unquote(self._match(_STRING, "a string"))

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._items(lambda: tuple(self._items(lambda: int(self._match(_INT, "an integer"))))))

    def _items(self, read: Any) -> list[Any]:
        self.expect("(")
        items: list[Any] = []
        while self.peek() != ")":
            items.append(read())
            if self.peek() != ")":
                self.expect(",")
        self.expect(")")
        return items

    def rest_before_final(self, char: str) -> str:
        rest = self.text[self.at :].strip()
        if not rest.endswith(char):
            raise ValueError(f"the key does not end with {char!r}")
        return rest[:-1].strip()


def _unquote(literal: str) -> str:
    def decode(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "xuU" and len(code) > 1:
            number = int(code[1:], 16)
            return chr(number) if number <= 0x10FFFF else match.group()
        return _SIMPLE_ESCAPES.get(code, match.group())

    return _ESCAPE.sub(decode, literal[1:-1])


def _split_top_level(text: str) -> list[str]:
    """Split at commas outside quotes and brackets; unbalanced text stays in one piece."""
    parts: list[str] = []
    start = at = 0
    closers: list[str] = []
    while at < len(text):
        char = text[at]
        if char in "'\"" and (literal := _STRING.match(text, at)):
            at = literal.end()
            continue
        if char in _OPENERS:
            closers.append(_OPENERS[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif char == "," and not closers:
            parts.append(text[start:at].strip())
            start = at + 1
        at += 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _atom(text: str) -> Any:
    if _INT.fullmatch(text) and len(text) < 20:
        return int(text)
    if _STRING.fullmatch(text):
        return _unquote(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def _json_type(value: Any) -> str:
    names: dict[type, str] = {dict: "object", list: "list", str: "string"}
    return names.get(type(value), type(value).__name__)
