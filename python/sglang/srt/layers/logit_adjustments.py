"""What requests change about their logits before a token is chosen: penalties for repetition, and biases.

Penalties look at the tokens that a request was given so far, not at its prompt. How often it was given each token is
counted on the device as tokens are chosen, so the counts are exact whatever became of the request in between: a prompt
that came in chunks, or a sequence that was put back and computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.transfer import to_device


class TokenCounts:
    """How often each of some requests was given each token. A request's counts live as long as the request."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, device
        # Each request's row of the matrix that was made for its latest batch.
        self._places: WeakKeyDictionary[Hashable, tuple[torch.Tensor, int]] = WeakKeyDictionary()

    def of(self, owners: Sequence[Hashable]) -> torch.Tensor:
        """`[P, V]` int32, a row for each of `owners`, to be counted in; the same tensor while they stay together."""
        places = [self._places.get(owner) for owner in owners]
        matrix = places[0][0] if places and places[0] else None
        if (
            matrix is not None
            and len(matrix) == len(owners)
            and all(
                place is not None and place[0] is matrix and place[1] == i for i, place in enumerate(places)
            )
        ):
            return matrix
        matrix = torch.zeros(len(owners), self._vocab_size, dtype=torch.int32, device=self._device)
        for i, (owner, place) in enumerate(zip(owners, places, strict=True)):
            if place is not None:
                matrix[i] = place[0][place[1]]
            self._places[owner] = matrix, i
        return matrix


@dataclass(frozen=True)
class Penalties:
    """Of P rows of a batch."""

    rows: torch.Tensor  # [P] int64
    frequency: torch.Tensor  # [P, 1] float32
    presence: torch.Tensor  # [P, 1] float32
    repetition: torch.Tensor  # [P, 1] float32
    row_list: tuple[int, ...]

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Penalties | None:
        """One entry of `params` for each row of the batch; None when no row has penalties."""
        rows = [i for i, p in enumerate(params) if p.has_penalties]
        if not rows:
            return None

        def column(values: list[float]) -> torch.Tensor:
            return to_device(torch.tensor(values, dtype=torch.float32), device)[:, None]

        return cls(
            to_device(torch.tensor(rows), device),
            column([params[i].frequency_penalty for i in rows]),
            column([params[i].presence_penalty for i in rows]),
            column([params[i].repetition_penalty for i in rows]),
            tuple(rows),
        )

    def apply(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`[B, V]` logits, and the rows' `counts` `[P, V]` -> new logits.

        A token given c > 0 times loses c * frequency + presence; then a positive logit is divided by repetition, and
        a negative one multiplied.
        """
        penalised = logits[self.rows]
        given = counts > 0
        penalised = penalised - self.frequency * counts - self.presence * given
        scaled = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
        return logits.index_copy(0, self.rows, torch.where(given, scaled, penalised))

    def count(self, counts: torch.Tensor, tokens: torch.Tensor, is_kept: Sequence[bool]) -> None:
        """Add the chosen `tokens` `[B]` to `counts`, except in rows of the batch whose token is not kept."""
        kept = [is_kept[i] for i in self.row_list]
        weights = to_device(torch.tensor(kept, dtype=torch.int32), counts.device)[:, None]
        counts.scatter_add_(1, tokens[self.rows][:, None], weights)


@dataclass(frozen=True)
class LogitBias:
    """Numbers that are added to single logits of a batch."""

    rows: torch.Tensor  # [N] int64
    tokens: torch.Tensor  # [N] int64
    values: torch.Tensor  # [N] float32

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device | str) -> LogitBias | None:
        """One entry of `params` for each row of the batch; None when no row has a bias."""
        entries = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return cls(
            to_device(torch.tensor(rows), device),
            to_device(torch.tensor(tokens), device),
            to_device(torch.tensor(values, dtype=torch.float32), device),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`[B, V]` -> new logits."""
        return logits.index_put((self.rows, self.tokens), self.values, accumulate=True)
