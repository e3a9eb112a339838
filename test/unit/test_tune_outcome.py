"""What `sglang autotune tune` makes of its ranks' reports: an exit code and one line."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.cli.autotune.tune import INCOMPLETE, outcome
from sglang.cli.errors import START_ERROR
from support.sample_report import sample_report


def good(**changes: Any) -> dict[str, Any]:
    report = sample_report()
    for step in report["steps"]:
        step["source"] = "tuned"
    return {**report, **changes}


def test_all_steps_with_records_is_success():
    code, words = outcome({0: good(), 1: good()})
    assert code == 0
    assert words.startswith("done in 11.2 s: 36 profiles tuned") and "rank_tp0_pp0_dp0.json" in words


@pytest.mark.parametrize("source", ["left out", "over budget"])
def test_steps_without_records_are_counted_and_named(source):
    report = good()
    report["steps"][2]["source"] = source
    code, words = outcome({0: report})
    assert code == INCOMPLETE and "1 of 20 steps left out (decode 16)" in words


def test_a_fallback_on_any_rank_is_incomplete():
    report = good()
    report["ranks"][3]["fallbacks"] = 2
    code, words = outcome({0: report})
    assert code == INCOMPLETE and "2 lookups still fall back" in words


def test_a_megamoe_capacity_at_the_default_is_incomplete():
    winners = {"16": {"source": "default"}, "4": {"source": "default"}, "1": {"source": "cached"}}
    code, words = outcome({0: good(megamoe={"winners": winners})})
    assert code == INCOMPLETE and "MegaMoE runs the kernel's default at capacities 4 16" in words
    assert outcome({0: good(megamoe={"winners": {"1": {"source": "tuned"}}})})[0] == 0


def test_the_rank_that_failed_is_named_before_those_that_were_stopped():
    stopped = {"error": "stopped, since another rank had failed"}
    code, words = outcome({0: stopped, 1: {"error": "RuntimeError: out of\nmemory"}, 2: stopped})
    assert (code, words) == (START_ERROR, "failed: rank 1: RuntimeError: out of memory")


def test_tuning_that_cannot_be_had_is_a_failure_and_a_skip_is_incomplete():
    failed = good(status="failed", reason="FlashInfer cannot be imported")
    assert outcome({0: failed}) == (START_ERROR, "failed: FlashInfer cannot be imported")
    skipped = good(status="skipped", reason="compute capability 8.0 is below 9.0")
    assert outcome({0: skipped})[0] == INCOMPLETE


def test_records_of_any_rank_that_were_not_kept_are_a_failure():
    lost = good(cache_path=None, warnings=["records are kept in memory only: disk full"])
    code, words = outcome({0: good(), 1: lost})
    assert code == START_ERROR and "disk full" in words and "SGLANG_CACHE_DIR" in words
