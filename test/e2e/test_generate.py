"""`/generate` and SGLang's other own endpoints, with the bodies that its users send."""

from __future__ import annotations

import json

import httpx
import pytest

GREEDY = {"temperature": 0, "max_new_tokens": 8}


def generate(server, **body):
    response = server.post("/generate", json={"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server, **body) -> list[dict]:
    """The events of a stream, which must end with `[DONE]`."""
    body = {"sampling_params": GREEDY, "stream": True, **body}
    with httpx.stream("POST", server.base_url + "/generate", json=body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_text_gets_one_output_with_its_counts(builtin_server):
    output = generate(builtin_server, text="1+2=3\n37+58=")
    assert output["text"].startswith("95\n")
    meta = output["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (12, len(output["output_ids"]))
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["id"] and meta["e2e_latency"] > 0 and meta["cached_tokens"] >= 0


def test_the_default_is_128_sampled_tokens(builtin_server):
    body = {"text": "a", "sampling_params": {"ignore_eos": True}}
    assert generate(builtin_server, **body)["meta_info"]["completion_tokens"] == 128


def test_token_ids_stand_for_text_and_a_list_gives_a_list(builtin_server):
    text = "37+58="
    alone = generate(builtin_server, text=text)
    input_ids = [ord(char) for char in text]
    completion = builtin_server.complete(input_ids, temperature=0, max_tokens=8)
    assert completion["usage"]["prompt_tokens"] == alone["meta_info"]["prompt_tokens"]
    by_ids = generate(builtin_server, input_ids=[input_ids, input_ids])
    assert [output["text"] for output in by_ids] == [completion["choices"][0]["text"]] * 2
    assert isinstance(generate(builtin_server, text=[text]), list)


def test_a_batch_gives_each_prompt_what_it_gets_alone_with_parameters_of_its_own(builtin_server):
    prompts = ["1+1=", "20+22=", "8-3="]
    params = [{**GREEDY, "max_new_tokens": limit} for limit in (1, 2, 5)]
    outputs = generate(builtin_server, text=prompts, sampling_params=params, rid=["a", "b", "c"])
    assert [output["meta_info"]["id"] for output in outputs] == ["a", "b", "c"]
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output["text"] == generate(builtin_server, text=prompt, sampling_params=param)["text"]


def test_a_stream_repeats_what_came_before_and_ends_like_the_whole_answer(builtin_server):
    whole = generate(builtin_server, text="37+58=")
    events = streamed(builtin_server, text="37+58=")
    assert all(
        after["text"].startswith(before["text"]) for before, after in zip(events, events[1:], strict=False)
    )
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_a_streamed_batch_says_whose_each_event_is(builtin_server):
    prompts = ["1+1=", "20+22="]
    last = {event["index"]: event["text"] for event in streamed(builtin_server, text=prompts)}
    assert [last[i] for i in range(2)] == [
        output["text"] for output in generate(builtin_server, text=prompts)
    ]


def test_n_seeded_samples_differ_and_can_be_repeated(builtin_server):
    params = {"n": 3, "sampling_seed": 5, "temperature": 2.0, "max_new_tokens": 16, "ignore_eos": True}
    outputs = generate(builtin_server, text="a", sampling_params=params)
    assert len({output["text"] for output in outputs}) == 3
    again = generate(builtin_server, text="a", sampling_params=params)
    assert [output["text"] for output in again] == [output["text"] for output in outputs]


def test_stops_end_the_text_and_are_named(builtin_server):
    by_text = generate(builtin_server, text="37+58=", sampling_params={**GREEDY, "stop": ["5"]})
    assert (by_text["text"], by_text["meta_info"]["finish_reason"]) == ("9", {"type": "stop", "matched": "5"})
    token = generate(builtin_server, text="37+58=")["output_ids"][1]
    by_id = generate(builtin_server, text="37+58=", sampling_params={**GREEDY, "stop_token_ids": [token]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert (by_id["text"], by_id["output_ids"][-1]) == ("9", token)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [99999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"warmth": 1}}, "warmth"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "regex"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_a_bad_request_names_the_field_at_fault(builtin_server, body, param):
    response = builtin_server.post("/generate", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_both_names_of_the_model_and_server_info_answer_alike(builtin_server):
    for name in ("/model_info", "/get_model_info"):
        info = builtin_server.get(name).json()
        assert info["is_generation"] is True and info["model_path"] == info["tokenizer_path"]
    assert builtin_server.get("/get_server_info").json().keys() == builtin_server.info().keys()


def test_health_generate_runs_a_token(builtin_server):
    before = builtin_server.get("/metrics").text
    assert builtin_server.get("/health_generate").status_code == 200
    assert builtin_server.get("/metrics").text != before
