"""Norm, rotary and activation kernels against the torch code that stands beside them in the layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rotary import RotaryEmbedding

BF16 = torch.bfloat16
RELATIVE_ERROR = 0.005
"""One rounding to BF16 is 2^-9 at most; the torch code rounds once more."""


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", 0)


def check(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
    error = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
    assert error < RELATIVE_ERROR, error


def norms(size: int, device: torch.device) -> tuple[RMSNorm, RMSNorm]:
    """The same norm with the kernels and without."""
    torch.manual_seed(0)
    fused, plain = (RMSNorm(size, 1e-6, BF16, device) for _ in range(2))
    assert fused._kernels is not None, "the kernels do not load here"
    weight = 1 + 0.2 * torch.randn(size, dtype=BF16, device=device)
    fused.weight.data.copy_(weight)
    plain.weight.data.copy_(weight)
    plain._kernels = None
    return fused, plain


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 3000])
@pytest.mark.parametrize("size", [128, 2048])
def test_norm_of_rows(device: torch.device, size: int, num_tokens: int) -> None:
    fused, plain = norms(size, device)
    x = torch.randn(num_tokens, size, dtype=BF16, device=device)
    ours = fused(x)
    assert ours.data_ptr() != x.data_ptr() or num_tokens == 0
    if num_tokens:
        check(ours, plain(x))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_tokens", [1, 513])
def test_norm_of_heads_inside_a_wider_tensor(device: torch.device, head_dim: int, num_tokens: int) -> None:
    fused, plain = norms(head_dim, device)
    both = torch.randn(num_tokens, 40, head_dim, dtype=BF16, device=device)
    for heads in both.split([32, 4, 4], dim=1):
        before = both.clone()
        ours = fused(heads)
        assert ours.is_contiguous() and torch.equal(both, before)
        check(ours, plain(heads))


@pytest.mark.parametrize("num_tokens", [1, 64, 2049])
def test_sum_and_norm(device: torch.device, num_tokens: int) -> None:
    fused, plain = norms(2048, device)
    x, residual = (torch.randn(num_tokens, 2048, dtype=BF16, device=device) for _ in range(2))
    wanted, wanted_sum = plain.add_and_norm(x.clone(), residual.clone())
    ours, ours_sum = fused.add_and_norm(x.clone(), residual.clone())
    check(ours, wanted)
    check(ours_sum, wanted_sum)
    first, its_sum = fused.add_and_norm(x, None)
    check(first, plain(x))
    assert its_sum is x


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_rotary(device: torch.device, head_dim: int, num_tokens: int) -> None:
    rotary = RotaryEmbedding(head_dim, 4096, 1e6, None, device)
    assert rotary._kernels is not None
    q = torch.randn(num_tokens, 32, head_dim, dtype=BF16, device=device)
    k = torch.randn(num_tokens, 4, head_dim, dtype=BF16, device=device)
    positions = torch.randint(0, 4096, (num_tokens,), device=device)
    ours = rotary(positions, q.clone(), k.clone())
    rotary._kernels = None
    for one, wanted in zip(ours, rotary(positions, q, k), strict=True):
        check(one, wanted)


def test_silu_and_mul_takes_the_gate_first(device: torch.device) -> None:
    kernels = fused_kernels(device)
    assert kernels is not None
    gate_up = torch.randn(33, 512, dtype=BF16, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    check(kernels.silu_and_mul(gate_up), (F.silu(gate) * up).to(BF16))


def test_the_kernels_can_be_captured(device: torch.device) -> None:
    fused, _ = norms(2048, device)
    x, residual = (torch.randn(4, 2048, dtype=BF16, device=device) for _ in range(2))
    wanted = fused.add_and_norm(x.clone(), residual.clone())[0]
    static_x, static_residual = x.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = fused.add_and_norm(static_x, static_residual)
    static_x.copy_(x)
    static_residual.copy_(residual)
    graph.replay()
    assert torch.equal(out, wanted)
