"""Incremental detokenisation: the pieces join to the whole, and nobody sees half a character or a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from sglang.srt.managers.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopMatcher


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """One token per byte: every character outside ASCII is cut."""
    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(_byte_alphabet())}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Whole words with a leading-space mark, and byte tokens for the rest, as SentencePiece models have."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁Hello": 256, "▁world": 257, "!": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    pieces = []
    for size in sizes:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    assert not ids
    return [*pieces, detokenizer.flush()]


def test_a_character_of_four_bytes_appears_with_its_last_byte(byte_level):
    pieces = _pieces(byte_level, list("a🙂é".encode()), [1] * 7)
    assert pieces == ["a", "", "", "", "🙂", "", "é", ""]


def test_pieces_join_to_the_whole_text_however_it_is_cut(byte_level):
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("aé字🙂 \n") for _ in range(rng.randint(1, 40)))
        ids = list(text.encode())
        sizes = []
        while sum(sizes) < len(ids):
            sizes.append(min(rng.randint(1, 5), len(ids) - sum(sizes)))
        pieces = _pieces(byte_level, ids, sizes)
        assert "".join(pieces) == text
        assert REPLACEMENT not in "".join(pieces)


def test_consecutive_byte_fallback_characters_appear_one_by_one(byte_fallback):
    ids = [256, *"字宙".encode(), 257, 258]
    assert _pieces(byte_fallback, ids, [1] * len(ids)) == [
        "Hello",
        "",
        "",
        "字",
        "",
        "",
        "宙",
        " world",
        "!",
        "",
    ]


def test_random_bytes_join_to_the_whole_text(byte_level):
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        assert "".join(_pieces(byte_level, ids, [1] * len(ids))) == byte_level.decode(ids)


def test_a_character_cut_off_by_the_end_is_shown_as_a_replacement(byte_level):
    assert _pieces(byte_level, list("é".encode())[:1], [1]) == ["", REPLACEMENT]


def test_endless_garbage_is_emitted_and_decoded_in_bounded_windows(byte_level):
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level.decode(ids)

    detokenizer = IncrementalDetokenizer(decode)
    text = "".join(detokenizer.push([0x80]) for _ in range(1000)) + detokenizer.flush()
    assert text == REPLACEMENT * 1000
    assert longest < 64


def _match(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return (text if matcher.matched else text + matcher.flush()), matcher.matched


def test_a_stop_string_across_pieces_is_found_and_never_shown():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ["one E", "N", "D two"]] == ["one ", "", ""]
    assert matcher.matched == "END"


def test_text_that_only_began_like_a_stop_string_is_released():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ["EN", "E", "x"]] == ["", "EN", "Ex"]
    assert StopMatcher(["END"]).push("E") == ""


def test_held_text_comes_with_the_flush_when_the_sequence_ends():
    assert _match(["END"], ["the E", "N"]) == ("the EN", None)


def test_the_stop_string_completed_first_wins_and_ties_go_to_the_longest():
    assert _match(["abc", "b"], ["xabc"]) == ("xa", "b")
    assert _match(["b", "ab"], ["x", "a", "b"]) == ("x", "ab")


def test_stop_results_do_not_depend_on_how_the_text_is_cut():
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(2)]
        cut = rng.randint(0, 12)
        assert _match(stops, [text]) == _match(stops, list(text)) == _match(stops, [text[:cut], text[cut:]])


def test_without_stop_strings_text_passes_through_at_once():
    assert StopMatcher([]).push("anything") == "anything"
