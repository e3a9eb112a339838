"""The user's record file: one writer at a time where locks work, and nothing lost where they do not.

Every commit merges into what is on disk at that moment, because another engine may have written since. It
then reads the file back and starts over when its own records are not there. Whatever this process has
committed is asserted again by each later commit, so a record that an unlocked writer overwrote comes back.

A start never fails for its records: a file that cannot be used is renamed aside with the reason in its name,
and a place that cannot be written turns the store into memory, with one warning.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from sglang.srt.autotune.records.document import (
    Document,
    RejectedFile,
    RejectedRecord,
    plain_namespaces,
    printable,
    read_document,
    to_bytes,
    unreadable_reason,
)
from sglang.srt.autotune.records.environment import EnvironmentComparison, compare_environment
from sglang.srt.autotune.records.files import (
    discard,
    file_lock,
    free_name,
    prepare_file,
    publish_file,
    remove_stale_temporaries,
    signature,
)
from sglang.srt.autotune.records.record import Record, RecordSet, StepEntry, question_of

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
_PRODUCT_SOURCES = ("seed", "given")

Edit: TypeAlias = Callable[[RecordSet], RecordSet]


@dataclass(frozen=True)
class LoadedRecords(RecordSet):
    """What one file gave. ``environment`` says why a readable file was refused as a whole, if it was."""

    path: str = ""
    metadata: Mapping[str, Any] | None = None
    rejected: tuple[RejectedRecord, ...] = ()
    rejected_file: RejectedFile | None = None
    environment: EnvironmentComparison = EnvironmentComparison()
    exists: bool = False

    @property
    def problems(self) -> list[str]:
        """Every reason, in words, why something in the file is not used."""
        problems = []
        if self.rejected_file is not None:
            problems.append(f"{self.path} {self.rejected_file.reason}")
        if not self.environment.matches:
            problems.append(f"{self.path} was measured in another environment ({self.environment.words()})")
        return problems + [f"{self.path}: {bad.key}: {bad.reason}" for bad in self.rejected]


def load_file(
    path: str | os.PathLike[str], *, source: str | None, environment: Mapping[str, str] | None
) -> LoadedRecords:
    """Read a record file that is not ours to write. Never raises for the file's content.

    ``source`` is set in the records (``seed``, ``user`` or ``given``). With ``environment``,
    FlashInfer's stamp of this process, a file of another environment gives no records but says what differs;
    None skips that.
    """
    name = os.fspath(path)
    found = read_document(name)
    if found is None:
        return LoadedRecords(path=name)
    if isinstance(found, RejectedFile):
        return LoadedRecords(path=name, rejected_file=found, exists=True)
    comparison = EnvironmentComparison()
    if environment is not None:
        comparison = compare_environment(found.metadata, environment)
    records: Mapping[str, Record] = found.records
    if source is not None:
        records = {key: record.with_source(source) for key, record in records.items()}
    return LoadedRecords(
        records=records if comparison.matches else {},
        namespaces=found.namespaces if comparison.matches else {},
        steps=found.steps if comparison.matches else {},
        path=name,
        metadata=found.metadata,
        rejected=found.rejected,
        environment=comparison,
        exists=True,
    )


class RecordStore:
    """The records of one rank of one configuration, at ``path``.

    ``environment`` is FlashInfer's seven-field stamp of this process; it is needed to write and, where given,
    checked on reading. ``fallback`` is read where ``path`` does not exist yet (a file of the same
    environment, such as the one of a GPU that this pod has moved away from); it is never written. ``distrust`` is why
    the place must not be used, if so: then records are kept in memory only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        environment: Mapping[str, str] | None = None,
        *,
        fallback: str | os.PathLike[str] | None = None,
        lock_timeout_s: float = 10.0,
        locking: bool = True,
        distrust: str | None = None,
    ):
        self.path = Path(path if distrust else os.path.realpath(path))
        self.distrust = distrust
        self.environment = dict(environment) if environment is not None else None
        self.fallback = Path(fallback) if fallback is not None else None
        self.writable = True
        self.reason: str | None = None
        self._lock_timeout_s = lock_timeout_s
        self._locking = locking
        self._warned = False
        self._swept = False
        self._mine = RecordSet()
        self._passed_over: frozenset[str] = frozenset()

    def pass_over(self, keys: Iterable[str]) -> None:
        """These pinned records cannot be used here: what is committed instead is kept beside them.

        They stand again where they can be used, since of several records of one question a pinned one counts.
        """
        self._passed_over |= frozenset(keys)

    def load(self) -> LoadedRecords:
        """What can be used now: the file (or the fallback), and what this process holds in memory."""
        if self.distrust:
            problem = RejectedFile(str(self.path), f"is not read: {self.distrust}", "distrusted")
            return LoadedRecords(
                self._mine.records,
                self._mine.namespaces,
                self._mine.steps,
                path=str(self.path),
                rejected_file=problem,
            )
        loaded = load_file(self.path, source=None, environment=self.environment)
        if not loaded.exists and self.fallback is not None:
            loaded = load_file(self.fallback, source=None, environment=self.environment)
        content = _overlay(loaded, self._mine)
        return replace(loaded, records=content.records, namespaces=content.namespaces, steps=content.steps)

    def commit(
        self,
        records: Iterable[Record] = (),
        *,
        namespaces: Mapping[str, Mapping[str, Any]] | None = None,
        steps: Iterable[StepEntry] = (),
    ) -> bool:
        """Merge these into the file; returns whether the file changed.

        Seeded and given records are left out: they come again at the next start from where they came. A
        record that is pinned on disk yields only to a pinned one. Never raises for what the disk does: the
        store then keeps everything in memory, says so once, and tries again with the next commit.
        ``ValueError`` when ``namespaces`` is not plain JSON.
        """
        now = utc_now()
        fresh: dict[str, Record] = {}
        for record in records:
            if record.source in _PRODUCT_SOURCES:
                continue
            if reason := unreadable_reason(record):
                logger.warning(
                    "FlashInfer autotune: record %s is not stored: %s", printable(record.key), reason
                )
                continue
            is_new = record.source == "tuned" and record.tuned_at is None
            fresh[record.key] = replace(record, tuned_at=now) if is_new else record
        update = RecordSet(
            records=fresh,
            namespaces=plain_namespaces(namespaces or {}),
            steps={step.step: replace(step, tuned_at=step.tuned_at or now) for step in steps},
        )
        if not (update.records or update.namespaces or update.steps):
            return self.verify()
        self._mine = _overlay(self._mine, update)

        def add(disk: RecordSet) -> RecordSet:
            return _overlay(self._restore_mine(disk), update, passed_over=self._passed_over)

        return self._write(add, settle=self._restore_mine)

    def verify(self) -> bool:
        """Put back what this process committed and another writer lost; returns whether the file changed."""
        if not (self._mine.records or self._mine.namespaces or self._mine.steps):
            return False
        return self._write(self._restore_mine, settle=self._restore_mine)

    def remove(self, keys: Iterable[str]) -> bool:
        """Remove records; returns whether the file changed. An engine that is running may put its own back."""
        gone = frozenset(keys)
        self._mine = _without(self._mine, gone)
        return self._write(lambda disk: _without(disk, gone))

    def pin(self, keys: Iterable[str], pinned: bool = True) -> bool:
        """Mark records so that tuning does not replace them, or lift that; returns whether the file changed."""
        chosen = frozenset(keys)

        def mark(disk: RecordSet) -> RecordSet:
            records = {
                key: replace(record, pinned=pinned) if key in chosen else record
                for key, record in disk.records.items()
            }
            return RecordSet(records, disk.namespaces, disk.steps)

        return self._write(mark)

    def _restore_mine(self, disk: RecordSet) -> RecordSet:
        return _overlay(disk, self._mine, only_missing=True, passed_over=self._passed_over)

    def _write(self, edit: Edit, settle: Edit | None = None) -> bool:
        """Apply ``edit`` to what is on disk, then until it changes nothing ``settle`` (default: ``edit`` again)."""
        assert self.environment is not None, "a store without an environment stamp is for reading only"
        try:
            changed = self._try_to_write(edit, settle or edit)
        except OSError as error:
            self.writable, self.reason = False, f"{error.strerror or error} ({self.path})"
            if not self._warned:
                self._warned = True
                logger.warning(
                    "FlashInfer autotune: records cannot be written: %s. They are kept in memory for this run only; "
                    "set SGLANG_CACHE_DIR to a writable directory to keep them.",
                    self.reason,
                )
            return False
        self.writable, self.reason = True, None
        return changed

    def _try_to_write(self, edit: Edit, settle: Edit) -> bool:
        if self.distrust:
            raise PermissionError(errno.EPERM, self.distrust)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        changed = False
        for attempt in range(MAX_ATTEMPTS):
            with self._lock() as locked:
                outcome = self._replace_once(edit)
            if outcome != "raced":
                changed = changed or outcome == "written"
                edit = settle
                if changed and not locked:
                    time.sleep(random.uniform(0.02, 0.08))  # let a writer that saw the old file finish
                if self._is_settled(settle):
                    return changed
            time.sleep(random.uniform(0.5, 1.5) * 0.01 * 2**attempt)
        raise OSError("another writer keeps replacing the file")

    def _lock(self) -> contextlib.AbstractContextManager[bool]:
        if not self._locking:
            return contextlib.nullcontext(False)
        return file_lock(self.path.with_name(self.path.name + ".lock"), self._lock_timeout_s)

    def _replace_once(self, edit: Edit) -> str:
        """One read, merge and rename: ``same``, ``written``, or ``raced`` when the file changed meanwhile."""
        if not self._swept:
            self._swept = True
            remove_stale_temporaries(self.path)
        before = signature(self.path)
        disk, moved_aside = self._read_base()
        merged = edit(disk)
        if not moved_aside and merged == _content(disk):
            return "same"
        expected = None if moved_aside else before
        temporary = prepare_file(
            self.path, to_bytes(merged, {**(self.environment or {}), **(disk.metadata or {})})
        )
        try:
            if signature(self.path) != expected:
                discard(temporary)
                return "raced"
            if disk.rejected and expected is not None:
                shutil.copyfile(self.path, free_name(self.path, "bad-entries"))
            publish_file(temporary, self.path)
        except BaseException:
            discard(temporary)
            raise
        return "written"

    def _is_settled(self, settle: Edit) -> bool:
        found = read_document(self.path) or self._read_fallback()
        return isinstance(found, Document) and settle(found) == _content(found)

    def _read_base(self) -> tuple[Document, bool]:
        """What may be merged into, and whether the file at ``path`` had to be renamed aside to get there."""
        found = read_document(self.path)
        if found is None:
            return self._read_fallback(), False
        problem = self._problem_of(found)
        if problem is None:
            assert isinstance(found, Document)
            return found, False
        if problem.slug == "unreadable":
            raise OSError(problem.reason)
        aside = free_name(self.path, f"bad-{problem.slug}")
        os.rename(self.path, aside)
        moved = read_document(aside)
        if isinstance(moved, Document) and self._problem_of(moved) is None:
            return moved, True  # another writer had just put a good file there
        logger.warning(
            "FlashInfer autotune: %s %s; it was set aside as %s", self.path, problem.reason, aside.name
        )
        return Document(), True

    def _read_fallback(self) -> Document:
        found = read_document(self.fallback) if self.fallback is not None else None
        usable = isinstance(found, Document) and self._problem_of(found) is None
        return found if usable and isinstance(found, Document) else Document()

    def _problem_of(self, found: Document | RejectedFile | None) -> RejectedFile | None:
        if not isinstance(found, Document):
            return found
        comparison = compare_environment(found.metadata, self.environment or {})
        if comparison.matches:
            return None
        slug = "environment" if comparison.hard else "environment-unknown"
        return RejectedFile(
            str(self.path), f"was measured in another environment ({comparison.words()})", slug
        )


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _content(document: Document) -> RecordSet:
    return RecordSet(document.records, document.namespaces, document.steps)


def _overlay(
    base: RecordSet,
    update: RecordSet,
    *,
    only_missing: bool = False,
    passed_over: frozenset[str] = frozenset(),
) -> RecordSet:
    """``base`` with ``update`` on top; a pinned record of ``base`` yields only to a pinned one.

    A record of ``update`` takes the place of whatever answers its question, another runner's record included. Pinned
    records of ``passed_over`` neither stand in its way nor go, unless their key is its own.
    """
    records = dict(base.records)
    questions: dict[str, list[str]] = {}
    for key, record in records.items():
        if not (record.pinned and key in passed_over):
            questions.setdefault(question_of(key), []).append(key)
    for key, record in update.records.items():
        rivals = questions.get(question_of(key), [])
        present = [records[rival] for rival in rivals]
        if not present or (not only_missing and all(_supersedes(record, rival) for rival in present)):
            for rival in rivals:
                del records[rival]
            records[key] = record
            questions[question_of(key)] = [key]
    namespaces = {name: dict(entries) for name, entries in base.namespaces.items()}
    for name, entries in update.namespaces.items():
        mine = namespaces.setdefault(name, {})
        namespaces[name] = {**entries, **mine} if only_missing else {**mine, **entries}
    steps = {**update.steps, **base.steps} if only_missing else {**base.steps, **update.steps}
    return RecordSet(records, namespaces, steps)


def _supersedes(record: Record, present: Record) -> bool:
    if present.pinned and not record.pinned:
        return False
    # The same winner, come back from a load that no longer knows how it was found: keep what is known.
    loaded_again = record.source == "user" and record.same_choice(present) and record.policy == present.policy
    return not loaded_again or record.pinned != present.pinned


def _without(content: RecordSet, keys: frozenset[str]) -> RecordSet:
    records = {key: record for key, record in content.records.items() if key not in keys}
    return RecordSet(records, content.namespaces, content.steps)
