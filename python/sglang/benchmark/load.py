"""Sends many requests, at a rate and up to a concurrency, and waits for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from sglang.benchmark.backends import Backend, Prompt, RequestOptions
from sglang.benchmark.http import Address
from sglang.benchmark.requests import Trace, send_request

REQUEST_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how."""

    address: Address
    backend: Backend
    options: RequestOptions
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = REQUEST_TIMEOUT_S

    async def ask(self, prompt: Prompt, num_output: int) -> Trace:
        return await send_request(
            self.address, self.backend, prompt, num_output, self.options, self.headers, self.timeout_s
        )


@dataclass(frozen=True)
class Pace:
    """`rate` requests per second arrive at random (a Poisson process), `math.inf` all at once; at most
    `max_concurrency` of them are under way, None for no limit.
    """

    rate: float = math.inf
    max_concurrency: int | None = None


async def run_load(
    target: Target,
    requests: Sequence[tuple[Prompt, int]],
    pace: Pace,
    rng: random.Random,
    on_done: Callable[[Trace], None] = lambda trace: None,
) -> tuple[list[Trace], float]:
    """The traces of all `requests`, in their order, and the seconds that they took together."""
    gate = (
        contextlib.nullcontext() if pace.max_concurrency is None else asyncio.Semaphore(pace.max_concurrency)
    )

    async def one(prompt: Prompt, num_output: int) -> Trace:
        async with gate:
            trace = await target.ask(prompt, num_output)
        on_done(trace)
        return trace

    start_s = time.perf_counter()
    tasks = []
    try:
        async for prompt, num_output in _arriving(requests, pace.rate, rng):
            tasks.append(asyncio.ensure_future(one(prompt, num_output)))
        traces = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return traces, time.perf_counter() - start_s


async def _arriving(
    requests: Sequence[tuple[Prompt, int]], rate: float, rng: random.Random
) -> AsyncIterator[tuple[Prompt, int]]:
    due_s = time.perf_counter()
    for request in requests:
        yield request
        if rate != math.inf:
            # Against a schedule, not one sleep after another: lateness does not add up.
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
