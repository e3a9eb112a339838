"""A server that overlaps scheduling and forwards says what one that does not says, whatever is asked of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 1.0, "sampling_seed": 5, "top_p": 0.9},
    {"temperature": 0.8, "sampling_seed": 6, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "logit_bias": {"65": 3.0}},
    {"temperature": 0, "stop": ["B", "q"]},
]


def ask(server, number: int):
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    body = {
        "input_ids": [(number * 7 + i * i) % 256 for i in range(3 + 5 * number)],
        "sampling_params": {"max_new_tokens": 6 + number, "ignore_eos": number % 2 == 0, **sampling},
        "return_logprob": number % 3 == 0,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    response = httpx.post(f"{server.base_url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    meta = answer["meta_info"]
    scores = [[round(entry[0], 3) for entry in meta.get("output_token_logprobs", [])]]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["prompt_tokens"], scores


def test_answers_are_the_same_with_and_without_overlap(start_server):
    flags = ("--disable-flashinfer-autotune", "--chunked-prefill-size", "32", "--max-running-requests", "5")
    plain = start_server(*flags, "--disable-overlap-schedule")
    overlapped = start_server(*flags, SGLANG_OVERLAP_SCHEDULE_ON_CPU="1")
    answers = []
    for server in (plain.wait_ready(), overlapped.wait_ready()):
        with ThreadPoolExecutor(6) as pool:
            answers.append(list(pool.map(lambda number, s=server: ask(s, number), range(18))))
    assert answers[0] == answers[1]
