"""`/v1/chat/completions` of the built-in model, as the openai client and plain HTTP call it."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

MODEL = "sglang-builtin"
SUM = [{"role": "user", "content": "37+58="}]


@pytest.fixture(scope="module")
def client(builtin_server):
    return openai.OpenAI(base_url=builtin_server.base_url + "/v1", api_key="none", max_retries=0)


def chat(server, messages=SUM, **fields) -> httpx.Response:
    return server.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})


def events(server, **fields) -> list[dict]:
    """The events of a streamed chat, which must end with `[DONE]`."""
    body = {"messages": SUM, "temperature": 0, "stream": True, **fields}
    with httpx.stream("POST", server.base_url + "/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_openai_client_chats_and_the_answer_is_right(client):
    completion = client.chat.completions.create(model="default", messages=SUM, temperature=0)
    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content.strip()) == ("assistant", "95")
    assert choice.finish_reason == "stop"
    assert completion.object == "chat.completion"
    assert completion.usage.total_tokens == (
        completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def test_the_openai_client_streams_the_same_answer_with_usage_at_the_end(client):
    whole = client.chat.completions.create(model="default", messages=SUM, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=SUM,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_stream_gives_the_role_first_and_the_finish_reason_last(builtin_server):
    choices = [event["choices"][0] for event in events(builtin_server)]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert all("role" not in choice["delta"] for choice in choices[1:])


def test_each_event_tells_the_usage_when_asked(builtin_server):
    counts = [
        event["usage"]["completion_tokens"]
        for event in events(builtin_server, stream_options={"continuous_usage_stats": True})
    ]
    assert counts == sorted(counts) and counts[-1] > 1


def test_n_answers_each_have_an_index_streamed_or_not(builtin_server):
    body = chat(builtin_server, n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"].strip() for choice in body["choices"]} == {"95"}
    texts = dict.fromkeys(range(3), "")
    for event in events(builtin_server, n=3):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [choice["message"]["content"] for choice in body["choices"]]


def test_a_stop_string_and_a_token_limit_end_the_answer(builtin_server):
    stopped = chat(builtin_server, stop=["5"]).json()["choices"][0]
    assert (stopped["message"]["content"].strip(), stopped["finish_reason"]) == ("9", "stop")
    assert stopped["matched_stop"] == "5"
    cut = chat(builtin_server, max_completion_tokens=1, max_tokens=50).json()
    assert cut["usage"]["completion_tokens"] == 1
    assert cut["choices"][0]["finish_reason"] == "length"


def test_earlier_turns_and_text_parts_are_part_of_the_conversation(builtin_server):
    turns = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "37+58="}]},
    ]
    longer = chat(builtin_server, turns).json()
    assert longer["usage"]["prompt_tokens"] > chat(builtin_server).json()["usage"]["prompt_tokens"]


def test_a_message_that_is_begun_is_continued(builtin_server):
    turns = [*SUM, {"role": "assistant", "content": "9"}]
    body = chat(builtin_server, turns, continue_final_message=True).json()
    assert body["choices"][0]["message"]["content"].strip() == "5"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": "text"}, "messages"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "no-such-model"}, "model"),
    ],
)
def test_a_bad_chat_gets_an_openai_shaped_error_that_names_the_field(builtin_server, fields, param):
    response = chat(builtin_server, **fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


def test_a_model_without_a_template_says_so(server):
    response = chat(server)
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
