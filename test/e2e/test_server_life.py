"""How the server starts, stops and fails: exit codes, messages, and no process left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest


def run_serve(*arguments, timeout_s=120):
    """Run `sglang serve` to its end; gives the exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stderr


def error_line(stderr):
    """The one line that says what is wrong."""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if "error:" in line]
    return line


def test_before_it_is_ready_the_server_says_so(start_server, tiny_model):
    server = start_server()
    server.wait_until("HTTP answers", lambda: server.get("/server_info").status_code == 200, 90)
    info = server.info()
    assert info["status"] == "starting" and info["stage"]
    assert info["model_path"] == str(tiny_model)
    assert info["autotune"]["status"] in ("pending", "running")
    assert server.get("/health").status_code == 503
    for response in (server.get("/v1/models"), server.post("/v1/completions", json={"prompt": "a"})):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
    server.wait_ready()
    info = server.info()
    assert info["status"] == "ready" and "stage" not in info
    assert info["internal_states"][0]["num_running_reqs"] == 0
    assert info["max_total_num_tokens"] > 0
    assert server.complete("now", max_tokens=2)["choices"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_cleanly_with_work_in_flight(start_server, gone, number):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    pids = server.pids()
    assert server.worker_pids()
    answers = []

    def call():
        with httpx.stream(
            "POST",
            server.base_url + "/v1/completions",
            json={"prompt": "long", "max_tokens": 400, "n": 64, "ignore_eos": True, "stream": True},
            timeout=30,
        ) as response:
            answers.append([line for line in response.iter_lines() if line])

    client = threading.Thread(target=call)
    client.start()
    server.wait_until("it runs", lambda: server.info()["internal_states"][0]["num_running_reqs"] > 0, 90)
    assert server.stop(number) == 0
    client.join(60)
    assert gone(pids)
    # It was either finished in time or told what happened; it was not cut off without a word.
    assert answers and ("[DONE]" in answers[0][-1] or "stopping" in answers[0][-1])
    assert "Traceback" not in server.log


def test_a_signal_to_the_whole_group_stops_it_cleanly_too(start_server, gone):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    pids = server.pids()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert server.wait_exit() == 0
    assert gone(pids)


def test_a_signal_during_the_start_stops_it_cleanly(start_server, gone):
    server = start_server()
    server.wait_until("a worker is there", lambda: bool(server.worker_pids()), 30)
    pids = server.pids()
    assert server.stop() == 0
    assert gone(pids)
    assert "Traceback" not in server.log


class Call(threading.Thread):
    """A long completion in the background; `response` is what came of it."""

    def __init__(self, server):
        super().__init__()
        self.server, self.response = server, None
        self.start()

    def run(self):
        body = {"prompt": "long", "max_tokens": 500, "n": 64, "ignore_eos": True}
        self.response = self.server.post("/v1/completions", json=body)

    def assert_told(self):
        """The client was told in an orderly way that its request failed, and nothing of the server's insides."""
        self.join(30)
        assert self.response is not None, "the connection broke without an answer"
        assert self.response.status_code == 500
        assert self.response.json()["error"]["message"]
        assert "Traceback" not in self.response.text and "/" not in self.response.text


def test_a_worker_that_is_killed_takes_the_server_down(start_server, gone):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    pids = server.pids()
    call = Call(server)
    server.wait_until("it runs", lambda: server.info()["internal_states"][0]["num_running_reqs"] > 0, 90)
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    assert server.wait_exit() == 1
    assert gone(pids)
    assert "rank 0 ended with signal SIGKILL" in server.log
    call.assert_told()


# Python imports a module of this name when it starts: here it breaks one method in every process of the server.
BREAK = """
from {module} import {owner}
def broken(*args, **kwargs):
    raise RuntimeError("broken on purpose")
{owner}.{method} = broken
"""


def break_method(directory, module, owner, method):
    """Environment in which `owner.method` of `module` raises."""
    (directory / "sitecustomize.py").write_text(BREAK.format(module=module, owner=owner, method=method))
    return {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}


def test_a_worker_that_fails_in_its_start_takes_the_server_down_with_its_traceback(
    start_server, gone, tmp_path
):
    environment = break_method(tmp_path, "sglang.srt.managers.executor", "ModelExecutor", "__init__")
    server = start_server("--disable-flashinfer-autotune", **environment)
    server.wait_until("a worker is there", lambda: bool(server.worker_pids()), 30)
    pids = server.pids()
    assert server.wait_exit(60) == 1
    assert gone(pids)
    assert "worker of rank 0 failed" in server.log and "RuntimeError: broken on purpose" in server.log


def test_a_worker_that_fails_while_it_serves_tells_its_clients_and_takes_the_server_down(
    start_server, gone, tmp_path
):
    environment = break_method(tmp_path, "sglang.srt.managers.executor", "ModelExecutor", "launch")
    server = start_server("--disable-flashinfer-autotune", **environment).wait_ready()
    pids = server.pids()
    call = Call(server)
    assert server.wait_exit() == 1
    call.assert_told()
    assert gone(pids)
    assert "RuntimeError: broken on purpose" in server.log


def test_a_worker_that_refuses_to_start_takes_the_server_down_with_its_reason(start_server, gone, tiny_model):
    # There are no weights in that directory, and nothing says --load-format dummy.
    server = start_server("--model-path", str(tiny_model), tiny=False)
    server.wait_until("a worker is there", lambda: bool(server.worker_pids()), 30)
    pids = server.pids()
    assert server.wait_exit(60) == 1
    assert gone(pids)
    assert "worker of rank 0 failed: --model-path" in server.log
    assert "Traceback" not in server.log, "a mistake of the user's is one line"


def test_workers_do_not_outlive_a_server_that_is_killed(start_server, gone):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    pids = server.pids()
    server.process.kill()
    server.wait_exit()
    assert gone(pids)


def test_an_occupied_port_is_one_line_and_exit_code_1(tiny_model):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, stderr = run_serve("--model-path", str(tiny_model), "--device", "cpu", "--port", str(port))
    assert code == 1
    assert f"--port {port} is in use" in error_line(stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--tp-size", "0"], "--tp-size"),
        (["--model-path", "/no/such/directory"], "--model-path /no/such/directory"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it_and_exit_code_2(arguments, words):
    code, stderr = run_serve(*arguments)
    assert code == 2
    assert words in error_line(stderr)


def test_a_missing_tokenizer_is_one_line(start_server, tmp_path):
    (tmp_path / "empty").mkdir()
    server = start_server("--tokenizer-path", str(tmp_path / "empty"))
    assert server.wait_exit(60) == 1
    assert "Traceback" not in server.log
    assert "--tokenizer-path" in server.log


def test_an_api_key_is_asked_for_everywhere_but_on_health(start_server):
    server = start_server("--disable-flashinfer-autotune", "--api-key", "secret").wait_ready()
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").status_code == 401
    assert server.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    right = {"Authorization": "Bearer secret"}
    assert httpx.get(server.base_url + "/v1/models", headers=right).status_code == 200
    info = httpx.get(server.base_url + "/server_info", headers=right)
    assert info.status_code == 200 and "secret" not in info.text


def test_metrics_count_requests_and_tokens_under_the_names_of_sglang(start_server):
    server = start_server("--disable-flashinfer-autotune", "--enable-metrics").wait_ready()
    server.complete(["one", "three"], max_tokens=4, ignore_eos=True, n=2)
    values = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    label = '{model_name="' + server.info()["served_model_name"] + '"}'
    expected = {
        "num_requests_total": 4,
        "num_aborted_requests_total": 0,
        "prompt_tokens_total": 2 * 3 + 2 * 5,
        "generation_tokens_total": 16,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 12,
        "e2e_request_latency_seconds_count": 4,
        "num_running_reqs": 0,
        "num_queue_reqs": 0,
        "token_usage": 0,
    }
    assert {name: float(values[f"sglang:{name}{label}"]) for name in expected} == expected
    assert float(values['sglang:autotune_status{status="skipped"}']) == 1


def test_without_the_flag_there_are_no_metrics(server):
    assert server.get("/metrics").status_code == 404
