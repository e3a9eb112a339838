"""Prefix reuse over HTTP: it is reported, it can be emptied, and it changes no token."""

from __future__ import annotations

import httpx

LONG = list(range(1, 61))


def generate(server, input_ids, num_new=12, **sampling):
    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": num_new, "temperature": 0, **sampling},
    }
    answer = httpx.post(f"{server.base_url}/generate", json=body, timeout=60).raise_for_status().json()
    return answer["text"], answer["meta_info"]["cached_tokens"]


def flush(server):
    return httpx.post(f"{server.base_url}/flush_cache", timeout=30).status_code


def test_the_second_of_two_equal_prompts_is_reported_as_cached_and_answered_alike(server):
    assert flush(server) == 200
    first, num_cached = generate(server, LONG)
    assert num_cached == 0
    assert generate(server, LONG) == (first, 59)
    assert flush(server) == 200
    assert generate(server, LONG) == (first, 0)


def test_completions_report_cached_tokens_in_their_usage(server):
    assert flush(server) == 200
    body = {"prompt": LONG, "max_tokens": 4, "temperature": 0}
    for expected in (0, 59):
        answer = (
            httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        )
        details = answer["usage"]["prompt_tokens_details"]
        assert (details or {}).get("cached_tokens", 0) == expected


def test_prompts_that_share_beginnings_get_the_tokens_of_a_server_without_a_cache(server, start_server):
    plain = start_server("--disable-flashinfer-autotune", "--disable-radix-cache").wait_ready()
    prompts = [[*LONG[:length], *tail] for length in (10, 30, 60) for tail in ([7, 8, 9], [7, 8, 1], [])]
    num_cached = 0
    for prompt in prompts:
        text, cached = generate(server, prompt)
        num_cached += cached
        assert generate(plain, prompt) == (text, 0)
    assert num_cached > 100
