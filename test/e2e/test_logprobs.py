"""Log-probabilities of outputs and prompts, in the shapes of all three endpoints."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest

PROMPT = "1+2=3\n37+58="
GREEDY = {"temperature": 0, "max_tokens": 6}


def logprobs_of(body: dict) -> dict:
    return body["choices"][0]["logprobs"]


def test_each_output_token_has_its_log_probability_and_the_greedy_one_is_the_likeliest(builtin_server):
    body = builtin_server.complete(PROMPT, logprobs=3, **GREEDY)
    logprobs = logprobs_of(body)
    assert "".join(logprobs["tokens"]) == body["choices"][0]["text"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value == max(top.values()) <= 0
        assert len(top) == 3 and sum(map(math.exp, top.values())) <= 1 + 1e-5
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5][: len(logprobs["tokens"])]


def test_echo_gives_the_prompts_log_probabilities_too_and_none_for_its_first_token(builtin_server):
    body = builtin_server.complete(PROMPT, logprobs=1, echo=True, **GREEDY)
    logprobs = logprobs_of(body)
    assert "".join(logprobs["tokens"]) == body["choices"][0]["text"]
    assert body["choices"][0]["text"].startswith(PROMPT)
    assert len(logprobs["tokens"]) == body["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(
        value <= max(top.values())
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    )


def test_a_text_has_the_same_log_probabilities_as_an_output_and_as_a_prompt(builtin_server):
    said = logprobs_of(builtin_server.complete(PROMPT, logprobs=0, **GREEDY))
    text = PROMPT + "".join(said["tokens"])
    read = logprobs_of(builtin_server.complete(text, logprobs=0, echo=True, max_tokens=0, temperature=0))
    assert read["token_logprobs"][-len(said["tokens"]) :] == pytest.approx(said["token_logprobs"], abs=1e-3)
    assert "".join(read["tokens"]) == text


def test_a_prompt_asked_twice_has_the_same_log_probabilities(builtin_server):
    prompt = "".join(f"{i}+{i}={2 * i}\n" for i in range(40))
    answers = [
        logprobs_of(builtin_server.complete(prompt, logprobs=1, echo=True, max_tokens=0)) for _ in range(2)
    ]
    assert len(answers[0]["token_logprobs"]) == len(prompt)
    assert answers[1]["token_logprobs"][1:] == pytest.approx(answers[0]["token_logprobs"][1:], abs=1e-3)


def test_a_stream_gives_the_log_probabilities_of_the_whole_answer(builtin_server):
    for echo in (False, True):
        body = {"prompt": PROMPT, "logprobs": 2, "echo": echo, **GREEDY}
        whole = logprobs_of(builtin_server.complete(**body))
        joined = {name: [] for name in whole}
        url = builtin_server.base_url + "/v1/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                if line != "data: [DONE]":
                    for name, values in logprobs_of(json.loads(line.removeprefix("data: "))).items():
                        joined[name] += values
        assert joined["tokens"] == whole["tokens"] and joined["text_offset"] == whole["text_offset"]
        first = 1 if echo else 0
        assert joined["token_logprobs"][first:] == pytest.approx(whole["token_logprobs"][first:], abs=1e-3)


def test_a_stop_string_ends_the_log_probabilities_with_the_text(builtin_server):
    body = builtin_server.complete(PROMPT, logprobs=0, stop="5", **GREEDY)
    assert logprobs_of(body)["tokens"] == ["9", "5"]
    assert body["usage"]["completion_tokens"] == 2


def test_the_openai_client_reads_a_chats_log_probabilities(builtin_server):
    client = openai.OpenAI(base_url=builtin_server.base_url + "/v1", api_key="none", max_retries=0)
    ask = {
        "model": "default",
        "messages": [{"role": "user", "content": "37+58="}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**ask)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert "".join(entry.token for entry in content).startswith(whole.choices[0].message.content)
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.token for entry in content]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**{**ask, "logprobs": False})


def generate(server, **body):
    sampling = {"temperature": 0, "max_new_tokens": 4}
    response = server.post("/generate", json={"text": PROMPT, "sampling_params": sampling, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_gives_triples_of_log_probability_id_and_text(builtin_server):
    output = generate(builtin_server, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = output["meta_info"]
    values, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(ids) == output["output_ids"]
    assert "".join(texts) == output["text"]
    assert all(value <= 0 for value in values)
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("start", [0, 1, 5])
def test_generate_scores_the_prompt_from_where_it_is_told(builtin_server, start):
    meta = generate(builtin_server, return_logprob=True, logprob_start_len=start)["meta_info"]
    entries = meta["input_token_logprobs"]
    assert len(entries) == meta["prompt_tokens"] - start
    assert [value is None for value, _, _ in entries] == [start == 0, *[False] * (len(entries) - 1)]
    assert "input_top_logprobs" not in meta


def test_a_batch_may_want_log_probabilities_of_some_prompts_only(builtin_server):
    outputs = generate(builtin_server, text=[PROMPT, PROMPT], return_logprob=[True, False])
    assert ["output_token_logprobs" in output["meta_info"] for output in outputs] == [True, False]
    assert outputs[0]["text"] == outputs[1]["text"]


def test_an_evaluation_harness_finds_the_likeliest_answer(builtin_server):
    """lm_eval's `local-completions` sends prompts and answers together as token ids, a batch at a time.

    It sums the log-probabilities of the answer's tokens, without that of the one token which it has to ask for.
    """
    questions = {"1+2=3\n37+58=": ("95", "94", "85"), "1+2=3\n20+22=": ("32", "42", "44")}
    pairs = [(context, answer) for context, answers in questions.items() for answer in answers]
    body = {
        "model": "builtin",
        "prompt": [[ord(char) for char in context + answer] for context, answer in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = builtin_server.post("/v1/completions", json=body).json()["choices"]
    scores, is_greedy = {}, {}
    for choice in choices:
        context, answer = pairs[choice["index"]]
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        top = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(values) == len(answer)
        scores[context, answer] = sum(values)
        is_greedy[context, answer] = all(
            value == max(rivals.values()) for value, rivals in zip(values, top, strict=True)
        )
    for context, right in zip(questions, ("95", "42"), strict=True):
        assert max(questions[context], key=lambda answer: scores[context, answer]) == right
        assert [answer for answer in questions[context] if is_greedy[context, answer]] == [right]
