"""A launch that faults takes the CUDA context with it: the start ends, and the next one leaves that step out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.tiny_host import TinyHost, start

pytestmark = pytest.mark.native


def out_of_bounds() -> None:
    """Index beyond a tensor: an assertion fails on the device, and every later CUDA call of the process with it."""
    values = torch.zeros(4, device="cuda")
    values[torch.tensor([1 << 20], device="cuda")].sum().item()


def poisoned_at(rank: int, root: str, bucket: int) -> dict:
    """A start whose forward at ``bucket`` tokens faults; the tiny host's op itself stays on the CPU."""

    def between(shape):
        torch.ones(8, device="cuda").sum().item()
        if shape.op_tokens == bucket:
            out_of_bounds()

    return start(Path(root), TinyHost(between=between)).to_json()


def test_a_step_that_poisons_the_context_is_left_out_by_the_next_start(tmp_path):
    (first,) = run_ranks(1, poisoned_at, str(tmp_path), 4, timeout_s=90, fresh=True)
    assert first.error is not None and "failed in autotune step decode 4" in first.error
    (second,) = run_ranks(1, poisoned_at, str(tmp_path), 4, timeout_s=90, fresh=True)
    assert second.error is None, second.error
    report = second.result
    assert report["status"] == "completed" and report["records"]["user"] == 2
    assert [left["step"] for left in report["left_out"]] == ["decode 4"]
    assert "CUDA error" in report["left_out"][0]["reason"]
