"""What a start would do, worked out from flags, config.json and package metadata alone.

Imports neither torch nor FlashInfer: the plan is printed on machines that have no GPU and in much less time than
either takes to import. What only a process with CUDA can know is left out and said to be unknown.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.autotune.decision import Decision, decide
from sglang.srt.autotune.estimate import measured_pace
from sglang.srt.autotune.gpus import GpuModel
from sglang.srt.autotune.ops import MEGAMOE_OP, asks_the_tuner, tunable_ops
from sglang.srt.autotune.plan import Plan, make_plan
from sglang.srt.autotune.records.cache_key import CachePath, RankPlace
from sglang.srt.autotune.records.document import read_json_object
from sglang.srt.autotune.records.installed import installed_stamp, unknown_fields
from sglang.srt.autotune.records.merging import merge_sources
from sglang.srt.autotune.records.placement import cache_path_of, sm_name
from sglang.srt.autotune.records.record import RecordSet, parse_key, parsed_key, question_of
from sglang.srt.autotune.records.seeds import SeedCatalogue, SeedSelection
from sglang.srt.autotune.records.store import LoadedRecords, load_file
from sglang.srt.autotune_config import identity_of, settings_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_support import SERVED_ARCHITECTURES, check_supported
from sglang.srt.limits import derive_limits
from sglang.srt.server_args import ServerArgs

SCHEMA = 1

#: How `records.environment.FieldDifference.words` ends for a field that is missing here.
_NOT_KNOWN = "current not known"

_MEGAMOE_CAPACITY = re.compile(r"\|max_tokens=(\d+)")


@dataclass(frozen=True)
class RankRecords:
    """The record file of one rank. ``covered`` names the steps that its records and the seeds answer, and
    ``capacities`` those of MegaMoE for which the file has a winner."""

    place: str
    path: str
    exists: bool = False
    num_records: int = 0
    covered: tuple[str, ...] = ()
    capacities: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordsHere:
    """Where records lie. ``directory`` is None while fields in ``unknown_here`` keep its name open."""

    parent: str
    directory: str | None
    unknown_here: tuple[str, ...] = ()
    ranks: tuple[RankRecords, ...] = ()
    given: tuple[RankRecords, ...] = ()
    reuse: bool = True
    #: Seconds per tuned step of the start whose report lies beside the records.
    seconds_per_step: float | None = None


@dataclass(frozen=True)
class Preview:
    """The answer of `sglang autotune plan`."""

    device: dict[str, Any]
    model: dict[str, Any]
    decision: Decision
    ops: tuple[str, ...]
    plan: Plan
    records: RecordsHere
    seeds: list[dict[str, Any]]
    todo: tuple[str, ...]
    #: MegaMoE capacities that will be tuned; None without MegaMoE.
    capacities_todo: tuple[int, ...] | None
    estimate: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints; `docs/autotune.md` describes it."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "model": self.model,
            "decision": asdict(self.decision),
            "ops": list(self.ops),
            "plan": self.plan.to_json(),
            "records": asdict(self.records),
            "seeds": self.seeds,
            "todo": list(self.todo),
            "capacities_todo": None if self.capacities_todo is None else list(self.capacities_todo),
            "estimate": self.estimate,
            "notes": list(self.notes),
        }


def make_preview(args: ServerArgs, config: ModelConfig, gpu: GpuModel | None) -> Preview:
    """What a start with these flags would do on ``gpu``, or on this machine's CPU when that is None.

    Raises:
        ValueError: a flag leaves a rank with nothing to do.
    """
    device = "cpu" if gpu is None else "cuda"
    capability = None if gpu is None else gpu.capability
    settings, identity = settings_of(args), identity_of(args, config, device, capability)
    sm, backend = sm_name(capability), identity.backends["moe"]
    ops = tunable_ops(backend)
    plan = make_plan(
        derive_limits(args, config, device),
        include_prefill=settings.include_prefill,
        include_steps=asks_the_tuner(ops) or not ops,
    )
    decision = decide(
        disabled=settings.disabled,
        deterministic=settings.deterministic,
        device=device,
        capability=capability,
        tunable_ops=ops,
        skip_ops=settings.skip_ops,
        moe_backend=backend,
    )

    stamp = installed_stamp(None if gpu is None else gpu.device_name)
    catalogue, seeds = SeedCatalogue(), SeedSelection()
    if settings.use_cache:
        applies = {**identity.applies, "sm": sm, "flashinfer_version": stamp["flashinfer_version"]}
        seeds = catalogue.select(applies, stamp)
    expected = cache_path_of(identity, settings, stamp, sm)
    gpu_pattern = None if gpu is None else gpu.pattern
    directory = find_directory(expected, unknown_fields(stamp), gpu_pattern)
    given = tuple(load_file(path, source="given", environment=stamp) for path in settings.given_records)
    places = rank_places(args)
    ranks = []
    for place in places:
        user = read_rank(directory, place) if settings.use_cache else LoadedRecords()
        merged = merge_sources(seeds.chosen, user, given)
        asked = tuple(op for op in ops if op not in settings.skip_ops)
        covered = covered_steps(plan, merged, asked) if settings.use_cache else ()
        name = Path(user.path or (directory or expected.directory.with_name("?")) / place.file_name())
        ranks.append(
            RankRecords(
                name.stem,
                str(name),
                user.exists,
                len(user.records),
                covered,
                megamoe_capacities(plan, user),
                tuple(user.problems),
            )
        )
    todo = tuple(
        step.name
        for step in plan.steps
        if decision.run and not all(step.name in rank.covered for rank in ranks)
    )
    # Rank 0's records are given to all.
    capacities_todo = tuple(c for c in plan.capacities if decision.run and c not in ranks[0].capacities)
    records = RecordsHere(
        parent=str(expected.directory.parent),
        directory=None if directory is None else str(directory),
        unknown_here=tuple(unknown_fields(stamp)),
        ranks=tuple(ranks),
        given=tuple(
            RankRecords("given", file.path, file.exists, len(file.records), problems=tuple(file.problems))
            for file in given
        ),
        reuse=settings.use_cache,
        seconds_per_step=measured_pace(directory),
    )
    return Preview(
        device={
            "type": device,
            "gpu": None if gpu is None else gpu.device_name,
            "sm": sm,
            "memory_gib": None if gpu is None else gpu.memory_gib,
            "moe_runner_backend": backend,
            "stamp": stamp,
        },
        model={
            **identity.model,
            "architecture": config.architecture,
            "dtype": identity.dtype,
            "quantization": config.quantization,
            "path": config.model_path,
        },
        decision=decision,
        ops=ops,
        plan=plan,
        records=records,
        seeds=_seed_rows(catalogue, seeds, ops),
        todo=todo,
        capacities_todo=capacities_todo if MEGAMOE_OP in ops else None,
        notes=tuple(_notes(config, args)),
    )


def rank_places(args: ServerArgs) -> list[RankPlace]:
    """The coordinates of every rank, in rank order."""
    return [
        RankPlace(tp_rank, pp_rank, tp_rank // args.attn_tp_size)
        for pp_rank in range(args.pp_size)
        for tp_rank in range(args.tp_size)
    ]


def find_directory(expected: CachePath, unknown: list[str], gpu_pattern: str | None) -> Path | None:
    """The directory of these records: the computed one, or the one here that agrees in all that is known.

    ``unknown`` are the stamp's fields that this process cannot tell; ``gpu_pattern`` matches the names of the
    planned GPU's variants. None when the name is open and no directory, or more than one, agrees.
    """
    if not unknown and gpu_pattern is None:
        return expected.directory
    wanted = expected.identity.described()
    found = []
    for path in sorted(expected.directory.parent.glob("*/identity.json")):
        try:
            stored = read_json_object(path)
            stamp = dict(stored.pop("environment"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a description that cannot be read describes nothing
        known = {name: value for name, value in wanted["environment"].items() if name != "gpu"}
        same_rest = all(stored.get(name) == value for name, value in wanted.items() if name != "environment")
        same_gpu = gpu_pattern is None or fnmatch.fnmatchcase(str(stamp.get("gpu")), gpu_pattern)
        if same_rest and same_gpu and all(stamp.get(name) == value for name, value in known.items()):
            found.append(path.parent)
    return found[0] if len(found) == 1 else None


def read_rank(directory: Path | None, place: RankPlace) -> LoadedRecords:
    """The file of a rank, or the newest of the same rank that is named after a GPU; empty when there is none."""
    if directory is None:
        return LoadedRecords()
    path = directory / place.file_name()
    if not path.exists():
        pattern = place.sibling_pattern()
        siblings = [p for p in directory.glob("rank_*.json") if pattern.fullmatch(p.name)]
        path = max(siblings, key=lambda p: p.stat().st_mtime, default=path)
    return load_file(path, source=None, environment=None)


def covered_steps(plan: Plan, records: RecordSet, ops: tuple[str, ...]) -> tuple[str, ...]:
    """The steps all of whose known keys have a record. The start itself checks with a forward.

    Keys hold the bucket and not the phase: what a start tuned as ``decode 16`` covers ``prefill 16`` of another. A step
    that never asked for the first of ``ops`` was seen by another backend, and says nothing of this one.
    """
    answered = set(map(question_of, records.records))
    complete = {
        name.split()[-1]
        for name, entry in records.steps.items()
        if any((parsed := parsed_key(key)) and parsed.custom_op in ops[:1] for key in entry.keys)
        and all(question_of(key) in answered for key in entry.keys)
    }
    return tuple(step.name for step in plan.steps if str(step.bucket) in complete)


def megamoe_capacities(plan: Plan, records: RecordSet) -> tuple[int, ...]:
    """The plan's capacities for which there is a MegaMoE winner. The start itself checks what it says."""
    keys = records.namespaces.get(MEGAMOE_OP, {})
    stored = {int(match[1]) for key in keys if (match := _MEGAMOE_CAPACITY.search(key))}
    return tuple(capacity for capacity in plan.capacities if capacity in stored)


def _seed_rows(catalogue: SeedCatalogue, seeds: SeedSelection, ops: tuple[str, ...]) -> list[dict[str, Any]]:
    """Each seed for this model: whether it is used (None: not to be told here), why not, and what it holds."""
    reasons_of = {seed.name: () for seed in seeds.chosen} | dict(seeds.refused)
    rows = []
    for seed in catalogue.seeds:
        if seed.name not in reasons_of:
            continue
        reasons = list(dict.fromkeys(reasons_of[seed.name]))
        open_only = bool(reasons) and all(reason.endswith(_NOT_KNOWN) for reason in reasons)
        keys = [parse_key(key) for key in seed.records]
        rows.append(
            {
                "name": seed.name,
                "used": None if open_only else not reasons,
                "reasons": reasons,
                "num_records": len(seed.records),
                "ops": sorted({key.custom_op for key in keys}),
                "buckets": sorted({key.num_tokens for key in keys if key.num_tokens is not None}),
                "asked_for": any(key.custom_op in ops for key in keys),
            }
        )
    return rows


def _notes(config: ModelConfig, args: ServerArgs) -> list[str]:
    """Why a start with these flags would end before the stage, where that can be told from the model alone."""
    rest = "the plan shows what its geometry and these limits would give"
    if config.architecture not in SERVED_ARCHITECTURES:
        can = ", ".join(SERVED_ARCHITECTURES)
        return [f"{config.architecture} cannot be served by this version ({can} can): {rest}"]
    stored = config.quantization_config is not None and config.quantization
    loadable = config.architecture == "GptOssForCausalLM" and stored == "mxfp4"
    if stored and not loadable:
        return [f"weights stored as {stored} cannot be loaded by this version: {rest}"]
    try:
        check_supported(config, args.load_quantizations)
    except ValueError as error:
        return [f"{error}: {rest}"]
    return []
