"""How coupled ranks take one decision, without ever waiting for ever.

Ranks whose forwards wait for each other must take the same branch. They exchange values through a key-value
store rather than through the process groups of the forwards: a vote can then never be mistaken for a
forward's collective, and a rank that waits can say who is missing, what it was last doing and for how long.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

#: How often a waiting rank looks; the first looks come faster since most votes are answered at once.
_FIRST_POLL_S, _POLL_S = 0.0005, 0.02


class AgreementError(RuntimeError):
    """A coupled rank is missing, failed or disagrees; the message names it."""


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that votes need."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Agreement:
    """Exchange of small JSON values among ``ranks`` (global numbers, the same list on each of them).

    Every rank must make the same calls in the same order; a rank that does not is found out, since each
    value carries the name of the question it answers.
    """

    def __init__(
        self,
        store: KeyValueStore | None,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        *,
        name: str = "autotune",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert rank in ranks, f"rank {rank} is not one of the coupled ranks {ranks}"
        assert store is not None or len(ranks) == 1, "several ranks need a store to agree over"
        self._store, self.rank, self.ranks, self.timeout_s = store, rank, tuple(ranks), timeout_s
        self._name, self._clock, self._sleep = name, clock, sleep
        self._round = self._num_circles = 0

    @classmethod
    def alone(cls, timeout_s: float = 600.0) -> Agreement:
        return cls(None, 0, (0,), timeout_s)

    @property
    def is_alone(self) -> bool:
        return len(self.ranks) == 1

    def within(self, ranks: Sequence[int], name: str) -> Agreement:
        """The same store and bound for a smaller circle, such as the ranks that must choose alike."""
        # Votes of a later circle of the same name must not meet those of an earlier one.
        self._num_circles += 1
        return Agreement(
            self._store if len(ranks) > 1 else None,
            self.rank,
            ranks,
            self.timeout_s,
            name=f"{self._name}/{name}{self._num_circles}/{'-'.join(map(str, ranks))}",
            clock=self._clock,
            sleep=self._sleep,
        )

    def announce(self, doing: str) -> None:
        """Tell the others what this rank is about to do, for the message of whoever waits for it."""
        self._tell(self._status_key(self.rank), json.dumps([doing, time.time()]))

    def fail(self, reason: str) -> None:
        """Tell waiting ranks that this rank gave up, so that they name it at once."""
        self._tell(self._failure_key(self.rank), reason[:2000])

    def gather(self, question: str, value: Any) -> dict[int, Any]:
        """Every rank's value, by rank, within the bound.

        Raises:
            AgreementError: a rank did not answer in time, failed, or answered another question.
        """
        if self._store is None:
            return {self.rank: value}
        self._round += 1
        try:
            self._store.set(self._vote_key(self._round, self.rank), json.dumps([question, value]))
            return {rank: self._answer(question, rank) for rank in self.ranks}
        except AgreementError:
            raise
        except RuntimeError as error:  # torch's stores raise its subclasses when their host is gone
            raise AgreementError(
                f"rank {self.rank} lost the store of the votes, which lives in rank 0, at {question!r}: {error}"
            ) from error

    def all_agree(self, question: str, value: Any, remedy: str) -> None:
        """Raise unless every rank has the same ``value``."""
        answers = self.gather(question, value)
        first = answers[self.ranks[0]]
        odd = [rank for rank in self.ranks if answers[rank] != first]
        if odd:
            raise AgreementError(
                f"rank {odd[0]} differs from rank {self.ranks[0]} in its {question}: "
                f"{answers[odd[0]]!r} against {first!r}; {remedy}"
            )

    def mean_times(self, question: str, times: list[float]) -> list[float]:
        """Element-wise mean over the ranks; what is no time on one of them is infinite on all.

        A clock can hand out zero, a negative number or NaN; in a mean such a value would pass for a fast time.
        """
        answers = self.gather(question, [t if 0 < t < float("inf") else None for t in times])
        columns = zip(*(answers[rank] for rank in self.ranks), strict=True)
        return [float("inf") if None in column else sum(column) / len(column) for column in columns]

    def _tell(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except RuntimeError as error:
                logger.debug("rank %d cannot tell the others, whose store is gone: %s", self.rank, error)

    def _answer(self, question: str, rank: int) -> Any:
        key, started, poll = self._vote_key(self._round, rank), self._clock(), _FIRST_POLL_S
        assert self._store is not None
        while not self._store.check([key]):
            self._raise_if_failed(question)
            waited = self._clock() - started
            if waited > self.timeout_s:
                raise AgreementError(
                    f"rank {self.rank} waited {waited:.1f} s for rank {rank} to answer {question!r} "
                    f"(bound SGLANG_AUTOTUNE_TIMEOUT = {self.timeout_s:g} s); {self._last_seen(rank)}"
                )
            self._sleep(poll)
            poll = min(2 * poll, _POLL_S)
        other_question, value = json.loads(self._store.get(key))
        if other_question != question:
            raise AgreementError(
                f"rank {rank} is at {other_question!r} where rank {self.rank} is at {question!r}; "
                "the ranks were started with different flags or records"
            )
        return value

    def _raise_if_failed(self, question: str) -> None:
        assert self._store is not None
        for rank in self.ranks:
            if rank != self.rank and self._store.check([self._failure_key(rank)]):
                reason = self._store.get(self._failure_key(rank)).decode()
                raise AgreementError(
                    f"rank {rank} failed while rank {self.rank} was at {question!r}: {reason}"
                )

    def _last_seen(self, rank: int) -> str:
        assert self._store is not None
        if not self._store.check([self._status_key(rank)]):
            return f"rank {rank} never reached the autotune stage"
        doing, since = json.loads(self._store.get(self._status_key(rank)))
        return f"rank {rank} was last seen {time.time() - since:.1f} s ago at: {doing}"

    def _vote_key(self, round_: int, rank: int) -> str:
        return f"{self._name}/vote/{round_}/{rank}"

    def _status_key(self, rank: int) -> str:
        return f"{self._name.split('/')[0]}/status/{rank}"

    def _failure_key(self, rank: int) -> str:
        return f"{self._name.split('/')[0]}/failure/{rank}"
