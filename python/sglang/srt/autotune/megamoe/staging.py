"""The MegaMoE part of a start, told in its order.

check -> records -> tune what is missing -> open and warm -> commit -> freeze. Ranks that launch together take every
branch together: what one of them cannot do, none does, and each says whose fault it was. A journal notes what is being
searched or opened, so that what ended one start does not end the next: there the kernel's default serves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from sglang.srt.autotune.agreement import Agreement, AgreementError
from sglang.srt.autotune.failures import describe, is_peer_failure
from sglang.srt.autotune.journal import Journal, left_out_by_any
from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.context import TuningContext
from sglang.srt.autotune.megamoe.env_guard import scratch_knob_cache
from sglang.srt.autotune.megamoe.inputs import representative_inputs
from sglang.srt.autotune.megamoe.kernels.base import MegaInputs, MegaMoEError
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles, knobs_in_use
from sglang.srt.autotune.megamoe.records import NAMESPACE, Winner, key_of, read_winners, to_payload
from sglang.srt.autotune.megamoe.tuning import POLICIES, tune

logger = logging.getLogger(__name__)

#: Entries of the journal: the search, and the opening of a capacity.
SEARCH, OPENING = "megamoe search", "megamoe {}"


class NamespaceStore(Protocol):
    """The part of the record file that MegaMoE uses."""

    def namespace(self, name: str) -> Mapping[str, Any]:
        """What was loaded under a namespace, `{key: JSON value}`."""
        ...

    def commit_namespace(self, name: str, entries: Mapping[str, Any]) -> None:
        """Merge entries into the file."""
        ...


@dataclass
class MegaMoEReport:
    """Under `megamoe` in the stage's report. `winners` are by capacity; `tuned`, `cached`, `kept` count capacities."""

    kernel: str
    policy: str
    capacities: list[int]
    tuned: int = 0
    cached: int = 0
    kept: int = 0
    winners: dict[str, dict[str, Any]] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def stage_profiles(
    profiles: MegaMoEProfiles,
    capacities: Sequence[int],
    store: NamespaceStore,
    agreement: Agreement,
    *,
    dtype: torch.dtype,
    startup: MegaInputs | None = None,
    policy: str | None = None,
    free_bytes: Callable[[], int | None] = lambda: None,
    on_capacity: Callable[[int], None] = lambda capacity: None,
    journal: Journal | None = None,
) -> MegaMoEReport:
    """Tune, open, warm and freeze a workspace for each of `capacities`; collective over the ranks of `agreement`.

    Args:
        startup: a batch of this rank to shape the tuning inputs after; None or empty makes some up.
        policy: `native` or `sweep`; the kernel's own without it.
        on_capacity: called after each capacity is open.
        journal: where what is under way is noted, and what ended earlier starts is found.

    Raises:
        MegaMoEError: it is too late (a forward ran, a capture is on), or a rank failed; the same on every rank.
    """
    started = time.monotonic()
    report = MegaMoEReport(profiles.kernel.name, policy or profiles.kernel.policy, sorted(set(capacities)))
    assert report.policy in POLICIES, f"no MegaMoE tuning policy {report.policy!r}"
    staging = _Staging(
        profiles, store, agreement, report, dtype, startup, free_bytes, on_capacity, journal or Journal(None)
    )
    try:
        staging.run()
    except BaseException:
        if not profiles.is_frozen and not profiles.kernel.is_capturing():
            profiles.abandon()
        raise
    report.seconds = round(time.monotonic() - started, 3)
    return report


@dataclass
class _Staging:
    profiles: MegaMoEProfiles
    store: NamespaceStore
    agreement: Agreement
    report: MegaMoEReport
    dtype: torch.dtype
    startup: MegaInputs | None
    free_bytes: Callable[[], int | None]
    on_capacity: Callable[[int], None]
    journal: Journal
    #: Entries of any rank's journal that are left to the kernel's default, with the reason.
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        capacities, kernel = self.report.capacities, self.profiles.kernel
        self._none_may_fail("whether MegaMoE profiles may be staged", self._too_late())
        with scratch_knob_cache(kernel.required_environment()) as knob_cache:
            self.left_out = self._agree_on_left_out()
            known = self._known_winners(capacities)
            missing = [capacity for capacity in capacities if capacity not in known]
            if self.agreement.rank == self.agreement.ranks[0] and missing:
                sizes = " ".join(map(str, missing))
                logger.info(
                    "Tuning MegaMoE (%s, %s) at capacities %s", kernel.name, self.report.policy, sizes
                )
            for winner in known.values():
                if winner.note is not None:
                    self._keep(winner)
                if winner.entry is not None:
                    knob_file.restore(knob_cache, [winner.entry], winner.version)
                self._open(winner)
            context = TuningContext(self.profiles, self.agreement, self._inputs, knob_cache, self.free_bytes)
            began = time.monotonic()
            for winner in self._search(context, missing):
                self._keep(winner)
                self._open(winner)
            if missing:
                self.report.timings["tuning"] = round(time.monotonic() - began, 3)
            self.report.problems += context.problems
            self.report.timings |= context.timings
            self._commit_broadcast(known)
        self.profiles.freeze(tuned=True)
        self._log_winners()

    # before anything -------------------------------------------------------------------------------------

    def _too_late(self) -> str | None:
        profiles = self.profiles
        if profiles.has_run:
            return "MegaMoE profiles must be tuned before the first forward, and one has run"
        if profiles.kernel.is_capturing():
            return "MegaMoE profiles cannot be tuned inside a graph capture"
        if profiles.is_frozen:
            return "MegaMoE profiles are frozen already: a geometry is staged once per start"
        if not profiles.owners:
            return "no layer was given to the MegaMoE profiles"
        ranks, spanned = len(self.agreement.ranks), profiles.kernel.geometry.world_size
        if spanned != ranks:
            return (
                f"the EP group spans {spanned} of {ranks} ranks, and MegaMoE is tuned over all of them only"
            )
        return None

    # records ---------------------------------------------------------------------------------------------

    def _known_winners(self, capacities: Sequence[int]) -> dict[int, Winner]:
        """What need not be tuned: workspaces that this process has open keep their knobs, then rank 0's records."""
        kernel = self.profiles.kernel
        mine, rejected = read_winners(kernel, capacities, self.store.namespace(NAMESPACE))
        self.report.rejected = rejected
        for bad in rejected:
            logger.warning("A MegaMoE record is not used: %s: %s", bad["key"], bad["reason"])
        stored = {str(capacity): to_payload(kernel, winner) for capacity, winner in mine.items()}
        answers = self.agreement.gather("MegaMoE records", stored)
        named = {key_of(kernel, int(c)): payload for c, payload in answers[self.agreement.ranks[0]].items()}
        known, bad_now = read_winners(kernel, capacities, named)
        self._none_may_fail(
            "whether rank 0's MegaMoE records can be used", bad_now[0]["reason"] if bad_now else None
        )
        for capacity in capacities:
            knobs = knobs_in_use(kernel, capacity)
            if knobs is not None:
                known[capacity] = Winner(capacity, knobs, "kept")
                continue
            reason = self.left_out.get(OPENING.format(capacity))
            if reason is None and capacity not in known:
                reason = self.left_out.get(SEARCH)
            if reason is not None:
                known[capacity] = Winner(capacity, None, "default", note=reason)
        return dict(sorted(known.items()))

    def _agree_on_left_out(self) -> dict[str, str]:
        """What broke earlier starts of any rank."""
        question = "MegaMoE capacities that broke earlier starts"
        broken = left_out_by_any(self.agreement, self.journal, question)
        return {name: f"{left.reason}; {left.remedy}" for name, left in broken.items()}

    def _keep(self, winner: Winner) -> None:
        if winner.note is not None:
            self.report.problems.append(f"capacity {winner.capacity}: {winner.note}")
            logger.warning("MegaMoE capacity %d runs the kernel's default: %s", winner.capacity, winner.note)
        if winner.entry is not None:
            kernel = self.profiles.kernel
            entries = {key_of(kernel, winner.capacity): to_payload(kernel, winner)}
            self.store.commit_namespace(NAMESPACE, entries)

    def _commit_broadcast(self, known: Mapping[int, Winner]) -> None:
        """A rank whose own file lacked what rank 0 gave keeps it now."""
        kernel, loaded = self.profiles.kernel, self.store.namespace(NAMESPACE)
        entries = {
            key_of(kernel, winner.capacity): to_payload(kernel, winner)
            for winner in known.values()
            if winner.source == "cached"
        }
        fresh = {key: payload for key, payload in entries.items() if loaded.get(key) != payload}
        if fresh:
            self.store.commit_namespace(NAMESPACE, fresh)

    # tuning ----------------------------------------------------------------------------------------------

    def _search(self, context: TuningContext, missing: Sequence[int]) -> Iterator[Winner]:
        """The winners of the missing capacities as they are found, each with a note while it is looked for."""
        if not missing:
            return  # and what is noted of a search that broke a start must stay
        winners = tune(self.report.policy, context, missing)
        while True:
            with self._noted(SEARCH):
                winner = next(winners, None)
            if winner is None:
                return
            yield winner

    @contextlib.contextmanager
    def _noted(self, entry: str) -> Iterator[None]:
        """What happens inside is noted until it has gone well; what a peer broke is the peer's to note.

        Nothing is where the default serves in place of what broke a start: the note of that must stay.
        """
        if entry in self.left_out:
            yield
            return
        self.journal.begin(entry)
        try:
            yield
        except (AgreementError, MegaMoEError):
            raise
        except Exception as error:
            self._note_failure(entry, error)
            raise
        self.journal.done(entry)

    def _note_failure(self, entry: str, error: Exception) -> None:
        if entry not in self.left_out and (self.agreement.is_alone or not is_peer_failure(error)):
            self.journal.failed(entry, describe(error))

    # opening ---------------------------------------------------------------------------------------------

    def _open(self, winner: Winner) -> None:
        entry = OPENING.format(winner.capacity)
        with self._noted(entry):
            self._open_noted(winner, entry)

    def _open_noted(self, winner: Winner, entry: str) -> None:
        capacity, profiles = winner.capacity, self.profiles
        began = time.monotonic()
        self.agreement.announce(f"opening the MegaMoE workspace for {capacity} tokens")
        problem = None
        try:
            if winner.source == "default" and (knobs := profiles.kernel.default_knobs(capacity)):
                # Or FlashInfer's lookup would take the winner of a neighbouring capacity.
                profiles.kernel.record(knobs, capacity, None, "default")
            profiles.create(capacity, winner.knobs)
        except Exception as error:
            problem = describe(error)
            self._note_failure(entry, error)
        self._none_may_fail(f"whether the MegaMoE workspace for {capacity} tokens is open", problem)
        for remark in profiles.warm(capacity, self._inputs(capacity)):
            self.report.problems.append(f"capacity {capacity}: {remark}")
        self._count(winner, time.monotonic() - began)
        self.on_capacity(capacity)

    def _count(self, winner: Winner, seconds: float) -> None:
        report = self.report
        if winner.source in ("tuned", "cached", "kept"):
            setattr(report, winner.source, getattr(report, winner.source) + 1)
        report.winners[str(winner.capacity)] = {
            "source": winner.source,
            "knobs": winner.knobs,
            "time_us": winner.time_us,
            "default_us": winner.default_us,
            "open_s": round(seconds, 3),
        }

    def _log_winners(self) -> None:
        if self.agreement.rank != self.agreement.ranks[0]:
            return
        lines = []
        for capacity in self.report.capacities:
            winner = self.report.winners[str(capacity)]
            time_us, default_us = winner["time_us"], winner["default_us"]
            measured = "" if time_us is None else f" {time_us:.1f} us"
            against = "" if default_us is None else f" (default {default_us:.1f})"
            lines.append(f"{capacity}: {winner['source']}{measured}{against}")
        logger.info("MegaMoE workspaces by tokens per rank: %s", "; ".join(lines))

    def _inputs(self, num_tokens: int) -> MegaInputs:
        kernel = self.profiles.kernel
        return representative_inputs(self.startup, num_tokens, kernel.geometry, self.dtype, kernel.device)

    def _none_may_fail(self, question: str, problem: str | None) -> None:
        """Raise on every rank when one of them has a problem."""
        for rank, answer in self.agreement.gather(question, problem).items():
            if answer is not None:
                raise MegaMoEError(answer if self.agreement.is_alone else f"rank {rank}: {answer}")
