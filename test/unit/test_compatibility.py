"""What docs/compatibility.md claims is so: what it lists is served, and what it calls unbuilt is not there."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from sglang.cli.compatibility import ENDPOINTS, UNBUILT_ENDPOINTS
from sglang.srt.entrypoints.app import build_app
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.native.protocol import (
    GENERATE_UNBUILT,
    SAMPLING_UNBUILT,
    GenerateRequest,
    NativeSampling,
)
from sglang.srt.entrypoints.openai.body import parse_fields
from sglang.srt.entrypoints.openai.chat_protocol import CHAT_UNBUILT, ChatCompletionRequest
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.protocol import COMPLETION_UNBUILT, CompletionRequest
from sglang.srt.entrypoints.services import Services
from sglang.srt.server_args import ServerArgs


class NoManager:
    """Stands where the engine would; these requests end before it."""

    async def internal_states(self, timeout_s):
        return []


class NoMetrics:
    """Stands where the registry would."""

    def render(self, states):
        return b""


@pytest.fixture(scope="module")
def client():
    services = Services(ServerArgs(), EngineStatus(1), NoManager(), 100, NoMetrics())
    return TestClient(build_app(services))


def test_the_listed_endpoints_are_those_that_there_are(client):
    described = set(client.get("/openapi.json").json()["paths"]) | {"/openapi.json"}
    assert described == set(ENDPOINTS)


@pytest.mark.parametrize("path", UNBUILT_ENDPOINTS)
def test_an_endpoint_that_is_called_unbuilt_answers_404(client, path):
    for response in (client.get(path), client.post(path, json={})):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "unknown_url"


BODIES = {
    GenerateRequest: (GENERATE_UNBUILT, {"text": "a"}),
    NativeSampling: (SAMPLING_UNBUILT, {}),
    CompletionRequest: (COMPLETION_UNBUILT, {"prompt": "a"}),
    ChatCompletionRequest: (CHAT_UNBUILT, {"messages": [{"role": "user", "content": "a"}]}),
}


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_an_unbuilt_field_is_refused_by_name_unless_it_asks_for_nothing(kind):
    unbuilt, least = BODIES[kind]
    assert not set(unbuilt) & set(kind.__struct_fields__)
    for name, harmless in unbuilt.items():
        with pytest.raises(ApiError, match="not supported") as refused:
            parse_fields({**least, name: "something"}, kind, unbuilt)
        assert refused.value.param == name
        for value in harmless:
            parse_fields({**least, name: value}, kind, unbuilt)
