"""The routing kernel against the torch code that says what routing is."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.moe.topk import expert_selector, select_experts

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (60, 4), (16, 1)])
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
def test_routing_is_that_of_torch(
    num_tokens: int, num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype
) -> None:
    route = expert_selector(DEVICE)
    assert route is not select_experts, "the kernel does not load here"
    logits = 3 * torch.randn(num_tokens, num_experts, device=DEVICE).to(dtype)
    weights, ids = route(logits, top_k, renormalize)
    wanted_weights, _ = select_experts(logits, top_k, renormalize)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(weights, wanted_weights, atol=1e-6, rtol=1e-5)
    # Equal logits may be chosen in any order, so what was chosen is compared by its logits.
    chosen = logits.gather(1, ids.long())
    torch.testing.assert_close(chosen, logits.topk(top_k, dim=-1).values)
    assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all(), "an expert was chosen twice"


def test_rows_of_nan_still_choose_experts() -> None:
    _, ids = expert_selector(DEVICE)(torch.full((3, 128), float("nan"), device=DEVICE), 8, True)
    assert ((ids >= 0) & (ids < 128)).all()
