"""The accuracy check against a small HTTP server that stands where a model server would be."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang.test.evals import Gsm8kEval, last_number
from sglang.test.run_eval import main

SUM = re.compile(r"(\d+)([+-])(\d+)=$")


def solve(text: str) -> int:
    left, op, right = SUM.search(text).groups()
    return int(left) + int(right) * (1 if op == "+" else -1)


class FakeServer:
    """Answers the i-th request with ``respond(i, question)``: a text, or an HTTP status for a failure."""

    def __init__(self, respond: Callable[[int, str], str | int]) -> None:
        self.requests: list[tuple[str, dict]] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(200, {"object": "list", "data": [{"id": "the-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    index = len(outer.requests)
                    outer.requests.append((self.path, body))
                chat = self.path == "/v1/chat/completions"
                answer = respond(index, body["messages"][-1]["content"] if chat else body["prompt"])
                if isinstance(answer, int):
                    self.send(answer, {"error": {"message": "no"}})
                elif chat:
                    self.send(200, {"choices": [{"message": {"role": "assistant", "content": answer}}]})
                else:
                    self.send(200, {"choices": [{"text": answer}]})

            def send(self, status: int, document: dict) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def serve():
    servers = []

    def start(respond: Callable[[int, str], str | int]) -> FakeServer:
        servers.append(FakeServer(respond))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def run(tmp_path, *argv: str) -> tuple[int, dict]:
    output = tmp_path / "result.json"
    code = main([*argv, "--output-file", str(output)])
    return code, json.loads(output.read_text())


@pytest.mark.parametrize("api", ["completion", "chat"])
def test_score_is_the_exact_share_of_right_answers(serve, tmp_path, api, capsys):
    server = serve(lambda index, text: str(solve(text) + (1 if index % 4 == 0 else 0)))
    code, result = run(
        tmp_path, "--base-url", server.url, "--num-examples", "40", "--num-threads", "8", "--api", api
    )
    assert code == 0
    assert (result["score"], result["num_right"], result["status_counts"]) == (0.75, 30, {"200": 40})
    assert len(server.requests) == len(result["answers"]) == 40
    assert "Score: 0.750 (30 of 40 right)" in capsys.readouterr().out


def test_completion_asks_few_shot_greedily_and_stops_at_the_newline(serve, tmp_path):
    server = serve(lambda index, text: f" {solve(text)}")
    code, result = run(
        tmp_path, "--base-url", server.url + "/v1/", "--num-examples", "1", "--max-tokens", "7"
    )
    path, body = server.requests[0]
    assert (code, result["score"], path) == (0, 1.0, "/v1/completions")
    assert re.fullmatch(r"(\d+[+-]\d+=-?\d+\n){3}\d+[+-]\d+=", body.pop("prompt"))
    assert body == {"model": "the-model", "max_tokens": 7, "temperature": 0.0, "stop": ["\n"]}


def test_chat_shows_the_shots_as_turns(serve, tmp_path):
    server = serve(lambda index, text: f"The answer is {solve(text)}.")
    argv = ("--base-url", server.url, "--num-examples", "1", "--api", "chat", "--num-shots", "2")
    code, result = run(tmp_path, *argv, "--model", "named")
    path, body = server.requests[0]
    assert (code, result["score"], path, body["model"]) == (0, 1.0, "/v1/chat/completions", "named")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert body["messages"][1]["content"] == str(solve(body["messages"][0]["content"]))


def test_failed_requests_count_as_wrong_and_fail_the_run(serve, tmp_path, capsys):
    server = serve(lambda index, text: 503 if index < 3 else str(solve(text)))
    code, result = run(tmp_path, "--base-url", server.url, "--num-examples", "10")
    assert code == 1
    assert (result["score"], result["status_counts"]) == (0.7, {"503": 3, "200": 7})
    captured = capsys.readouterr()
    assert "HTTP status: 7 x 200, 3 x 503" in captured.out
    assert captured.err == "error: 3 of 10 requests failed\n"


@pytest.mark.parametrize("model", [(), ("--model", "named")])
def test_address_without_a_server_ends_in_one_line(model, capsys, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        argv = ["--port", str(port), "--num-examples", "2", "--output-file", str(tmp_path / "r.json")]
        assert main([*argv, *model]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: no server answers at http://127.0.0.1:{port}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["nonsense", "http://[", "127.0.0.1:80000", "ftp://x"])
def test_malformed_address_ends_in_one_line(url, capsys):
    assert main(["--base-url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no server answers at ") and error.count("\n") == 1


def gsm8k_file(tmp_path, num_problems: int):
    path = tmp_path / "problems.jsonl"
    rows = [
        {"question": f"What is {n}+1000=", "answer": f"Add.\n#### {n + 1000:,}"} for n in range(num_problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("api", ["completion", "chat"])
def test_gsm8k_asks_the_problems_after_the_shots(serve, tmp_path, api):
    def respond(index: int, text: str) -> str:
        question = text.removesuffix("\nAnswer:").rpartition("\n")[2]
        return f"So {solve(question):,}.00 dollars, 5 apples short.\n#### {solve(question)}"

    server = serve(respond)
    path = gsm8k_file(tmp_path, 9)
    argv = ("--eval-name", "gsm8k", "--data-path", str(path), "--num-examples", "4", "--api", api)
    code, result = run(tmp_path, "--base-url", server.url, *argv)
    assert (code, result["score"], result["max_tokens"]) == (0, 1.0, 512)
    assert [answer["expected"] for answer in result["answers"]] == [1005, 1006, 1007, 1008]
    assert result["answers"][0]["prompt"].count("Question: ") == 6


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--eval-name", "gsm8k"], "--data-path"),
        (["--eval-name", "gsm8k", "--data-path", "/nonexistent"], "--data-path"),
        (["--num-examples", "100000"], "--num-examples"),
    ],
)
def test_unusable_flags_are_named(argv, flag, capsys):
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert flag in error and error.count("\n") == 1


def test_gsm8k_file_of_another_shape_or_too_short_is_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="--data-path"):
        Gsm8kEval(str(path))
    with pytest.raises(ValueError, match="--num-examples"):
        Gsm8kEval(str(gsm8k_file(tmp_path, 6))).examples(2)


@pytest.mark.parametrize(
    ("text", "number"),
    [("95", 95), ("37+58=95", 95), ("3-58=-55", -55), ("It is 1,234.50.", 1234.5), ("12, ", 12), ("", None)],
)
def test_last_number_is_the_answer(text, number):
    assert last_number(text) == number
