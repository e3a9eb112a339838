"""Records in and out of the tuner: what a start loads before it tunes, and what it keeps of what it tunes.

Seeds, the user's file and what was given on purpose are merged by precedence and loaded once. After each step
its new winners are committed to the user's file by the store; seeds and given records never end there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.blocklist import Blocklist
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Phase, Step, step_name
from sglang.srt.autotune.records.cache_key import RankPlace, safe_part
from sglang.srt.autotune.records.document import printable, records_from_entries
from sglang.srt.autotune.records.merging import MergedRecords, materialise, merge_sources
from sglang.srt.autotune.records.placement import cache_path_of, sm_name
from sglang.srt.autotune.records.record import (
    Record,
    RecordSet,
    StepEntry,
    bucket_in,
    by_question,
    describe_choice,
    parse_key,
    parsed_key,
    question_of,
    with_runner,
)
from sglang.srt.autotune.records.seeds import SeedCatalogue
from sglang.srt.autotune.records.store import LoadedRecords, RecordStore, load_file
from sglang.srt.autotune.records.trust import distrust, doubt
from sglang.srt.autotune.report import StageReport, StepReport, rejections
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.autotune.usable import Unusable, sort_out

logger = logging.getLogger(__name__)

#: Rejected entries of one file, superseded records or unused ops that are named one by one.
_MAX_PROBLEMS = 20
AnyRecordSet = TypeVar("AnyRecordSet", bound=RecordSet)
_SOURCE_WORDS = {"seed": "seeded", "user": "user", "given": "given", "tuned": "tuned"}


class CachePhase:
    """The records of one rank for one start. Errors of files are reported, never raised."""

    def __init__(self, host: Host, settings: StageSettings, report: StageReport) -> None:
        self._host, self._settings, self._report = host, settings, report
        self._environment = flashinfer_api.environment()
        report.environment = self._environment
        if words := doubt(settings.cache_root):
            report.warnings.append(words)
            logger.warning("FlashInfer autotune: %s", words)
        self._store = self._open_store()
        self._merged = MergedRecords()
        self._committed: set[str] = set()
        report.cache_path = str(self._store.path)

    @property
    def journal_path(self) -> Path | None:
        if self._store.distrust:
            return None
        return self._store.path.with_name(f"{self._store.path.stem}.journal")

    @property
    def merged_count(self) -> int:
        """Records that were loaded."""
        return len(self._merged.records)

    def load(self) -> None:
        """Seeds first, then the user's file, then given records; nothing at all when reuse is off."""
        if not self._settings.use_cache:
            logger.info("FlashInfer autotune reuses no records (SGLANG_FLASHINFER_AUTOTUNE_CACHE=0)")
            return
        applies = {
            **self._host.identity.applies,
            "sm": self._sm,
            "flashinfer_version": self._environment["flashinfer_version"],
        }
        folder = self._settings.seed_folder
        catalogue = SeedCatalogue() if folder is None else SeedCatalogue(folder)
        seeds = catalogue.select(applies, self._environment)
        self._report.seeds = [{"name": seed.name, "used": True, "reasons": []} for seed in seeds.chosen]
        self._report.seeds += [
            {"name": name, "used": False, "reasons": list(reasons)} for name, reasons in seeds.refused
        ]
        user = self._store.load()
        given = [
            load_file(path, source="given", environment=self._environment)
            for path in self._settings.given_records
        ]
        self._report_problems("user", user)
        for loaded in given:
            self._report_problems("given", loaded)
        self._merged = merge_sources(
            [self._usable_of("seed", seed) for seed in seeds.chosen],
            self._usable_of("user", user),
            [self._usable_of("given", loaded) for loaded in given],
        )
        records_superseded = [item.words() for item in self._merged.overridden]
        self._report.records.superseded += _first_few(records_superseded, "more records yielded to others")
        self._count_loaded()
        self._load_into_tuner(self._merged)

    def _count_loaded(self) -> None:
        """Count by source what kernels here may ask for; the rest, as of an older version's ops, is told in words."""
        counts, records, unused = self._merged.count_by_source(), self._report.records, []
        for (source, op), count in self._merged.count_of_other_ops(self._host.op_names).items():
            counts[source] -= count
            held = f"{count} {_SOURCE_WORDS[source]} record{'s' * (count != 1)}"
            unused.append(f"{held} of {printable(op, 80)}, which no kernel here asks for")
        records.seeded, records.user, records.given = counts["seed"], counts["user"], counts["given"]
        records.unused += _first_few(unused, "more ops that no kernel here asks for")

    def _usable_of(self, source: str, layer: AnyRecordSet) -> AnyRecordSet:
        """Without records that the ops could not serve with here: no lookup would ask for them, or accept them."""
        kept, unusable = sort_out(layer.records, self._host.tuned_ops)
        for item in unusable:
            reason = item.reason
            if isinstance(layer, LoadedRecords) and source == "given":
                reason = f"{reason}: {layer.path}"
            if source == "user":
                reason += self._make_room(item, layer, kept)
            self._reject(source, reason)
        return replace(layer, records=kept)

    def _make_room(self, unusable: Unusable, layer: RecordSet, kept: Mapping[str, Record]) -> str:
        """Have the user's file take what serves instead of these; words on those that stay there all the same."""
        pinned = [key for key in unusable.keys if layer.records[key].pinned]
        answered = set(map(question_of, kept))
        if idle := [key for key in unusable.keys if key not in pinned and question_of(key) in answered]:
            self._store.remove(idle)  # a pin had kept them beside what is tuned, and was lifted
        if not pinned:
            return ""
        self._store.pass_over(pinned)
        buckets = " ".join(str(bucket_in(key)) for key in sorted(pinned, key=lambda key: bucket_in(key) or 0))
        return (
            f"; {len(pinned)} of them pinned, which stay in the file beside what is tuned. To let them go: sglang "
            f"autotune pin {self._store.path} --op {unusable.op_name} --bucket {buckets} --off"
        )

    def _reject(self, source: str, reason: str) -> None:
        self._report.records.rejected.append(
            {"source": source, "path": str(self._store.path), "kind": "entry", "reason": reason}
        )
        logger.warning("FlashInfer autotune does not use records: %s", reason)

    def given_keys(self) -> list[str]:
        """Keys of the records that were given on purpose."""
        return sorted(key for key, record in self._merged.records.items() if record.source == "given")

    def reload_without(self, buckets: Collection[int], keep: Collection[str] = ()) -> None:
        """Drop the records of buckets that some coupled rank must tune, except ``keep``, which every rank holds.

        What was tuned at other buckets by then stays.
        """
        tuned = self._merged.new_in(flashinfer_api.stored_entries())
        self._merged = self._merged.without_buckets(buckets, keep)
        self._put_in_force([record for record in tuned if bucket_in(record.key) not in buckets])

    def _put_in_force(self, tuned: Iterable[Record]) -> None:
        """Have the tuner hold what was loaded with ``tuned`` on top, one record for each question.

        It can only forget all at once, and a record of another runner that stayed would be found before a later one.
        """
        answers = by_question(self._merged.records.values())
        answers |= by_question(tuned)
        flashinfer_api.forget_everything()
        records = {record.key: record for record in answers.values()}
        self._load_into_tuner(RecordSet(records, self._merged.namespaces))

    def reject(self, step: Step, reason: str) -> bool:
        """Drop the records that a step's forward cannot run with; False when there are none to blame."""
        blamed = [record for key, record in self._merged.records.items() if bucket_in(key) == step.bucket]
        if not blamed:
            return False
        for source in sorted({record.source for record in blamed}):
            self._reject(source, f"the {source} records of step {step.name} cannot be run: {reason}")
        self.reload_without({step.bucket})
        return True

    def forget(self, step: Step) -> None:
        """Drop what tuning this step left in the tuner, which was neither judged nor written."""
        flashinfer_api.drop_winners(_entries_at(step.bucket).keys() - self._merged.records.keys())

    def commit(self, step: Step, report: StepReport) -> int:
        """Write the winners that the step added, and their times beside them; returns how many were added.

        With the times a warm start need not measure again. Nothing is written of a step before it was judged.
        """
        entries = flashinfer_api.stored_entries()
        fresh = [r for r in self._merged.new_in(entries) if r.key not in self._committed]
        self._committed |= {record.key for record in fresh}
        keys = tuple(sorted(key for key in entries if bucket_in(key) == step.bucket))
        entry = StepEntry(step.name, keys, default_ms=report.default_ms, tuned_ms=report.tuned_ms)
        self._store.commit(fresh, steps=[entry])
        self._report.records.tuned += len(fresh)
        return len(fresh)

    def namespace(self, name: str) -> Mapping[str, Any]:
        """What was loaded under a namespace of kernels that tune themselves, `{key: JSON value}`."""
        return self._merged.namespaces.get(name, {})

    def commit_namespace(self, name: str, entries: Mapping[str, Any]) -> None:
        """Merge entries of a namespace into the user's file; what is no plain JSON (NaN) is told and not stored."""
        try:
            self._store.commit(namespaces={name: entries})
        except ValueError as error:
            self._report.warnings.append(f"a winner of {name} is not stored: {error}")
            logger.warning("FlashInfer autotune: a winner of %s is not stored: %s", name, error)

    def back_to_default(self, step: Step, op_names: Collection[str]) -> None:
        """Serve a step's bucket with the default of these ops, now and at later starts.

        That is the first runner of an op of several, whichever runner had won. It is stored as the choice, so that
        later lookups hit it and do not count as fallbacks.
        """
        first = self._first_runners()
        choices = {}
        for key, entry in _entries_at(step.bucket, op_names).items():
            runner = first.get(parse_key(key).custom_op, entry[0])
            choices[with_runner(key, runner)] = [runner, -1, *entry[2:]]
        self.adopt(choices)

    def _first_runners(self) -> dict[str, str]:
        """By in-tree op, whose default it serves with."""
        return {op.name: type(op.runners[0]).__name__ for op in self._host.tuned_ops}

    def block(self, step: Step, op_names: Collection[str], reason: str) -> None:
        """Note this step's tactics of these ops as wrong, for FlashInfer's tuner at the next start."""
        first = self._first_runners()
        wrong = []
        for key, entry in _entries_at(step.bucket, op_names).items():
            op_name = parse_key(key).custom_op
            if entry[1] != -1 or entry[0] != first.get(op_name, entry[0]):
                wrong.append((op_name, entry[0], entry[1]))
        if wrong:
            blocklist_of(self._settings.cache_root, self._sm).add(wrong, reason, self._environment)

    def adopt(self, choices: dict[str, list[Any]]) -> None:
        """Take these choices (FlashInfer entries by key): in the tuner now, in the file for the next start."""
        adopted = [record.with_source("tuned") for record in records_from_entries(choices).values()]
        self._store.commit(adopted)
        tuned = by_question(self._merged.new_in(flashinfer_api.stored_entries()))
        self._put_in_force([*(tuned | by_question(adopted)).values()])

    def finish(self) -> None:
        """Say so when the records could not be written."""
        if not self._store.writable:
            self._report.cache_path = None
            self._report.warnings.append(f"records are kept in memory only: {self._store.reason}")

    def describe(self, reports: Mapping[Step, StepReport], covered: Collection[Step]) -> None:
        """What serves each step, and for those that records covered where these came from and what was measured."""
        by_bucket: dict[int | None, dict[str, list[Any]]] = {}
        for key, entry in flashinfer_api.stored_entries().items():
            by_bucket.setdefault(bucket_in(key), {})[key] = entry
        for step, report in reports.items():
            entries = by_bucket.get(step.bucket, {})
            report.winners = self._winners_in_words(entries)
            if step in covered:
                self._describe_covered(step, report, entries)

    def _winners_in_words(self, entries: Mapping[str, list[Any]]) -> dict[str, str]:
        """The choices at one bucket by op, without those of ops that only a runner asks for which lost there."""
        chosen = {parse_key(key).custom_op: entry for key, entry in entries.items()}
        unasked = {
            nested
            for op in self._host.tuned_ops
            for runner in op.runners
            if op.name in chosen and chosen[op.name][0] != type(runner).__name__
            for nested in getattr(runner, "nested_ops", ())
        }
        return {op: describe_choice(*entry[:2]) for op, entry in chosen.items() if op not in unasked}

    def _describe_covered(self, step: Step, report: StepReport, keys: Collection[str]) -> None:
        records = self._merged.records
        words = sorted({_SOURCE_WORDS[records[key].source] for key in keys if key in records})
        report.source = words[0] if len(words) == 1 else "mixed (" + ", ".join(words) + ")"
        # Under other limits the same bucket belongs to the other phase; the times are the op's, whichever phase asks.
        names = [step.name, *(step_name(phase, step.bucket) for phase in Phase)]
        entry = next((self._merged.steps[name] for name in names if name in self._merged.steps), None)
        if entry is not None:
            report.default_ms, report.tuned_ms = entry.default_ms, entry.tuned_ms

    def winners(self) -> dict[str, list[Any]]:
        """``question -> [key, runner, tactic]`` of everything that serving would use."""
        entries = flashinfer_api.stored_entries()
        return {question_of(key): [key, *entry[:2]] for key, entry in entries.items()}

    @property
    def _sm(self) -> str:
        return sm_name(self._host.capability)

    def _open_store(self) -> RecordStore:
        """This rank's file, and the one to read where it does not exist yet."""
        identity, topology, settings = self._host.identity, self._host.topology, self._settings
        cache_path = cache_path_of(identity, settings, self._environment, self._sm)
        place = RankPlace(
            topology.tp_rank, topology.pp_rank, topology.dp_rank, identity.draft, identity.gpu_uuid
        )
        path = cache_path.records(place)
        if not settings.use_cache:
            path = cache_path.fresh_records(place, settings.run_id)
        reason = distrust(settings.cache_root, path)
        if reason or not settings.use_cache:
            return RecordStore(path, self._environment, distrust=reason)
        cache_path.describe()
        return RecordStore(path, self._environment, fallback=cache_path.fallback(place))

    def _load_into_tuner(self, records: RecordSet) -> None:
        if not records.records and not records.namespaces:
            return
        with flashinfer_api.scratch_directory() as scratch:
            path = materialise(
                records, self._environment, Path(scratch, "records.json"), flashinfer_api.policy_of
            )
            loaded = flashinfer_api.load_records(path)
        assert loaded, "FlashInfer refused a file that carries this process's own stamp"

    def _report_problems(self, source: str, loaded: LoadedRecords) -> None:
        problems = rejections(source, loaded)
        if len(problems) > _MAX_PROBLEMS:  # a file of nonsense must not fill the log
            rest = f"{loaded.path}: {len(problems) - _MAX_PROBLEMS} more entries are not used"
            problems = [*problems[:_MAX_PROBLEMS], {**problems[-1], "reason": rest}]
        for problem in problems:
            self._report.records.rejected.append(problem)
            what = "a record" if problem["kind"] == "entry" else "a record file"
            logger.warning("FlashInfer autotune does not use %s: %s", what, problem["reason"])


def blocklist_of(cache_root: Path, sm: str) -> Blocklist:
    """Where wrong tactics are noted; known before FlashInfer's tuner exists, which reads it when it is created."""
    version = safe_part(flashinfer_api.version())
    path = cache_root / "flashinfer" / "autotune" / version / sm / "tactics_blocklist.json"
    return Blocklist(None if distrust(cache_root, path) else path)


def _first_few(words: list[str], rest: str) -> list[str]:
    """A dozen lines say what there is; a thousand hide it."""
    if len(words) <= _MAX_PROBLEMS:
        return words
    return [*words[:_MAX_PROBLEMS], f"{len(words) - _MAX_PROBLEMS} {rest}"]


def _entries_at(bucket: int, op_names: Collection[str] | None = None) -> dict[str, list[Any]]:
    """What the tuner holds at a bucket, of these ops or of all."""
    found = {}
    for key, entry in flashinfer_api.stored_entries().items():
        parsed = parsed_key(key)
        if (
            parsed is not None
            and parsed.num_tokens == bucket
            and (op_names is None or parsed.custom_op in op_names)
        ):
            found[key] = entry
    return found
