"""The accuracy check, as SGLang users call it: ``python -m sglang.test.run_eval --eval-name arithmetic``.

It asks a running server through the OpenAI endpoints, many questions at a time, and reports how many were
answered rightly. Whether serving is *right* under load is what it is for; speed is the load generator's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from sglang.test.evals import EVALS, Eval, Example, create_eval


@dataclass(frozen=True)
class Answer:
    """What came back for one example; ``status`` is the HTTP status or the name of the transport error."""

    status: str
    text: str
    latency_s: float
    right: bool


class ServerClient:
    """One model of one server, asked greedily; safe to share between threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        url = args.base_url or f"http://{args.host}:{args.port}"
        self.base_url = url.rstrip("/").removesuffix("/v1")
        self.api, self.temperature = args.api, args.temperature
        self.http = httpx.Client(
            timeout=httpx.Timeout(args.timeout_s, pool=None),
            limits=httpx.Limits(max_connections=args.num_threads),
            headers={"Authorization": f"Bearer {args.api_key}"} if args.api_key else {},
            trust_env=False,
        )
        self.model = self._model(args.model)

    def _model(self, wanted: str | None) -> str:
        """``wanted``, or the first model that the server lists; the question also proves the address."""
        url = f"{self.base_url}/v1/models"
        try:
            response = self.http.get(url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"no server answers at {self.base_url}: {error}") from error
        if wanted:
            return wanted
        try:
            return response.json()["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            remedy = "name a model by --model, or a key by --api-key"
            raise ValueError(f"{url} lists no model (HTTP {response.status_code}): {remedy}") from error

    def ask(self, example: Example, stop: list[str], max_tokens: int) -> tuple[str, str]:
        """The HTTP status (or the transport error's name) and the generated text, empty unless it is 200."""
        body: dict = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        if self.api == "completion":
            path, body = "completions", {**body, "prompt": example.prompt, "stop": stop}
        else:
            path, body = "chat/completions", {**body, "messages": example.messages}
        try:
            response = self.http.post(f"{self.base_url}/v1/{path}", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__, ""
        if response.status_code != 200:
            return str(response.status_code), ""
        try:
            choice = response.json()["choices"][0]
            text = choice["text"] if self.api == "completion" else choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            return "malformed response", ""
        return "200", text or ""


def run(client: ServerClient, task: Eval, examples: list[Example], args: argparse.Namespace) -> dict:
    """Ask every one of ``examples``, ``args.num_threads`` at a time, and return the result document."""
    max_tokens = args.max_tokens or task.default_max_tokens

    def ask(example: Example) -> Answer:
        start = time.perf_counter()
        status, text = client.ask(example, task.stop, max_tokens)
        right = status == "200" and task.is_right(example, text)
        return Answer(status, text, time.perf_counter() - start, right)

    start = time.perf_counter()
    with ThreadPoolExecutor(args.num_threads) as pool:
        answers = list(pool.map(ask, examples))
    latencies = sorted(answer.latency_s for answer in answers)
    return {
        "eval_name": args.eval_name,
        "model": client.model,
        "api": args.api,
        "num_examples": len(answers),
        "num_threads": args.num_threads,
        "max_tokens": max_tokens,
        "temperature": args.temperature,
        "score": sum(answer.right for answer in answers) / len(answers),
        "num_right": sum(answer.right for answer in answers),
        "status_counts": dict(Counter(answer.status for answer in answers)),
        "seconds": time.perf_counter() - start,
        "latency_mean_s": statistics.fmean(latencies),
        "latency_p50_s": statistics.median(latencies),
        "latency_max_s": latencies[-1],
        "answers": [
            {"prompt": example.prompt, "expected": example.answer, **asdict(answer)}
            for example, answer in zip(examples, answers, strict=True)
        ],
    }


def positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def non_negative_int(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang.test.run_eval", description=__doc__)
    parser.add_argument("--base-url", help="address of the server; instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="host of the server (%(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port of the server (%(default)s)")
    parser.add_argument("--model", help="name of the model (the first that the server lists)")
    parser.add_argument("--api-key", help="key to send, when the server asks for one")
    parser.add_argument("--eval-name", choices=EVALS, default="arithmetic", help="the check (%(default)s)")
    parser.add_argument("--data-path", help="JSON-lines file of the problems, for gsm8k")
    parser.add_argument("--num-examples", type=positive_int, default=200, help="questions (%(default)s)")
    parser.add_argument(
        "--num-shots", type=non_negative_int, help="answered examples before a question (the check's own)"
    )
    parser.add_argument("--num-threads", type=positive_int, default=64, help="at a time (%(default)s)")
    parser.add_argument("--api", choices=("completion", "chat"), default="completion", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=positive_int, help="tokens per answer (the check's own)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which questions are drawn (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds per request (%(default)s)")
    parser.add_argument("--output-file", type=Path, help="where the JSON goes (a file in the temp directory)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one check; 0 when every request was answered with HTTP 200, whatever the score, else 1."""
    args = parse_args(argv)
    name = f"sglang_eval_{args.eval_name}_{args.api}.json"
    output_file = args.output_file or Path(tempfile.gettempdir()) / name
    try:
        task = create_eval(args.eval_name, num_shots=args.num_shots, seed=args.seed, data_path=args.data_path)
        examples = task.examples(args.num_examples)
        result = run(ServerClient(args), task, examples, args)
        output_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counts = ", ".join(f"{count} x {status}" for status, count in sorted(result["status_counts"].items()))
    print(f"{args.eval_name} ({args.api}) on {result['model']}")
    print(f"Score: {result['score']:.3f} ({result['num_right']} of {result['num_examples']} right)")
    print(f"HTTP status: {counts}")
    print(
        f"Latency: {result['seconds']:.2f} s in all; per request {result['latency_mean_s']:.3f} s mean, "
        f"{result['latency_p50_s']:.3f} s median, {result['latency_max_s']:.3f} s longest"
    )
    print(f"Written to {output_file}")
    failed = len(result["answers"]) - result["status_counts"].get("200", 0)
    if failed:
        print(f"error: {failed} of {result['num_examples']} requests failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
