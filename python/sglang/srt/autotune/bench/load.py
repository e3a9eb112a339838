"""The load of the serving pieces: streamed completions of random token ids at a fixed concurrency."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from sglang.benchmark import load as generator
from sglang.benchmark.backends import BACKENDS, RequestOptions
from sglang.benchmark.dataset import RandomLengths, random_prompts
from sglang.benchmark.http import Address
from sglang.benchmark.summary import summarize


@dataclass(frozen=True)
class Load:
    """`num_requests` requests, `concurrency` at a time, each of `input_len` and `output_len` tokens."""

    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    vocab_size: int


def run_load(host: str, port: int, load: Load, timeout_s: float) -> dict[str, Any]:
    """Output tokens per second, and the medians over requests of TTFT and of the time between two tokens, in ms.

    Raises:
        RuntimeError: a request failed, with the server's words, or got another number of tokens than it asked for.
        TimeoutError: the whole load took longer than `timeout_s`.
    """
    return asyncio.run(asyncio.wait_for(_run(Address(host, port), load), timeout_s))


async def _run(address: Address, load: Load) -> dict[str, Any]:
    rng = random.Random(load.concurrency)
    lengths = RandomLengths(load.input_len, load.output_len, ratio=1.0)
    requests = random_prompts(range(1, load.vocab_size), lengths, load.num_requests, rng)
    target = generator.Target(address, BACKENDS["sglang-oai"], RequestOptions(model=None))
    pace = generator.Pace(max_concurrency=load.concurrency)
    traces, seconds = await generator.run_load(target, requests, pace, rng)
    for trace in traces:
        if trace.error is not None:
            raise RuntimeError(f"a request failed: {trace.error}")
        if trace.num_output != load.output_len:
            raise RuntimeError(f"a request got {trace.num_output} tokens instead of {load.output_len}")
    summary = summarize(traces, seconds)
    return {
        "concurrency": load.concurrency,
        "requests": load.num_requests,
        "seconds": seconds,
        "output_tokens": summary["total_output_tokens"],
        "output_tokens_per_s": summary["output_throughput"],
        "ttft_ms": summary["median_ttft_ms"],
        "itl_ms": summary["median_tpot_ms"],
    }
