"""What a run amounts to: one dict of numbers, under the names that SGLang's own result files use, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sglang.benchmark.requests import Trace


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of `values`; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(traces: Sequence[Trace], duration_s: float) -> dict[str, Any]:
    """Counts, rates over `duration_s` and latencies in ms of the requests that succeeded."""
    done = [trace for trace in traces if trace.error is None]
    num_input = sum(trace.num_prompt for trace in done)
    num_output = sum(trace.num_output for trace in done)
    tpots = [tpot for trace in done if (tpot := trace.tpot_s) is not None]
    latencies = [trace.latency_s for trace in done]
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(trace.num_cached for trace in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "input_throughput": num_input / duration_s,
        "output_throughput": num_output / duration_s,
        "total_throughput": (num_input + num_output) / duration_s,
        "concurrency": sum(latencies) / duration_s,
        **_spread("e2e_latency", latencies),
        **_spread("ttft", [trace.ttft_s for trace in done]),
        **_spread("tpot", tpots),
        **_spread("itl", [gap for trace in done for gap in trace.itl_s]),
    }


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    values = [1e3 * value for value in values_s]
    return {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
        f"p95_{name}_ms": percentile(values, 95),
        f"p99_{name}_ms": percentile(values, 99),
        f"max_{name}_ms": max(values, default=0.0),
    }


WIDTH = 50
_LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
_STATISTICS = {"mean": "Mean", "median": "Median", "p95": "P95", "p99": "P99", "max": "Max"}


def table(result: dict[str, Any]) -> str:
    """The result as a person reads it."""
    limit = result["max_concurrency"]
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        _line("Backend:", result["backend"]),
        _line("Traffic request rate:", result["request_rate"]),
        _line("Max request concurrency:", "not set" if limit is None else limit),
        _line("Successful requests:", result["completed"]),
        _line("Benchmark duration (s):", result["duration"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total cached tokens:", result["total_cached_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
        _line("Input token throughput (tok/s):", result["input_throughput"]),
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Total token throughput (tok/s):", result["total_throughput"]),
        _line("Concurrency:", result["concurrency"]),
    ]
    if result["failed"]:
        lines.insert(5, _line("Failed requests:", result["failed"]))
    for name, (title, short) in _LATENCIES.items():
        lines.append(f"{title:-^{WIDTH}}")
        for key, word in _STATISTICS.items():
            lines.append(_line(f"{word} {short} (ms):", result[f"{key}_{name}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _line(name: str, value: object) -> str:
    return f"{name:<40} {f'{value:.2f}' if isinstance(value, float) else value}"
