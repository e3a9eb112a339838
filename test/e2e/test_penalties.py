"""Penalties and biases over HTTP: they change what is said, in the way they say, on every endpoint."""

from __future__ import annotations

import pytest

BODY = {"prompt": "1+1=", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def ids(server, **sampling) -> list[int]:
    """The tokens of a greedy answer."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, **sampling}
    response = server.post("/generate", json={"text": "1+1=", "sampling_params": params})
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}]
)
def test_a_penalty_makes_an_answer_repeat_itself_less_on_every_endpoint(server, penalty):
    free, penalised = ids(server), ids(server, **penalty)
    assert len(set(penalised)) > len(set(free))
    text = server.complete(**BODY, **penalty)["choices"][0]["text"]
    assert text != server.complete(**BODY)["choices"][0]["text"]
    # The first token has nothing before it to be penalised for.
    assert penalised[0] == free[0]


def test_a_penalty_does_not_depend_on_the_company(builtin_server):
    penalty = {"frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    alone = ids(builtin_server, **penalty)
    params = [{"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}] * 5
    params[2] = {**params[2], **penalty}
    params[4] = {**params[4], "presence_penalty": 1.0}
    body = {"text": ["9-3=", "1+1=", "1+1=", "x", "1+1="], "sampling_params": params}
    outputs = builtin_server.post("/generate", json=body).json()
    assert outputs[2]["output_ids"] == alone
    assert outputs[1]["output_ids"] == ids(builtin_server)


def test_a_bias_forces_and_forbids_tokens(builtin_server):
    free = ids(builtin_server)
    assert set(ids(builtin_server, logit_bias={"65": 100})) == {65}
    assert free[0] not in ids(builtin_server, logit_bias={str(free[0]): -100})
    chat = {
        "messages": [{"role": "user", "content": "37+58="}],
        "temperature": 0,
        "max_tokens": 3,
        "logit_bias": {"65": 100},
    }
    forced = builtin_server.post("/v1/chat/completions", json=chat).json()
    assert len(set(forced["choices"][0]["message"]["content"])) == 1
