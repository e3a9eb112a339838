"""Which configurations of the kernels are worth timing, as data.

A tactic is `(method, first, second)`: how rows find their expert, then the configuration of each product, e.g.
`("grouped16", ("swap_tma", 64, 128, 4, 3), ("swap", 64, 128, 4, 3))`. The two products do not influence each other,
so a search has to time the sum of their configurations and not their product: that is what a `Space` offers.

The lists hold the fastest at each token count on an H200, for 128 experts of width 768 and for 16 of width 1536, and
beside them others of each kind that came within 5% somewhere, since other GPUs and shapes may want them. The first
one serves untuned, and is what a search combines with all of the other product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: `(kind, rows of weights, stretch of the reduction, warps, stages)`
Config = tuple[Any, ...]

#: A product without tensor cores; a tile with rows on the left; with the weights on the left; the same with TMA.
GEMV, DOT, SWAP, DOT_TMA, SWAP_TMA = "gemv", "dot", "swap", "dot_tma", "swap_tma"

#: Slots as they are, each a product of its own without tensor cores. The other methods sort them into tiles.
FEW = "few"
#: Rows of a tile in each of the other methods.
BLOCK_M = {"grouped16": 16, "grouped32": 32, "grouped64": 64, "grouped128": 128}

#: "few" reads an expert's weights once for each slot that chose it, which suits only counts at which slots rarely
#: share one. At 8 tokens it is a little ahead where all of 128 experts are as likely, and clearly behind where a
#: trained router prefers some; what a record was measured with need not be what it serves.
MAX_GEMV_TOKENS = 4


@dataclass(frozen=True)
class Space:
    """The configurations of one method; any of `first` goes with any of `second`."""

    method: str
    first: tuple[Config, ...]
    second: tuple[Config, ...]

    def tactic(self, i: int, j: int) -> tuple[Any, ...]:
        return (self.method, self.first[i], self.second[j])

    def tactics(self) -> Iterator[tuple[Any, ...]]:
        """All of `first` with the first of `second`, then the rest of `second` with the first of `first`."""
        for i in range(len(self.first)):
            yield self.tactic(i, 0)
        for j in range(1, len(self.second)):
            yield self.tactic(0, j)


FIRST_GEMV: tuple[Config, ...] = (
    (GEMV, 1, 2048, 4, 1),
    (GEMV, 2, 2048, 4, 1),
    (GEMV, 1, 1024, 2, 1),
    (GEMV, 2, 1024, 2, 1),
    (GEMV, 2, 1024, 4, 1),
)
SECOND_GEMV: tuple[Config, ...] = (
    (GEMV, 1, 256, 4, 1),
    (GEMV, 1, 128, 4, 1),
    (GEMV, 1, 256, 2, 1),
    (GEMV, 2, 256, 8, 1),
    (GEMV, 1, 512, 4, 1),
    (GEMV, 1, 512, 8, 1),
)
FIRST_GROUPED: dict[str, tuple[Config, ...]] = {
    "grouped16": (
        (SWAP_TMA, 64, 128, 4, 3),
        (SWAP_TMA, 64, 128, 4, 2),
        (SWAP, 64, 128, 4, 3),
        (DOT, 32, 256, 4, 3),
        (DOT, 64, 128, 4, 3),
    ),
    "grouped32": (
        (SWAP_TMA, 64, 64, 4, 5),
        (SWAP_TMA, 64, 128, 4, 3),
        (SWAP, 64, 64, 4, 4),
        (DOT, 64, 128, 4, 3),
    ),
    "grouped64": (
        (DOT, 64, 64, 4, 3),
        (DOT_TMA, 64, 64, 4, 4),
        (SWAP_TMA, 64, 64, 4, 4),
    ),
    "grouped128": (
        (DOT_TMA, 128, 64, 8, 4),
        (DOT, 128, 64, 8, 4),
    ),
}
SECOND_GROUPED: dict[str, tuple[Config, ...]] = {
    "grouped16": (
        (SWAP_TMA, 64, 128, 4, 3),
        (SWAP_TMA, 64, 128, 4, 4),
        (SWAP_TMA, 128, 128, 4, 3),
        (SWAP, 64, 128, 4, 3),
        (DOT, 64, 128, 4, 3),
    ),
    "grouped32": (
        (SWAP_TMA, 64, 128, 4, 3),
        (SWAP_TMA, 128, 64, 4, 4),
        (SWAP, 64, 128, 4, 3),
    ),
    "grouped64": (
        (DOT_TMA, 128, 64, 4, 4),
        (DOT, 128, 64, 4, 4),
        (SWAP_TMA, 128, 64, 4, 4),
    ),
    "grouped128": (
        (DOT_TMA, 128, 64, 8, 3),
        (DOT_TMA, 256, 64, 8, 3),
        (DOT, 128, 64, 8, 3),
    ),
}

#: Everything that may be asked for, method by method: what a stored tactic is held against.
KNOWN = {
    FEW: Space(FEW, FIRST_GEMV, SECOND_GEMV),
    **{name: Space(name, FIRST_GROUPED[name], SECOND_GROUPED[name]) for name in FIRST_GROUPED},
}


def spaces(num_tokens: int, top_k: int, num_experts: int) -> list[Space]:
    """What is worth timing at `num_tokens`, with about as many rows for each expert."""
    few = [FEW] if num_tokens <= MAX_GEMV_TOKENS else []
    grouped = _grouped(num_tokens * top_k / num_experts) if num_tokens > 2 else []
    return [KNOWN[name] for name in few + grouped]


def _grouped(rows: float) -> list[str]:
    """The methods whose tiles hold `rows` rows of an expert in one or two."""
    if rows <= 8:
        return ["grouped16"]
    if rows <= 16:
        return ["grouped16", "grouped32"]
    if rows <= 32:
        return ["grouped32", "grouped64"]
    if rows <= 64:
        return ["grouped64", "grouped128"]
    return ["grouped128"]


def normalised(tactic: Any) -> tuple[Any, ...] | None:
    """The known tactic that a stored one spells, with lists for tuples or not; None where there is none."""
    if not isinstance(tactic, (tuple, list)) or len(tactic) != 3 or not isinstance(tactic[0], str):
        return None
    space = KNOWN.get(tactic[0])
    if space is None:
        return None
    first, second = _found(space.first, tactic[1]), _found(space.second, tactic[2])
    return None if first is None or second is None else (space.method, first, second)


def _found(configs: tuple[Config, ...], stored: Any) -> Config | None:
    if not isinstance(stored, (tuple, list)) or not all(type(part) in (str, int) for part in stored):
        return None
    stored = tuple(stored)
    return stored if stored in configs else None


def suits(tactic: tuple[Any, ...], num_tokens: int) -> bool:
    """Whether a known tactic is one for `num_tokens`; a record of another one is measured again."""
    return tactic[0] != FEW or num_tokens <= MAX_GEMV_TOKENS


def default_tactic(num_tokens: int, top_k: int, num_experts: int) -> tuple[Any, ...]:
    """What runs without tuning: a reasonable configuration for `num_tokens`, by rule."""
    place = 0 if num_tokens <= MAX_GEMV_TOKENS else -1
    return spaces(num_tokens, top_k, num_experts)[place].tactic(0, 0)
