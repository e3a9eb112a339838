"""The load generator against a small HTTP server of the test's own, which says exactly what each test needs."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from sglang import bench_serving
from sglang.benchmark.backends import BACKENDS, Prompt, RequestOptions, merged
from sglang.benchmark.dataset import (
    RandomLengths,
    ids_of_whole_text,
    plain_token_ids,
    random_prompts,
    with_text,
)
from sglang.benchmark.http import Address
from sglang.benchmark.requests import Trace
from sglang.benchmark.summary import percentile, summarize, table
from sglang.srt.configs.model_config import BUILTIN_MODEL_PATH

PATHS = {name: backend.path for name, backend in BACKENDS.items()}


class FakeServer(ThreadingHTTPServer):
    """Streams `max_tokens` tokens, `per_event` in each event; `fault(body)` may say or do something else first."""

    daemon_threads = True

    def __init__(self, per_event=1, fault=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.per_event, self.fault = per_event, fault
        self.bodies, self.paths, self.num_open, self.most_open = [], [], 0, 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._json({"data": [{"id": "fake", "root": BUILTIN_MODEL_PATH}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        with server.lock:
            server.bodies.append(body)
            server.paths.append(self.path)
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        try:
            if server.fault is None or not server.fault(self, body):
                self._answer(body)
        finally:
            with server.lock:
                server.num_open -= 1

    def _answer(self, body):
        if self.path == "/flush_cache":
            self._json({})
            return
        num_output = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        if not body["stream"]:
            self._json(self._event(body, num_output, num_output))
            return
        self.begin_stream()
        for done in range(self.server.per_event, num_output + self.server.per_event, self.server.per_event):
            self.event(self._event(body, min(done, num_output), None))
        if self.path != "/generate":
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_output}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def _event(self, body, num_done, num_total):
        if self.path == "/generate":
            meta = {"completion_tokens": num_done, "prompt_tokens": 7, "cached_tokens": 3}
            return {"text": "x" * num_done, "meta_info": meta}
        part = {"text": "x"} if self.path == "/v1/completions" else {"delta": {"content": "x"}}
        usage = None if num_total is None else {"prompt_tokens": 7, "completion_tokens": num_total}
        return {"choices": [part], "usage": usage}

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, event):
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """`serve(**options)` starts a fake server in a thread."""
    servers = []

    def start(**options):
        server = FakeServer(**options)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(server, tmp_path, *flags, backend="sglang-oai", num_prompts=6):
    """The exit code and the result line of a small run."""
    out = tmp_path / "result.jsonl"
    code = bench_serving.main(
        [
            *("--backend", backend, "--port", str(server.server_port), "--disable-tqdm"),
            *("--num-prompts", str(num_prompts), "--random-input-len", "5", "--random-output-len", "4"),
            *("--output-file", str(out), *flags),
        ]
    )
    return code, json.loads(out.read_text().splitlines()[-1]) if out.exists() else None


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_backend_counts_the_tokens_that_the_server_reports(serve, tmp_path, backend, capsys):
    server = serve()
    code, result = run(server, tmp_path, "--random-range-ratio", "1", backend=backend)
    assert code == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 7, 6 * 4)
    assert set(server.paths) == {PATHS[backend]}
    assert 0 < result["median_ttft_ms"] <= result["median_e2e_latency_ms"]
    assert result["backend"] == backend and result["model"] == "fake"
    words = capsys.readouterr().out
    for line in (
        "Successful requests:",
        "Output token throughput (tok/s):",
        "Median ITL (ms):",
        "P99 TTFT (ms):",
    ):
        assert line in words


def test_prompts_are_ids_of_exact_length_and_answers_are_asked_for_whole(serve, tmp_path):
    server = serve()
    run(server, tmp_path, "--random-range-ratio", "1", "--max-concurrency", "1", backend="sglang")
    warm_up, *bodies = server.bodies
    assert len(bodies) == 6
    assert all(len(body["input_ids"]) == 5 for body in bodies)
    assert all(body["sampling_params"]["ignore_eos"] and body["stream"] for body in bodies)
    assert len({tuple(body["input_ids"]) for body in bodies}) == 6
    assert warm_up["input_ids"] == bodies[0]["input_ids"]


def test_the_same_seed_asks_the_same_questions(serve, tmp_path):
    asked = []
    for seed in ("3", "3", "4"):
        server = serve()
        run(server, tmp_path, "--seed", seed, "--max-concurrency", "1")
        asked.append([body["prompt"] for body in server.bodies])
    assert asked[0] == asked[1] != asked[2]


def test_tokens_that_come_together_share_their_interval(serve, tmp_path):
    _, result = run(
        serve(per_event=2), tmp_path, "--random-range-ratio", "1", "--output-details", backend="sglang"
    )
    assert [len(gaps) for gaps in result["itls"]] == [2] * 6  # two tokens came first, two more in one event
    assert all(gaps[0] == gaps[1] for gaps in result["itls"])
    assert result["output_lens"] == [4] * 6


def test_no_more_than_the_limit_are_under_way(serve, tmp_path):
    server = serve(fault=lambda *_: time.sleep(0.02))
    code, result = run(server, tmp_path, "--max-concurrency", "2")
    assert code == 0 and server.most_open == 2
    assert result["concurrency"] <= 2.0


def test_requests_arrive_at_the_rate(serve, tmp_path):
    _, result = run(serve(), tmp_path, "--request-rate", "100", "--warmup-requests", "0")
    assert result["completed"] == 6 and result["request_rate"] == 100


def test_an_answer_in_one_piece_has_its_latency_as_ttft(serve, tmp_path):
    server = serve()
    code, result = run(
        server, tmp_path, "--disable-stream", "--disable-ignore-eos", "--random-range-ratio", "1"
    )
    assert code == 0 and not server.bodies[0]["stream"] and not server.bodies[0]["ignore_eos"]
    assert result["mean_ttft_ms"] == result["mean_e2e_latency_ms"]
    assert result["total_output_tokens"] == 24 and result["max_itl_ms"] == 0


def test_extra_fields_go_into_every_body_and_objects_are_merged(serve, tmp_path):
    server = serve()
    run(
        server,
        tmp_path,
        "--extra-request-body",
        '{"sampling_params": {"top_p": 0.5}, "rid": "x"}',
        backend="sglang",
    )
    assert all(b["rid"] == "x" and b["sampling_params"]["top_p"] == 0.5 for b in server.bodies)
    assert all("max_new_tokens" in b["sampling_params"] for b in server.bodies)
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_the_cache_is_flushed_between_warm_up_and_load(serve, tmp_path):
    server = serve()
    run(server, tmp_path, "--flush-cache", "--warmup-requests", "2")
    assert server.paths.index("/flush_cache") == 2 and server.paths.count("/flush_cache") == 1


def test_each_run_appends_a_line(serve, tmp_path):
    server = serve()
    for _ in range(2):
        run(server, tmp_path, num_prompts=1)
    assert len((tmp_path / "result.jsonl").read_text().splitlines()) == 2


def test_a_port_without_a_server_is_one_line_and_exit_code_1(capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert bench_serving.main(["--port", str(unused.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no server answers at http://127.0.0.1:" in error


def test_a_refusal_in_the_warm_up_ends_the_run_with_the_servers_words(serve, tmp_path, capsys):
    server = serve(
        fault=lambda handler, _: handler._json({"error": {"message": "prompt too long"}}, 400) or True
    )
    code, result = run(server, tmp_path)
    assert code == 1 and result is None
    assert "HTTP 400 Bad Request" in (error := capsys.readouterr().err) and "prompt too long" in error


def cut_short(handler, body):
    """A server that dies in the middle of its third answer."""
    if len(handler.server.bodies) < 3:
        return False
    handler.begin_stream()
    handler.event({"choices": [{"text": "x"}]})
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def test_answers_that_break_off_are_counted_and_the_rest_is_reported(serve, tmp_path, capsys):
    code, result = run(serve(fault=cut_short), tmp_path, "--max-concurrency", "1")
    assert code == 1
    assert (result["completed"], result["failed"]) == (1, 5)
    captured = capsys.readouterr()
    assert "5 of 6 requests failed: the server closed the connection before its answer ended" in captured.err
    assert "Failed requests:" in captured.out


def complain(handler, body):
    handler.begin_stream()
    handler.event({"error": {"message": "the server is stopping"}})
    handler.chunk(b"")
    return True


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_an_error_inside_a_stream_is_an_error(serve, tmp_path, backend, capsys):
    code, _ = run(serve(fault=complain), tmp_path, "--warmup-requests", "0", backend=backend)
    assert code == 1 and "the server is stopping" in capsys.readouterr().err


def test_events_may_be_cut_anywhere(serve, tmp_path):
    def in_crumbs(handler, body):
        handler.begin_stream()
        events = b'data: {"choices": [{"text": "x"}]}\r\n\r\n' * 3
        events += b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
        framed = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (events[:50], events[50:])) + b"0\r\n\r\n"
        for start in range(0, len(framed), 7):
            handler.wfile.write(framed[start : start + 7])
            handler.wfile.flush()
        return True

    code, result = run(serve(fault=in_crumbs), tmp_path, "--output-details", num_prompts=2)
    assert code == 0 and result["total_output_tokens"] == 6
    assert [len(gaps) for gaps in result["itls"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--request-rate", "0"], "--request-rate"),
        (["--base-url", "localhost:3"], "--base-url"),
        (["--output-file", "/no/such/dir/x"], "--output-file"),
        (["--warmup-requests", "-1"], "--warmup-requests"),
    ],
)
def test_a_wrong_argument_is_named_before_the_server_is_asked(flags, words, capsys):
    assert bench_serving.main(flags) == 2
    assert words in capsys.readouterr().err


def test_addresses_keep_their_prefix_and_default_ports():
    assert Address.parse("http://h:5/api/") == Address("h", 5, "/api")
    assert Address.parse("https://h") == Address("h", 443, "", True)
    assert Address.parse("http://[::1]:7").url == "http://[::1]:7"


def test_lengths_are_drawn_from_the_ratio_to_the_whole():
    rng = random.Random(0)
    drawn = [RandomLengths(100, 10, 0.5).draw(rng) for _ in range(300)]
    assert {min(n for n, _ in drawn), max(n for n, _ in drawn)} == {50, 100}
    assert {n for _, n in drawn} == set(range(5, 11))
    assert RandomLengths(3, 1, 0.0).draw(rng)[1] == 1


def test_random_prompts_avoid_special_tokens_and_chat_text_has_their_length():
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL_PATH)
    rng = random.Random(0)
    assert not set(plain_token_ids(tokenizer)) & set(tokenizer.all_special_ids)
    ids = ids_of_whole_text(tokenizer, plain_token_ids(tokenizer), rng)
    for prompt, _ in random_prompts(ids, RandomLengths(30, 2, 1.0), 5, rng):
        assert prompt.num_tokens == 30
        chat = with_text(prompt, tokenizer, ids, rng)
        assert len(tokenizer.encode(chat.text, add_special_tokens=False)) == chat.num_tokens
        assert chat.num_tokens == 30
    body = BACKENDS["sglang-oai-chat"].encoded_body(Prompt([1], "hello"), 3, RequestOptions("m"))
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hello"}]


def test_the_summary_counts_successes_only_and_rates_are_over_the_duration():
    good = Trace(10, 5, 4, ttft_s=0.1, latency_s=0.5, itl_s=[0.1, 0.1, 0.1, 0.1])
    result = summarize([good, good, Trace(10, error="no")], duration_s=2.0)
    assert (result["completed"], result["failed"], result["total_cached_tokens"]) == (2, 1, 8)
    assert result["output_throughput"] == 5.0 and result["total_throughput"] == 15.0
    assert result["mean_tpot_ms"] == pytest.approx(100) and result["max_itl_ms"] == pytest.approx(100)
    assert result["concurrency"] == pytest.approx(0.5)
    extra = {"backend": "sglang", "request_rate": "inf", "max_concurrency": None}
    assert "Failed requests:" in table({**result, **extra})


def test_percentiles_lie_between_neighbours():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([], 99) == 0.0 and percentile([7], 99) == 7
