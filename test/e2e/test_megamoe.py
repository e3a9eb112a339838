"""Serving through MegaMoE over HTTP: two ranks whose experts exchange tokens, tuned, warm and untuned alike."""

from __future__ import annotations

import pytest

TWO_RANKS = (
    "--tp-size",
    "2",
    "--attn-dp-size",
    "2",
    "--ep-size",
    "2",
    "--moe-a2a-backend",
    "reference_megamoe",
)
QUICK = (*TWO_RANKS, "--max-running-requests", "16", "--chunked-prefill-size", "128")
CAPACITIES = [1, 2, 4, 8, 64]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"12+7=19\n40-15=25\n{a}+{b}=" for a in (3, 17, 31, 44) for b in (4, 27, 58)]


def completions(server, prompts) -> list[str]:
    body = server.complete(prompts, max_tokens=4, temperature=0, stop=["\n"])
    return [choice["text"] for choice in sorted(body["choices"], key=lambda choice: choice["index"])]


def test_cold_and_warm_starts_answer_rightly_and_alike(start_server, prompts):
    right = [str(a + b) for a in (3, 17, 31, 44) for b in (4, 27, 58)]

    cold = start_server(*QUICK, tiny=False).wait_ready()
    report = cold.info()["autotune"]
    megamoe = report["megamoe"]
    assert report["status"] == "completed" and report["profiles_tuned"] == 5 and report["steps"] == []
    assert (megamoe["kernel"], megamoe["capacities"]) == ("reference_megamoe", CAPACITIES)
    assert (megamoe["tuned"], megamoe["cached"]) == (5, 0)
    answers = completions(cold, prompts)
    assert sum(a == b for a, b in zip(answers, right, strict=True)) >= 11
    assert cold.stop() == 0

    warm = start_server(*QUICK, tiny=False).wait_ready()
    report = warm.info()["autotune"]
    assert report["profiles_tuned"] == 0
    assert (report["megamoe"]["tuned"], report["megamoe"]["cached"]) == (0, 5)
    assert completions(warm, prompts) == answers
    assert warm.stop() == 0


def test_a_launch_that_breaks_megamoes_rules_ends_with_the_flags(start_server):
    server = start_server("--tp-size", "2", "--ep-size", "2", "--moe-runner-backend", "reference_megamoe")
    assert server.wait_exit() != 0
    assert "--attn-dp-size must equal --tp-size" in server.log
