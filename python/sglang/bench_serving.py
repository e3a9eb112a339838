"""The load generator, as SGLang users call it: `python -m sglang.bench_serving --backend sglang ...`.

It streams random prompts to a running server and prints throughput and latencies; `--output-file` collects one JSON
line for each run. Exit code 0 when every request was answered, 1 when the server refused or failed one, 2 for a
wrong argument.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from sglang.benchmark.backends import BACKENDS, Prompt, RequestOptions
from sglang.benchmark.dataset import (
    RandomLengths,
    ids_of_whole_text,
    plain_token_ids,
    random_prompts,
    with_text,
)
from sglang.benchmark.http import Address
from sglang.benchmark.load import REQUEST_TIMEOUT_S, Pace, Target, run_load
from sglang.benchmark.requests import Trace
from sglang.benchmark.summary import summarize, table

PROG = "python -m sglang.bench_serving"
WARMUP_OUTPUT_LEN = 32
ASK_TIMEOUT_S = 30.0


class ServerProblem(RuntimeError):
    """The server cannot be measured; the message says why."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=PROG, description="Measure the throughput and the latencies of a running server."
    )
    add = result.add_argument
    add("--backend", choices=list(BACKENDS), default="sglang", help="Which of the server's APIs to use.")
    add("--base-url", metavar="URL", help="Where the server is. Default: --host and --port.")
    add("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    add("--port", type=_positive, default=30000, help="Default: 30000.")
    add("--model", metavar="NAME", help="Model to ask for. Default: the first that the server lists.")
    add("--tokenizer", metavar="PATH", help="Directory or Hugging Face id. Default: that of the model.")
    add(
        "--dataset-name", choices=("random", "random-ids"), default="random", help="What prompts are made of."
    )
    add("--num-prompts", type=_positive, default=1000, help="Requests. Default: 1000.")
    add("--random-input-len", type=_positive, default=1024, help="Tokens of a prompt. Default: 1024.")
    add("--random-output-len", type=_positive, default=1024, help="Tokens of an answer. Default: 1024.")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths are drawn from R times the given one up to it; 1 makes all the same. Default: 0.",
    )
    add(
        "--request-rate", type=float, default=math.inf, help="Requests per second. Default: inf, all at once."
    )
    add("--max-concurrency", type=_positive, help="Most requests under way at once. Default: no limit.")
    add("--warmup-requests", type=int, default=1, help="Requests before those that are measured. Default: 1.")
    add("--seed", type=int, default=1, help="Of prompts, lengths and arrivals. Default: 1.")
    add("--disable-ignore-eos", action="store_true", help="Let an end token end an answer early.")
    add(
        "--disable-stream",
        action="store_true",
        help="Take each answer in one piece; its TTFT is its latency.",
    )
    add("--extra-request-body", type=_json_object, default={}, metavar="JSON", help="Added to every request.")
    add("--flush-cache", action="store_true", help="Empty the server's prefix cache after the warm-up.")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="Default: $OPENAI_API_KEY.")
    add("--output-file", type=Path, metavar="PATH", help="Append the result to it, as one line of JSON.")
    add("--output-details", action="store_true", help="Add the numbers of each request to that line.")
    add("--disable-tqdm", action="store_true", help="Show no progress bar.")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; gives the exit code."""
    args = parser().parse_args(argv)
    try:
        _check(args)
        address = Address.parse(args.base_url or f"http://{args.host}:{args.port}")
        card = first_model(address, args.api_key)
        tokenizer = load_tokenizer(args, card)
        result, traces = asyncio.run(measure(args, address, args.model or card["id"], tokenizer))
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except ServerProblem as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(result), flush=True)
    if args.output_file is not None:
        with args.output_file.open("a") as file:
            file.write(json.dumps({**result, **(_details(traces) if args.output_details else {})}) + "\n")
    return 1 if report_failures(traces) else 0


def _check(args: argparse.Namespace) -> None:
    if not 0.0 <= args.random_range_ratio <= 1.0:
        raise ValueError(f"--random-range-ratio must lie between 0 and 1 (got {args.random_range_ratio:g})")
    if not args.request_rate > 0:
        raise ValueError(f"--request-rate must be above 0, or inf (got {args.request_rate:g})")
    if args.warmup_requests < 0:
        raise ValueError(f"--warmup-requests must be at least 0 (got {args.warmup_requests})")
    if args.output_file is not None and not args.output_file.absolute().parent.is_dir():
        raise ValueError(f"--output-file: there is no directory {args.output_file.absolute().parent}")


def first_model(address: Address, api_key: str | None) -> dict[str, Any]:
    """The server's card of its first model; the question also proves the address. Raises `ServerProblem`."""
    url = f"{address.url}/v1/models"
    try:
        response = httpx.get(url, headers=_headers(api_key), timeout=ASK_TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerProblem(f"no server answers at {address.url}: {error}") from None
    # Whatever answers there may be no such server, and its words are shown then.
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        if response.status_code == 200:
            return dict(response.json()["data"][0])
    words = " ".join(response.text.split())[:300]
    raise ServerProblem(f"{url} lists no model (HTTP {response.status_code}): {words}")


def load_tokenizer(args: argparse.Namespace, card: dict[str, Any]) -> Any:
    """The tokenizer that prompts are made with. Raises `ValueError` with the remedy."""
    from transformers import AutoTokenizer  # a second or two: after the server has answered

    from sglang.srt.configs.model_config import BUILTIN_MODEL_NAME, BUILTIN_MODEL_PATH

    # The server's own path helps where client and server are one machine; a served name need not be a path.
    path = args.tokenizer or args.model or card.get("root") or card["id"]
    if path == BUILTIN_MODEL_NAME:
        path = BUILTIN_MODEL_PATH
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"no tokenizer at {path}: name one by --tokenizer ({reason})") from None


async def measure(
    args: argparse.Namespace, address: Address, model: str, tokenizer: Any
) -> tuple[dict[str, Any], list[Trace]]:
    """Warm up, then run the load. Raises `ServerProblem` when a warm-up request fails."""
    rng = random.Random(args.seed)
    requests = _requests(args, tokenizer, rng)
    options = RequestOptions(
        model, not args.disable_stream, not args.disable_ignore_eos, args.extra_request_body
    )
    target = Target(address, BACKENDS[args.backend], options, _headers(args.api_key), REQUEST_TIMEOUT_S)
    await _warm_up(target, requests, args.warmup_requests)
    if args.flush_cache:
        flush_cache(address, args.api_key)
    with tqdm(total=len(requests), disable=args.disable_tqdm) as bar:
        traces, duration_s = await run_load(
            target,
            requests,
            Pace(args.request_rate, args.max_concurrency),
            rng,
            lambda _: bar.update() and None,
        )
    head = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "backend": args.backend,
        "model": model,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if args.request_rate == math.inf else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "seed": args.seed,
    }
    return {**head, **summarize(traces, duration_s)}, traces


def _requests(args: argparse.Namespace, tokenizer: Any, rng: random.Random) -> list[tuple[Prompt, int]]:
    lengths = RandomLengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    token_ids = plain_token_ids(tokenizer)
    if args.backend != "sglang-oai-chat":
        return random_prompts(token_ids, lengths, args.num_prompts, rng)
    token_ids = ids_of_whole_text(tokenizer, token_ids, rng)
    requests = random_prompts(token_ids, lengths, args.num_prompts, rng)
    return [(with_text(prompt, tokenizer, token_ids, rng), length) for prompt, length in requests]


async def _warm_up(target: Target, requests: Sequence[tuple[Prompt, int]], num_requests: int) -> None:
    prompt, num_output = requests[0]
    asked = (target.ask(prompt, min(num_output, WARMUP_OUTPUT_LEN)) for _ in range(num_requests))
    for trace in await asyncio.gather(*asked):
        if trace.error is not None:
            raise ServerProblem(f"a warm-up request to {target.backend.path} failed: {trace.error}")


def flush_cache(address: Address, api_key: str | None) -> None:
    """Raises `ServerProblem` unless the server says that it has done so."""
    url = f"{address.url}/flush_cache"
    try:
        response = httpx.post(url, headers=_headers(api_key), timeout=ASK_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise ServerProblem(f"{url}: {error}") from None
    if response.status_code != 200:
        words = " ".join(response.text.split())[:300]
        raise ServerProblem(f"{url} was answered with HTTP {response.status_code}: {words}")


def report_failures(traces: Sequence[Trace]) -> int:
    """Tell the failures on stderr, equal ones once; gives their number."""
    errors = Counter(trace.error for trace in traces if trace.error is not None)
    for error, count in errors.most_common(5):
        print(f"{PROG}: error: {count} of {len(traces)} requests failed: {error}", file=sys.stderr)
    return sum(errors.values())


def _details(traces: Sequence[Trace]) -> dict[str, Any]:
    return {
        "input_lens": [trace.num_prompt for trace in traces],
        "output_lens": [trace.num_output for trace in traces],
        "ttfts": [trace.ttft_s for trace in traces],
        "itls": [trace.itl_s for trace in traces],
        "errors": [trace.error or "" for trace in traces],
    }


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
