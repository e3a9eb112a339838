"""What hostile clients send: each gets a clean refusal, the server goes on, and nothing of its inside shows."""

from __future__ import annotations

import json
import socket

import pytest

JSON = {"content-type": "application/json"}


def completion(**fields) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


HUGE = 10**30
BODIES = {
    "nothing": b"",
    "no json": b"\x00\xff",
    "a list": b"[1]",
    "bytes that are no text": b'{"prompt":"\xff\xfe"}',
    "half a surrogate": b'{"prompt":"\\ud800"}',
    "deep": b'{"prompt":' + b"[" * 100_000,
    "deep and closed": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "not a number": b'{"prompt":"a","temperature":NaN}',
    "infinite": b'{"prompt":"a","temperature":1e400}',
    "huge n": completion(n=HUGE),
    "huge seed": completion(seed=HUGE),
    "huge stop token": completion(stop_token_ids=[HUGE]),
    "huge prompt token": b'{"prompt":[1000000000000000000000000000]}',
    "huge bias": completion(logit_bias={"1": 1e300}),
    "many prompts": completion(prompt=[[1]] * 5000),
    "no prompts": completion(prompt=[]),
    "an empty prompt": completion(prompt=[[]]),
    "a long text": completion(prompt="a" * 4_000_000),
    "a form": b"prompt=a",
}


def is_idle(server) -> bool:
    state = server.info()["internal_states"][0]
    return state["num_running_reqs"] == state["num_waiting_reqs"] == state["num_used_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_a_400_in_openai_shape(server, path, name):
    response = server.post(path, content=BODIES[name], headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert not any(word in response.text for word in ("Traceback", ".py", "/root", "/home", "/tmp"))


@pytest.mark.parametrize(
    "fields", [{"max_tokens": HUGE, "stop_token_ids": [0]}, {"top_k": HUGE}, {"prompt": "a\0b"}]
)
def test_numbers_beyond_all_bounds_mean_no_bound(server, fields):
    assert server.post("/v1/completions", content=completion(**fields), headers=JSON).status_code == 200


def test_a_body_beyond_the_limit_is_a_413(server):
    response = server.post(
        "/v1/completions", content=b'{"prompt":"' + b"a" * (9 * 2**20) + b'"}', headers=JSON
    )
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff garbage\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_no_http_is_refused(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        assert connection.recv(4096).split(b" ")[1] in (b"400", b"413")


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/etc/passwd", "/docs", "/redoc", "/a%0d%0aSet-Cookie:x=y"]
)
def test_there_is_nothing_beside_the_endpoints(server, path):
    response = server.get(path)
    assert response.status_code == 404 and "set-cookie" not in response.headers


def test_after_all_that_the_server_is_idle_and_answers(server):
    server.wait_until("everything is done", lambda: is_idle(server), 30)
    assert server.complete("now", max_tokens=2)["choices"]
    assert "Traceback" not in server.log, server.log[server.log.index("Traceback") - 300 :][:6000]


def test_it_listens_on_loopback_only_unless_told_otherwise(server):
    listening = {line.split()[1] for line in open("/proc/net/tcp").readlines()[1:] if line.split()[3] == "0A"}
    assert f"0100007F:{server.port:04X}" in listening and f"00000000:{server.port:04X}" not in listening
