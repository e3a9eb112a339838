"""Bodies that are too large, or that never end, are refused before a handler holds them."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.testclient import TestClient

from sglang.srt.entrypoints.app import build_app
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.openai.body import parse_body
from sglang.srt.entrypoints.openai.completions import CompletionRequest
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.request_limits import LimitBodies
from sglang.srt.entrypoints.services import Services
from sglang.srt.managers.io_struct import Ready
from sglang.srt.managers.tokenizer import TextTokenizer
from sglang.srt.server_args import ServerArgs


class NoManager:
    """Stands where the other processes would; nothing of these tests may reach it."""


def app():
    status = EngineStatus(num_workers=1)
    status.on_tokenizer()
    status.on_worker_ready(Ready(0, {}))
    return build_app(Services(ServerArgs(), status, NoManager(), context_length=100))


def post(application, chunks, headers=(), pause_s=0.0):
    """Status and JSON body of a POST whose body comes in `chunks`; None stands for one that never comes."""

    async def call():
        pending, answer = list(chunks), {}

        async def receive():
            chunk = pending.pop(0)
            if chunk is None:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": chunk, "more_body": bool(pending)}

        async def send(message):
            answer.update(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": list(headers),
        }
        await application(scope, receive, send)
        return answer

    answer = asyncio.run(call())
    return json.loads(answer["body"])


@pytest.mark.parametrize("length", [str(9 * 2**20).encode(), b"99999999999999999999"])
def test_a_body_that_announces_too_much_is_not_read(length):
    answer = post(app(), [None], headers=[(b"content-length", length)])
    assert answer["error"]["code"] == "request_too_large"


def test_a_body_that_grows_beyond_the_limit_is_refused():
    answer = post(app(), [b"x" * 2**20] * 20)
    assert answer["error"]["code"] == "request_too_large"


def test_the_limit_is_the_variables(monkeypatch):
    monkeypatch.setenv("SGLANG_MAX_REQUEST_MIB", "1")
    assert post(app(), [b"x" * 2**20, b"y"])["error"]["code"] == "request_too_large"
    assert post(app(), [b"x" * 2**20])["error"]["code"] == "invalid_json"


def test_a_body_that_stops_coming_is_given_up():
    async def handler(scope, receive, send):
        try:
            await receive()
            await receive()
        except ApiError as error:
            await error.response()(scope, receive, send)

    answer = post(LimitBodies(handler, 100, pause_s=0.05), [b"{", None, b""])
    assert "nothing of the body came" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [b'{"prompt":' + b"[" * 100_000, b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}"]
)
def test_a_body_that_is_nested_too_deeply_is_a_clients_mistake(body):
    with pytest.raises(ApiError) as caught:
        parse_body(body, CompletionRequest, {})
    assert caught.value.status == 400


class Whitespace:
    """A tokenizer of words, none longer than eight characters; it must not be asked about what is too long."""

    is_fast = False

    def get_vocab(self):
        return {"a": 0, "x" * 8: 1}

    def __call__(self, text):
        assert len(text) < 1000
        return {"input_ids": [0] * len(text.split())}


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised():
    tokenizer = TextTokenizer(Whitespace())
    assert len(tokenizer.encode("a " * 50, max_tokens=20)) == 50
    with pytest.raises(
        ValueError, match="prompt has 4000000 characters, far more than the 20 tokens that fit"
    ):
        tokenizer.encode("a" * 4_000_000, max_tokens=20)


def test_the_openapi_document_knows_the_bodies():
    document = TestClient(app()).get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    schema = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert "prompt" in schema["required"] and "temperature" in schema["properties"]
    assert "content" not in document["paths"]["/health"]["get"]["responses"]["200"]
