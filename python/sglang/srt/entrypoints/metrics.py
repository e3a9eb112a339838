"""What `GET /metrics` shows of the serving side, under the names that SGLang dashboards read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang.srt.managers.io_struct import InternalState

_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass
class _Timing:
    started_s: float
    last_token_s: float | None = None


class ServingMetrics:
    """Counts sequences and tokens as the tokenizer manager reports them (it is its `RequestObserver`)."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._timings: dict[str, _Timing] = {}

        def add(kind: type, name: str, text: str, **options: object):  # type: ignore[no-untyped-def]
            metric = kind(f"sglang:{name}", text, ["model_name"], registry=registry, **options)
            return metric.labels(model_name)

        self._requests = add(Counter, "num_requests", "Sequences that ended")
        self._aborted = add(Counter, "num_aborted_requests", "Sequences that ended before their last token")
        self._prompt_tokens = add(Counter, "prompt_tokens", "Prompt tokens taken")
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
        self._retractions = add(
            Gauge, "num_retractions", "Times that a sequence was put back for lack of KV slots"
        )

    def started(self, rid: str, num_prompt_tokens: int) -> None:
        self._timings[rid] = _Timing(time.perf_counter())
        self._prompt_tokens.inc(num_prompt_tokens)

    def gained(self, rid: str, num_tokens: int) -> None:
        """`num_tokens` new tokens of `rid`; those that came together share the time since the last."""
        timing, now_s = self._timings[rid], time.perf_counter()
        self._output_tokens.inc(num_tokens)
        if timing.last_token_s is None:
            self._first_token.observe(now_s - timing.started_s)
        else:
            for _ in range(num_tokens):
                self._next_token.observe((now_s - timing.last_token_s) / num_tokens)
        timing.last_token_s = now_s

    def ended(self, rid: str, is_complete: bool) -> None:
        timing = self._timings.pop(rid)
        self._requests.inc()
        if is_complete:
            self._whole.observe(time.perf_counter() - timing.started_s)
        else:
            self._aborted.inc()

    def render(self, states: Sequence[InternalState]) -> bytes:
        """The whole registry as text; the `states` of all replicas fill the gauges when they have answered."""
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
