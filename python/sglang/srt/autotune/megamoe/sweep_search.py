"""Which candidate is tried next, and when a capacity is decided. Pure: it neither starts nor times anything.

Compiling a candidate takes seconds and timing it milliseconds, so the search saves compilations:

1. a few *anchor* capacities of the ladder screen every candidate that differs in what matters (tile, cluster,
   schedule), then the minor variants of the best;
2. the capacities between them try their own default and what won at the anchors beside them;
3. at each capacity the best are timed again and halved, longer each time, until one is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.autotune.megamoe.kernels.base import Knobs, MegaMoEKernel
from sglang.srt.autotune.megamoe.sweep_worker import Job, Outcome

SCREEN_REPEATS = 5
#: After screening: how many go on at most, and with how many more repeats, round by round.
FINAL_ROUNDS = ((4, 10), (2, 20))
#: Only candidates within this factor of the best go on.
IN_REACH = 1.10
#: What a capacity beside an anchor takes over from it, and how many of an anchor's best get their variants tried.
NUM_INHERITED = NUM_VARIED = 3
#: Several ranks compile what they try one after the other, seconds each. The first three of a sweep lie within 1-2%
#: (measured on an H200), and where the default is as near, a third and a fourth candidate have nothing to win.
NUM_CONTENDERS, LITTLE_GAIN = 3, 1.03
#: Anchors of a long ladder, as shares of its length.
_ANCHOR_SHARES = (0.25, 0.65, 1.0)


@dataclass
class Candidate:
    """One choice at one capacity and what is known of it."""

    number: int
    capacity: int
    knobs: Knobs
    worker: int | None = None
    time_us: float = math.inf
    error: float = math.inf
    problem: str | None = None
    state: str = "waiting"  # waiting, running, timed, failed
    rounds: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "running")


@dataclass(frozen=True)
class Choice:
    """The outcome at one capacity; `knobs` is None where no candidate gave a right result."""

    capacity: int
    knobs: Knobs | None
    time_us: float | None
    default_us: float | None
    error: float | None
    num_candidates: int
    problems: tuple[str, ...] = ()


def pick_anchors(capacities: Sequence[int]) -> tuple[int, ...]:
    """The capacities that screen everything: all of a short ladder, three of a longer one, its top among them."""
    if len(capacities) <= 3:
        return tuple(capacities)
    last = len(capacities) - 1
    return tuple(sorted({capacities[round(share * last)] for share in _ANCHOR_SHARES}))


def knobs_key(knobs: Knobs) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in knobs.items()))


@dataclass
class _Capacity:
    value: int
    is_anchor: bool
    candidates: list[Candidate] = field(default_factory=list)
    is_filled: bool = False  # all candidates to screen are known
    is_varied: bool = False
    round: int = 0
    finalists: list[Candidate] = field(default_factory=list)
    decided: bool = False


class LadderSearch:
    """The search over a whole ladder; workers are numbers here.

    Args:
        exhaustive: screen every candidate of every capacity, as FlashInfer's own sweep does.
    """

    def __init__(self, kernel: MegaMoEKernel, capacities: Sequence[int], *, exhaustive: bool = False) -> None:
        self._kernel, self._exhaustive = kernel, exhaustive
        anchors = tuple(capacities) if exhaustive else pick_anchors(capacities)
        self._ladder = {value: _Capacity(value, value in anchors) for value in capacities}
        self._by_number: dict[int, Candidate] = {}
        self._choices: list[Choice] = []
        for capacity in self._ladder.values():
            self._add(capacity, [kernel.default_knobs(capacity.value)])
            if capacity.is_anchor:
                first = kernel.candidates if exhaustive else kernel.screened
                self._add(capacity, first(capacity.value))
                capacity.is_filled, capacity.is_varied = True, exhaustive

    @property
    def is_done(self) -> bool:
        return all(capacity.decided for capacity in self._ladder.values())

    @property
    def num_candidates(self) -> int:
        """Candidates that are known so far."""
        return len(self._by_number)

    def take(self, worker: int) -> Job | None:
        """The next job for this worker, or None when it must wait for others."""
        for capacity in self._ladder.values():
            for candidate in capacity.finalists:
                if (
                    candidate.state == "timed"
                    and candidate.worker == worker
                    and candidate.rounds < capacity.round
                ):
                    candidate.state = "running"
                    return Job("again", candidate.number, repeats=FINAL_ROUNDS[capacity.round - 1][1])
        waiting = [
            candidate
            for capacity in sorted(self._ladder.values(), key=lambda c: not c.is_anchor)
            for candidate in capacity.candidates
            if candidate.state == "waiting"
        ]
        if not waiting:
            return None
        candidate = waiting[0]
        candidate.state, candidate.worker = "running", worker
        return Job("screen", candidate.number, candidate.capacity, candidate.knobs, SCREEN_REPEATS)

    def report(self, outcome: Outcome) -> None:
        """Take in what a job gave and move its capacity on."""
        candidate = self._by_number[outcome.number]
        was_screened = candidate.time_us < math.inf
        if outcome.problem is not None or outcome.time_us is None:
            candidate.state, candidate.problem, candidate.time_us = "failed", outcome.problem, math.inf
        else:
            candidate.state, candidate.time_us = "timed", outcome.time_us
            if outcome.error is not None:
                candidate.error = outcome.error
                if candidate.error > self._kernel.tolerance:
                    candidate.state = "failed"
                    candidate.problem = f"its result is off by {candidate.error:.2e}"
        if was_screened:
            candidate.rounds += 1
        self._advance()

    def lost(self, worker: int) -> None:
        """This worker is gone: what it was running has failed, what it had timed keeps its time."""
        for candidate in self._by_number.values():
            if candidate.worker == worker:
                if candidate.state == "running" and candidate.time_us == math.inf:
                    candidate.state, candidate.problem = "failed", "its worker process died"
                elif candidate.state in ("running", "timed"):
                    candidate.state, candidate.rounds = "timed", len(FINAL_ROUNDS)
        self._advance()

    def give_up(self, reason: str) -> None:
        """Decide everything with what is known now."""
        for capacity in self._ladder.values():
            for candidate in capacity.candidates:
                if candidate.is_open and candidate.time_us == math.inf:
                    candidate.state, candidate.problem = "failed", reason
            if not capacity.decided:
                self._decide(capacity)

    def take_choices(self) -> list[Choice]:
        """Capacities decided since the last call."""
        choices, self._choices = self._choices, []
        return choices

    def contenders(self, capacity: int) -> list[Knobs]:
        """What all ranks should try after a sweep of one: the fastest, alone where the default is nearly as fast."""
        default, *_ = candidates = self._ladder[capacity].candidates
        best = _best(candidates)[:NUM_CONTENDERS]
        if best and default.time_us <= LITTLE_GAIN * best[0].time_us:
            best = best[:1]
        return [candidate.knobs for candidate in best]

    def held_by(self, worker: int, capacity: int) -> list[int]:
        """Numbers of the candidates of a decided capacity that a worker still keeps."""
        return [
            candidate.number
            for candidate in self._ladder[capacity].candidates
            if candidate.worker == worker and candidate.time_us < math.inf
        ]

    # moving on -------------------------------------------------------------------------------------------

    def _add(self, capacity: _Capacity, choices: Sequence[Knobs]) -> None:
        known = {knobs_key(candidate.knobs) for candidate in capacity.candidates}
        for knobs in choices:
            if knobs_key(knobs) not in known:
                known.add(knobs_key(knobs))
                candidate = Candidate(len(self._by_number), capacity.value, knobs)
                capacity.candidates.append(candidate)
                self._by_number[candidate.number] = candidate

    def _advance(self) -> None:
        for capacity in self._ladder.values():
            if capacity.decided:
                continue
            if not capacity.is_filled:
                self._inherit(capacity)
            if any(candidate.is_open for candidate in capacity.candidates) or not capacity.is_filled:
                continue
            if not capacity.is_varied:
                capacity.is_varied = True
                if capacity.is_anchor:
                    for candidate in _best(capacity.candidates)[:NUM_VARIED]:
                        self._add(capacity, self._kernel.variants(candidate.knobs))
                    if any(candidate.is_open for candidate in capacity.candidates):
                        continue
            self._halve(capacity)

    def _inherit(self, capacity: _Capacity) -> None:
        """Once the anchors beside it are screened, a capacity knows what it has to try."""
        beside = self._anchors_beside(capacity.value)
        if all(anchor.is_varied and not any(c.is_open for c in anchor.candidates) for anchor in beside):
            for anchor in beside:
                self._add(
                    capacity, [candidate.knobs for candidate in _best(anchor.candidates)[:NUM_INHERITED]]
                )
            capacity.is_filled = True

    def _anchors_beside(self, value: int) -> list[_Capacity]:
        anchors = [capacity for capacity in self._ladder.values() if capacity.is_anchor]
        below = [anchor for anchor in anchors if anchor.value < value][-1:]
        above = [anchor for anchor in anchors if anchor.value > value][:1]
        return below + above

    def _halve(self, capacity: _Capacity) -> None:
        """Start the next round once the last one is complete; decide after the final one."""
        while True:
            if any(candidate.rounds < capacity.round for candidate in capacity.finalists):
                return
            pool = capacity.finalists or capacity.candidates
            ranked = _best(pool)
            if capacity.round == len(FINAL_ROUNDS) or len(ranked) <= 1:
                self._decide(capacity)
                return
            most, _ = FINAL_ROUNDS[capacity.round]
            capacity.finalists = [c for c in ranked[:most] if c.time_us <= IN_REACH * ranked[0].time_us]
            capacity.round += 1

    def _decide(self, capacity: _Capacity) -> None:
        capacity.decided = True
        ranked = _best(capacity.finalists) or _best(capacity.candidates)
        default = capacity.candidates[0]
        winner = ranked[0] if ranked else None
        self._choices.append(
            Choice(
                capacity.value,
                winner.knobs if winner else None,
                winner.time_us if winner else None,
                default.time_us if default.time_us < math.inf else None,
                winner.error if winner else None,
                len(capacity.candidates),
                tuple(c.problem for c in capacity.candidates if c.problem is not None),
            )
        )


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with a right result, fastest first; of equal times the earlier one, so the default before others."""
    right = [candidate for candidate in candidates if candidate.state in ("timed", "running")]
    return sorted((c for c in right if c.time_us < math.inf), key=lambda c: (c.time_us, c.number))
