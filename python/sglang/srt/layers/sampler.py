"""Choosing the next token of each sequence.

The choice for one request is a function of its logits, its parameters, its seed and its position: one
uniform number is drawn for each row by hashing (seed, position), and is looked up in the row's cumulative
distribution in vocabulary order. So the company that a request keeps in a batch, and the order in which
batches were run, cannot change what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.utils.transfer import to_device

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow the logits."""

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit constants.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass
class SamplingBatchInfo:
    """Sampling parameters of B sequences, on the device of the logits.

    The flags say, without asking the device, which work the batch needs.
    """

    temperature: torch.Tensor  # [B] float32; 1 where the row is greedy
    top_p: torch.Tensor  # [B] float32
    top_k: torch.Tensor  # [B] int64; the vocabulary's size where it is off
    min_p: torch.Tensor  # [B] float32
    seeds: torch.Tensor  # [B] int64
    greedy: torch.Tensor  # [B] bool
    all_greedy: bool
    any_greedy: bool
    any_top: bool  # a row uses top_p or top_k
    any_min_p: bool

    @classmethod
    def build(
        cls,
        temperatures: Sequence[float],
        top_ps: Sequence[float],
        top_ks: Sequence[int],
        min_ps: Sequence[float],
        seeds: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> SamplingBatchInfo:
        """One entry for each row. `top_k` below 1 is off; temperature 0 or `top_k` 1 makes a row greedy."""
        greedy = [t < GREEDY_TEMPERATURE or k == 1 for t, k in zip(temperatures, top_ks, strict=True)]
        top_ks = [k if 1 <= k < vocab_size else vocab_size for k in top_ks]
        random_rows = [i for i, is_greedy in enumerate(greedy) if not is_greedy]

        def on_device(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        return cls(
            temperature=on_device(
                [1.0 if g else t for t, g in zip(temperatures, greedy, strict=True)], torch.float32
            ),
            top_p=on_device(top_ps, torch.float32),
            top_k=on_device(top_ks, torch.int64),
            min_p=on_device(min_ps, torch.float32),
            seeds=on_device(seeds, torch.int64),
            greedy=on_device(greedy, torch.bool),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_top=any(top_ps[i] < 1.0 or top_ks[i] < vocab_size for i in random_rows),
            any_min_p=any(min_ps[i] > 0.0 for i in random_rows),
        )


class Sampler:
    """Vectorised sampling; it keeps no state."""

    def __call__(
        self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
    ) -> torch.Tensor:
        """`logits` `[B, V]` float32 and the `positions` `[B]` int64 of the tokens to be chosen -> `[B]` int64."""
        if info.all_greedy:
            return logits.argmax(dim=-1)
        sampled = invert_cdf(_probabilities(logits, info), uniform(info.seeds, positions))
        if info.any_greedy:
            sampled = torch.where(info.greedy, logits.argmax(dim=-1), sampled)
        return sampled


def _probabilities(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """`[B, V]` probabilities after temperature, zero outside the kept tokens, not renormalised.

    top_k, top_p and min_p are judged on the same distribution, so that their order does not matter. top_p
    keeps the fewest most likely tokens whose sum reaches it; ties go to the token that sorts first.
    """
    probs = torch.softmax(logits / info.temperature[:, None], dim=-1)
    keep = None
    if info.any_top:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(probs.shape[-1], device=probs.device)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        kept = (ranks < info.top_k[:, None]) & ((before < info.top_p[:, None]) | (info.top_p >= 1.0)[:, None])
        kept[:, 0] = True
        keep = torch.zeros_like(kept).scatter_(1, order, kept)
    if info.any_min_p:
        likely = probs >= info.min_p[:, None] * probs.amax(dim=-1, keepdim=True)
        keep = likely if keep is None else keep & likely
    return probs if keep is None else probs.masked_fill(~keep, 0.0)


def invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token of each row `[B, V]` of weights at which their cumulative share passes `draws` `[B]` in [0, 1)."""
    # In float64: how a GPU adds up a row depends on the number of rows, and for one row on chance.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first larger entry exists and its token has a positive weight.
    target = torch.minimum(
        draws[:, None].to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp_(max=weights.shape[-1] - 1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) for each pair of `seeds` and `positions`, both `[B]` int64."""
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser; int64 products wrap around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64 has no unsigned right shift of its own in torch."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
