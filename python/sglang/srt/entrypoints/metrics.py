"""What `GET /metrics` shows of the serving side, under the names that SGLang dashboards read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang.srt.managers.io_struct import InternalState

_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


THROUGHPUT_WINDOW_S = 10.0
"""What the throughput is a mean over."""


@dataclass
class _Timing:
    started_s: float
    num_prompt_tokens: int
    last_token_s: float | None = None


class ServingMetrics:
    """Counts sequences and tokens as the tokenizer manager reports them (it is its `RequestObserver`)."""

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._timings: dict[str, _Timing] = {}
        self._recent: deque[tuple[float, int]] = deque()  # when tokens came, and how many
        self._num_prompt = self._num_cached = 0

        def add(kind: type, name: str, text: str, **options: object):  # type: ignore[no-untyped-def]
            metric = kind(f"sglang:{name}", text, ["model_name"], registry=registry, **options)
            return metric.labels(model_name)

        self._requests = add(Counter, "num_requests", "Sequences that ended")
        self._aborted = add(Counter, "num_aborted_requests", "Sequences that ended before their last token")
        self._prompt_tokens = add(Counter, "prompt_tokens", "Prompt tokens taken")
        self._cached_tokens = add(Counter, "cached_tokens", "Prompt tokens found in the prefix cache")
        self._output_tokens = add(Counter, "generation_tokens", "Tokens generated")
        self._first_token = add(
            Histogram,
            "time_to_first_token_seconds",
            "From the arrival of a sequence to its first token",
            buckets=_REQUEST_BUCKETS_S,
        )
        self._next_token = add(
            Histogram,
            "inter_token_latency_seconds",
            "From one token of a sequence to the next",
            buckets=_TOKEN_BUCKETS_S,
        )
        self._whole = add(
            Histogram,
            "e2e_request_latency_seconds",
            "From the arrival of a sequence to its last token",
            buckets=_REQUEST_BUCKETS_S,
        )
        self._running = add(Gauge, "num_running_reqs", "Sequences that run")
        self._waiting = add(Gauge, "num_queue_reqs", "Sequences that wait")
        self._used = add(Gauge, "num_used_tokens", "KV slots in use")
        self._usage = add(Gauge, "token_usage", "Share of the KV slots in use")
        self._slots = add(Gauge, "max_total_num_tokens", "KV slots in all")
        self._throughput = add(
            Gauge, "gen_throughput", f"Tokens generated per second over the last {THROUGHPUT_WINDOW_S:g} s"
        )
        self._hit_rate = add(
            Gauge, "cache_hit_rate", "Share of the prompt tokens that were found in the prefix cache"
        )
        self._retractions = add(
            Gauge, "num_retractions", "Times that a sequence was put back for lack of KV slots"
        )

    def started(self, rid: str, num_prompt_tokens: int) -> None:
        self._timings[rid] = _Timing(self._clock(), num_prompt_tokens)
        self._prompt_tokens.inc(num_prompt_tokens)

    def gained(self, rid: str, num_tokens: int, num_cached_tokens: int) -> None:
        """`num_tokens` new tokens of `rid`; those that came together share the time since the last.

        `num_cached_tokens` of its prompt were found in the prefix cache, and are counted with its first tokens.
        """
        timing, now_s = self._timings[rid], self._clock()
        self._output_tokens.inc(num_tokens)
        self._recent.append((now_s, num_tokens))
        self._forget_before(now_s - THROUGHPUT_WINDOW_S)
        if timing.last_token_s is None:
            self._cached_tokens.inc(num_cached_tokens)
            self._num_prompt += timing.num_prompt_tokens
            self._num_cached += num_cached_tokens
            self._first_token.observe(now_s - timing.started_s)
        else:
            for _ in range(num_tokens):
                self._next_token.observe((now_s - timing.last_token_s) / num_tokens)
        timing.last_token_s = now_s

    def ended(self, rid: str, is_complete: bool) -> None:
        timing = self._timings.pop(rid)
        self._requests.inc()
        if is_complete:
            self._whole.observe(self._clock() - timing.started_s)
        else:
            self._aborted.inc()

    def _forget_before(self, start_s: float) -> None:
        while self._recent and self._recent[0][0] < start_s:
            self._recent.popleft()

    def render(self, states: Sequence[InternalState]) -> bytes:
        """The whole registry as text; the `states` of all replicas fill the gauges when they have answered."""
        self._forget_before(self._clock() - THROUGHPUT_WINDOW_S)
        self._throughput.set(sum(count for _, count in self._recent) / THROUGHPUT_WINDOW_S)
        if self._num_prompt:
            self._hit_rate.set(self._num_cached / self._num_prompt)
        if states:
            num_used = sum(state.num_used_tokens for state in states)
            num_slots = sum(state.max_total_num_tokens for state in states)
            self._running.set(sum(state.num_running_reqs for state in states))
            self._waiting.set(sum(state.num_waiting_reqs for state in states))
            self._used.set(num_used)
            self._usage.set(num_used / num_slots)
            self._slots.set(num_slots)
            self._retractions.set(sum(state.num_retractions for state in states))
        return generate_latest(self._registry)
