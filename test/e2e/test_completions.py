"""`/v1/completions` as its users call it: the openai client, plain HTTP, and everything that can be wrong."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(server):
    return server.get("/v1/models").json()["data"][0]["id"]


def stream(server, **body):
    """The data of the events of a streamed completion."""
    with httpx.stream(
        "POST", server.base_url + "/v1/completions", json={"stream": True, **body}, timeout=60
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def streamed_text(events):
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_the_openai_client_completes(client, model):
    completion = client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0)
    assert completion.choices[0].finish_reason in ("length", "stop")
    assert completion.usage.prompt_tokens == 5
    assert completion.usage.total_tokens == 5 + completion.usage.completion_tokens


def test_the_openai_client_streams_the_same_text_with_usage_at_the_end(client, model):
    whole = client.completions.create(model=model, prompt="Hello", extra_body=GREEDY)
    chunks = list(
        client.completions.create(
            model=model,
            prompt="Hello",
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GREEDY,
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == "length"
    assert len(chunks) > 5


def test_the_openai_client_lists_and_retrieves_the_model(client, model):
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_list_of_prompts_gives_a_choice_each_as_if_sent_alone(server):
    prompts = ["one", "two two", "three three three"]
    together = server.complete(prompts, **GREEDY)["choices"]
    assert [choice["index"] for choice in together] == [0, 1, 2]
    for prompt, choice in zip(prompts, together, strict=True):
        assert choice["text"] == server.complete(prompt, **GREEDY)["choices"][0]["text"]


def test_token_ids_stand_for_the_text_that_they_encode(server):
    text = server.complete("abc", echo=True, **GREEDY)["choices"][0]["text"]
    assert text.startswith("abc")
    tokens = [ord(char) - 33 for char in "abc"]  # this tokenizer's ids of printable ASCII
    assert server.complete(tokens, echo=True, **GREEDY)["choices"][0]["text"] == text
    choices = server.complete([tokens, tokens], echo=True, **GREEDY)["choices"]
    assert [choice["text"] for choice in choices] == [text, text]


def test_n_copies_of_a_seeded_prompt_differ_and_can_be_repeated(server):
    body = {"n": 3, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    choices = server.complete(["a", "b"], **body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices[:3]}) == 3
    assert [c["text"] for c in server.complete(["a", "b"], **body)["choices"]] == [c["text"] for c in choices]


def test_the_same_seed_gives_the_same_text_whatever_else_runs(server):
    body = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    alone = server.complete("seeded", seed=1, **body)["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, "x" * i, **body) for i in range(1, 8)]
        crowded = server.complete("seeded", seed=1, **body)["choices"][0]["text"]
        [other.result() for other in others]
    assert crowded == alone
    assert server.complete("seeded", seed=2, **body)["choices"][0]["text"] != alone


def test_without_a_seed_sampled_texts_differ(server):
    texts = {server.complete("same", max_tokens=24, ignore_eos=True)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_top_k_one_is_greedy(server):
    greedy = server.complete("k", **GREEDY)["choices"][0]["text"]
    only_best = server.complete("k", **{**GREEDY, "temperature": 1.0}, top_k=1)["choices"][0]["text"]
    assert only_best == greedy


def test_a_stop_string_ends_the_text_before_it_streamed_or_not(server):
    text = server.complete("stop here", **GREEDY)["choices"][0]["text"]
    stop = text[5:8]
    expected = text[: text.index(stop)]
    choice = server.complete("stop here", stop=stop, **GREEDY)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == (expected, "stop", stop)
    events = stream(server, prompt="stop here", stop=["never in it", stop], **GREEDY)
    assert streamed_text(events) == expected
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string(server):
    body = server.complete("stop here", **GREEDY)
    text, stop = body["choices"][0]["text"], body["choices"][0]["text"][:2]
    assert body["usage"]["completion_tokens"] == 24
    stopped = server.complete("stop here", stop=stop, **GREEDY)
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert stopped["usage"]["completion_tokens"] < 24


def test_an_end_token_stops_with_its_id_and_no_text_of_it(server):
    ids = server.post("/v1/completions", json={"prompt": "z", **GREEDY}).json()
    first = ids["choices"][0]["text"]
    body = {"prompt": "z", **GREEDY, "stop_token_ids": list(range(264))}
    choice = server.post("/v1/completions", json=body).json()["choices"][0]
    assert first and choice["text"] == "" and choice["finish_reason"] == "stop"
    assert isinstance(choice["matched_stop"], int)


def test_zero_max_tokens_gives_an_empty_text(server):
    body = server.complete("nothing", max_tokens=0)
    assert body["choices"][0]["text"] == "" and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


def test_a_streamed_piece_never_holds_half_a_character(server):
    prompt = "é字🙂" * 3
    whole = server.complete(prompt, echo=True, **GREEDY)["choices"][0]["text"]
    events = stream(server, prompt=prompt, echo=True, **GREEDY)
    assert whole.startswith(prompt)
    assert streamed_text(events) == whole


def test_output_stops_at_the_context_length(server):
    body = server.complete("x" * 500, max_tokens=400, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 512


BAD_BODIES = {
    "unknown model": ({"model": "no-such-model", "prompt": "a"}, 404, "model"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "prompt over the context length": ({"prompt": "x" * 512}, 400, "prompt"),
    "one prompt of several too long": ({"prompt": ["a", "x" * 600]}, 400, "prompt"),
    "no prompt": ({"max_tokens": 3}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "empty list": ({"prompt": []}, 400, "prompt"),
    "mixed list": ({"prompt": ["a", 1]}, 400, "prompt"),
    "prompt of a wrong type": ({"prompt": 5}, 400, "prompt"),
    "token id outside the vocabulary": ({"prompt": [0, 100000]}, 400, "prompt"),
    "negative token id": ({"prompt": [-1]}, 400, "prompt"),
    "temperature of a wrong type": ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    "negative temperature": ({"prompt": "a", "temperature": -0.5}, 400, "temperature"),
    "top_p of zero": ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    "top_k of zero": ({"prompt": "a", "top_k": 0}, 400, "top_k"),
    "n of zero": ({"prompt": "a", "n": 0}, 400, "n"),
    "stream options without stream": ({"prompt": "a", "stream_options": {}}, 400, "stream_options"),
    "presence_penalty out of range": ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    "logit_bias out of range": ({"prompt": "a", "logit_bias": {"5": 200}}, 400, "logit_bias"),
    "logit_bias of no token": ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias"),
    "logit_bias of no number": ({"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    "too many logprobs": ({"prompt": "a", "logprobs": 1000}, 400, "logprobs"),
    "a parameter that is not built": ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "a list for a body": ([], 400, None),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_request_gets_an_openai_shaped_error(server, name):
    body, status, param = BAD_BODIES[name]
    response = server.post("/v1/completions", json=body)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"  ", b"{", b"\xff", b'{"prompt": "a",}', b"null", b'"text"'])
def test_a_body_that_is_no_json_object_gets_400(server, body):
    response = server.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_bad_streamed_request_gets_a_status_not_an_event(server):
    response = server.post("/v1/completions", json={"prompt": "a", "max_tokens": -1, "stream": True})
    assert response.status_code == 400


def test_the_openai_client_raises_its_own_errors(client, model):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", max_tokens=-1)


def test_unknown_routes_and_methods_get_an_openai_shaped_error(server):
    assert server.get("/v1/nothing").status_code == 404
    assert server.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert server.get("/v1/completions").status_code == 405
    assert "error" in server.get("/v1/completions").json()


def test_the_server_lives_on_after_bad_requests(server):
    for _ in range(20):
        assert server.post("/v1/completions", content=b"{").status_code == 400
    assert server.complete("still here", max_tokens=3)["choices"]
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.log


def held_tokens(server):
    state = server.info()["internal_states"][0]
    return state["num_used_tokens"], state["num_running_reqs"], state["num_waiting_reqs"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_kv(server, streamed):
    body = {"prompt": "x" * 50, "max_tokens": 450, "ignore_eos": True, "stream": streamed, "n": 40}
    with httpx.Client(timeout=60) as client:
        if streamed:
            with client.stream("POST", server.base_url + "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # kept: the response closes with it
                next(lines)
                server.wait_until("requests run", lambda: held_tokens(server)[1] > 0, 30)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.base_url + "/v1/completions", json=body, timeout=0.5)
    # 40 sequences of 450 tokens take much longer than this to finish.
    server.wait_until("all KV is free", lambda: held_tokens(server) == (0, 0, 0), 5)


def test_128_concurrent_requests_all_finish(server):
    def call(i):
        body = {"prompt": f"request {i} " * (1 + i % 7), "max_tokens": 8 + i % 5, "ignore_eos": True}
        if i % 2:
            return len(stream(server, **body)) > 1
        return server.complete(**body)["usage"]["completion_tokens"] == 8 + i % 5

    with ThreadPoolExecutor(128) as pool:
        assert all(pool.map(call, range(128)))
    assert held_tokens(server) == (0, 0, 0)
    assert "Traceback" not in server.log
