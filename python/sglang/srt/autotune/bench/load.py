"""A small load generator: streamed completions of random token ids at a fixed concurrency."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Load:
    """`num_requests` requests, `concurrency` at a time, each of `input_len` and `output_len` tokens."""

    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    vocab_size: int


@dataclass
class _Answer:
    num_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def run_load(base_url: str, load: Load, timeout_s: float) -> dict[str, Any]:
    """Throughput in output tokens per second, and TTFT and ITL in milliseconds.

    Raises:
        RuntimeError: a request failed, with the server's words.
        TimeoutError: the whole load took longer than `timeout_s`.
    """
    return asyncio.run(asyncio.wait_for(_run(base_url, load), timeout_s))


async def _run(base_url: str, load: Load) -> dict[str, Any]:
    rng = random.Random(load.concurrency)
    # Ids of a small range, which every tokenizer can turn into text.
    highest = min(load.vocab_size, 256) - 1
    prompts = [[rng.randint(1, highest) for _ in range(load.input_len)] for _ in range(load.num_requests)]
    gate = asyncio.Semaphore(load.concurrency)
    limits = httpx.Limits(max_connections=load.concurrency + 8, max_keepalive_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False) as client:

        async def one(prompt: list[int]) -> _Answer:
            async with gate:
                return await _complete(client, prompt, load.output_len)

        start = time.perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "concurrency": load.concurrency,
        "requests": load.num_requests,
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_ms": 1e3 * statistics.median(answer.ttft_s for answer in answers),
        "itl_ms": 1e3 * statistics.median(gaps) if gaps else None,
        "itl_mean_ms": 1e3 * statistics.fmean(gaps) if gaps else None,
    }


async def _complete(client: httpx.AsyncClient, prompt: list[int], output_len: int) -> _Answer:
    body = {
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, start = _Answer(), time.perf_counter()
    last = start
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"a request was answered with {response.status_code}: {text[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"a request failed: {event['error']}")
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                now = time.perf_counter()
                if answer.ttft_s == 0.0:
                    answer.ttft_s = now - start
                else:
                    answer.gaps_s.append(now - last)
                last = now
    answer.latency_s = time.perf_counter() - start
    if answer.num_tokens != output_len:
        raise RuntimeError(f"a request got {answer.num_tokens} tokens instead of {output_len}")
    return answer
