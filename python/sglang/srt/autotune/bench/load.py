"""A small load generator: streamed completions of random token ids at a fixed concurrency.

It speaks HTTP over plain sockets: at hundreds of streams a client library's work for each event would be measured
instead of the server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

_LINE_LIMIT = 1 << 22


@dataclass(frozen=True)
class Load:
    """`num_requests` requests, `concurrency` at a time, each of `input_len` and `output_len` tokens."""

    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    vocab_size: int


@dataclass(frozen=True)
class Answer:
    """Seconds to the first token and from it to the last, and how many tokens there were."""

    num_tokens: int
    ttft_s: float
    rest_s: float


def run_load(host: str, port: int, load: Load, timeout_s: float) -> dict[str, Any]:
    """Output tokens per second, and the medians over requests of TTFT and of the time between two tokens, in ms.

    Raises:
        RuntimeError: a request failed, with the server's words.
        TimeoutError: the whole load took longer than `timeout_s`.
    """
    return asyncio.run(asyncio.wait_for(_run(host, port, load), timeout_s))


async def _run(host: str, port: int, load: Load) -> dict[str, Any]:
    rng = random.Random(load.concurrency)
    highest = load.vocab_size - 1
    prompts = [[rng.randint(1, highest) for _ in range(load.input_len)] for _ in range(load.num_requests)]
    gate = asyncio.Semaphore(load.concurrency)

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await _complete(host, port, prompt, load.output_len)

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - start
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "concurrency": load.concurrency,
        "requests": load.num_requests,
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_ms": 1e3 * statistics.median(answer.ttft_s for answer in answers),
        "itl_ms": 1e3 * statistics.median(a.rest_s / max(1, a.num_tokens - 1) for a in answers),
    }


async def _complete(host: str, port: int, prompt: list[int], output_len: int) -> Answer:
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT)
    try:
        writer.write(head + body)
        await writer.drain()
        answer = await _read_answer(reader, start)
    finally:
        writer.close()
    if answer.num_tokens != output_len:
        raise RuntimeError(f"a request got {answer.num_tokens} tokens instead of {output_len}")
    return answer


async def _read_answer(reader: asyncio.StreamReader, start: float) -> Answer:
    status = (await reader.readline()).decode(errors="replace").strip()
    if status.split(" ")[1:2] != ["200"]:
        text = (await reader.read()).decode(errors="replace")
        body = " ".join(text.partition("\r\n\r\n")[2].split()) or text.strip()
        raise RuntimeError(f"a request was answered with {status}: {body[:300]}")
    first = last = 0.0
    num_tokens = 0
    # The sizes of the chunks stand on lines of their own between the events and are passed over like the headers.
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if b'"choices":[]' in line or b'"error"' in line:
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"a request failed: {event['error']}")
            num_tokens = event["usage"]["completion_tokens"]
            continue
        first, last = first or now, now
    return Answer(num_tokens, first - start, last - first)
