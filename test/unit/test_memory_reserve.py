"""What is set aside before the KV pool is sized."""

from __future__ import annotations

from sglang.srt.autotune.plan import Limits, Shape
from sglang.srt.model_executor.memory_reserve import forward_reserve_bytes

LIMITS = Limits((1, 2, 4, 8), max_running_requests=8, prefill_ceiling=1024, context_length=1024)


def reserve(
    limits: Limits = LIMITS, vocab_size: int = 1000, num_captured: int = 4, num_windows: int = 1
) -> int:
    return forward_reserve_bytes(
        limits,
        vocab_size,
        lambda shape: shape.op_tokens << 20,
        num_captured=num_captured,
        num_windows=num_windows,
    )


def test_the_largest_step_of_the_plan_counts_once() -> None:
    asked: list[Shape] = []

    def bytes_of(shape: Shape) -> int:
        asked.append(shape)
        return shape.op_tokens << 20

    reserved = forward_reserve_bytes(LIMITS, 1000, bytes_of, num_captured=0)
    assert max(shape.op_tokens for shape in asked) == 1024
    assert 1024 << 20 <= reserved < 2048 << 20


def test_longer_prefills_more_graphs_and_larger_vocabularies_need_more() -> None:
    longer = Limits((1, 2, 4, 8), max_running_requests=8, prefill_ceiling=2048, context_length=2048)
    assert reserve(longer) - reserve() == 1024 << 20
    assert reserve(num_captured=5) > reserve()
    assert reserve(num_windows=2) > reserve()
    assert reserve(vocab_size=2000) > reserve()
