"""How an error is worded in logs, reports and journals."""

from __future__ import annotations

import pytest

from sglang.srt.autotune.failures import describe


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no kernel for this tile"), "RuntimeError: no kernel for this tile"),
        (RuntimeError("\nNinja build failed.\r\nninja: a long trace"), "RuntimeError: Ninja build failed."),
        (MemoryError(), "MemoryError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 288),
    ],
)
def test_an_error_is_one_line_of_at_most_300_characters(error, words):
    assert describe(error) == words
