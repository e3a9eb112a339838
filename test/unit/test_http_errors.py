"""The routes over a request side that breaks: clients get a clean error, whatever went wrong inside."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from sglang.srt.entrypoints.app import build_app
from sglang.srt.entrypoints.engine_status import EngineStatus
from sglang.srt.entrypoints.services import Services
from sglang.srt.managers.io_struct import Ready, StartupProgress
from sglang.srt.server_args import ServerArgs


class BrokenManager:
    """Stands where the other processes would; fails like a bug would."""

    def generate(self, *args, **kwargs):
        raise RuntimeError("secret in /some/path")

    async def internal_states(self, timeout_s):
        return []


@pytest.fixture
def status():
    return EngineStatus(num_workers=2)


@pytest.fixture
def client(status):
    services = Services(ServerArgs(), status, BrokenManager(), context_length=100)
    return TestClient(build_app(services), raise_server_exceptions=False)


def become_ready(status):
    status.on_tokenizer()
    for rank in range(2):
        info = {"max_total_num_tokens": 500 - rank, "autotune": {"status": "completed", "rank": rank}}
        status.on_worker_ready(Ready(rank, info))


def test_a_bug_is_a_500_that_shows_nothing_of_the_inside(client, status):
    become_ready(status)
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_server_error"
    assert "secret" not in response.text and "Traceback" not in response.text


def test_the_status_tells_the_start_and_then_the_report_of_the_first_rank(client, status):
    assert client.get("/server_info").json()["autotune"] == {"status": "pending"}
    status.on_progress(StartupProgress(0, "loading the model"))
    status.on_progress(StartupProgress(1, "a stage that only rank 1 is in"))
    assert client.get("/server_info").json()["stage"] == "loading the model"
    status.on_progress(StartupProgress(0, "autotune", {"done": 3, "total": 16}))
    assert client.get("/server_info").json()["autotune"] == {"status": "running", "done": 3, "total": 16}
    assert client.get("/health").status_code == 503
    become_ready(status)
    info = client.get("/server_info").json()
    assert (info["status"], info["autotune"]) == ("ready", {"status": "completed", "rank": 0})
    assert status.max_total_num_tokens == 499
    assert client.get("/health").status_code == 200


def test_the_server_is_not_ready_before_every_worker_and_the_tokenizer_are(client, status):
    status.on_worker_ready(Ready(0, {"max_total_num_tokens": 1}))
    status.on_tokenizer()
    assert client.get("/health").status_code == 503
    assert client.get("/v1/models").json()["error"]["code"] == "not_ready"
    status.on_worker_ready(Ready(1, {"max_total_num_tokens": 1}))
    assert client.get("/health").status_code == 200


def test_a_server_that_stops_is_not_healthy(client, status):
    become_ready(status)
    status.phase = "stopping"
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
