"""What `/metrics` says of sequences, tokens and their times, told by a clock that the test turns."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from sglang.srt.entrypoints.metrics import THROUGHPUT_WINDOW_S, ServingMetrics
from sglang.srt.managers.io_struct import InternalState


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics(clock):
    return ServingMetrics("m", CollectorRegistry(), clock)


def values(metrics, states=()) -> dict[str, float]:
    """The samples of the one model, by their names without prefix and label."""
    lines = metrics.render(states).decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    suffix = '{model_name="m"}'
    return {
        name.removeprefix("sglang:").removesuffix(suffix): float(value)
        for name, value in samples.items()
        if name.endswith(suffix)
    }


def test_times_are_from_arrival_to_first_token_from_token_to_token_and_to_the_end(metrics, clock):
    metrics.started("r", 7)
    clock.now_s += 2
    metrics.gained("r", 1, 0)
    clock.now_s += 3
    metrics.gained("r", 6, 0)
    metrics.ended("r", is_complete=True)
    said = values(metrics)
    assert said["time_to_first_token_seconds_sum"] == 2
    assert (said["inter_token_latency_seconds_count"], said["inter_token_latency_seconds_sum"]) == (6, 3)
    assert said["e2e_request_latency_seconds_sum"] == 5
    assert (said["prompt_tokens_total"], said["generation_tokens_total"]) == (7, 7)
    assert (said["num_requests_total"], said["num_aborted_requests_total"]) == (1, 0)


def test_cached_tokens_count_once_for_each_sequence_and_make_the_hit_rate(metrics):
    metrics.started("hit", 10)
    metrics.started("miss", 10)
    for _ in range(3):
        metrics.gained("hit", 1, 8)
        metrics.gained("miss", 1, 0)
    said = values(metrics)
    assert said["cached_tokens_total"] == 8
    assert said["cache_hit_rate"] == 0.4


def test_the_throughput_is_of_the_last_seconds_only(metrics, clock):
    metrics.started("r", 1)
    metrics.gained("r", 50, 0)
    assert values(metrics)["gen_throughput"] == 50 / THROUGHPUT_WINDOW_S
    clock.now_s += THROUGHPUT_WINDOW_S - 1
    metrics.gained("r", 10, 0)
    assert values(metrics)["gen_throughput"] == 60 / THROUGHPUT_WINDOW_S
    clock.now_s += 2
    assert values(metrics)["gen_throughput"] == 10 / THROUGHPUT_WINDOW_S
    clock.now_s += THROUGHPUT_WINDOW_S
    assert values(metrics)["gen_throughput"] == 0


def test_a_sequence_that_is_given_up_has_no_end_to_end_time(metrics):
    metrics.started("r", 1)
    metrics.ended("r", is_complete=False)
    said = values(metrics)
    assert (said["num_aborted_requests_total"], said["e2e_request_latency_seconds_count"]) == (1, 0)


def test_the_gauges_add_up_the_replicas(metrics):
    states = [
        InternalState(
            ticket=1,
            replica=replica,
            max_total_num_tokens=100,
            num_used_tokens=20,
            num_running_reqs=3,
            num_waiting_reqs=1,
            num_retractions=replica,
        )
        for replica in range(2)
    ]
    said = values(metrics, states)
    assert (said["num_running_reqs"], said["num_queue_reqs"], said["token_usage"]) == (6, 2, 0.2)
