"""Every use of FlashInfer beyond its documented entry points, in one place; `flashinfer_moe_ep` has those of MegaMoE.

The stage needs a few things that no public name gives: which lookups fell back, what the environment
stamp is, the winners in file form, a way to file a winner measured elsewhere. Each function says what it
leans on; `test/unit/test_flashinfer_api.py` fails when FlashInfer changes it. Features are detected, never
guessed from a version.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune.records.record import question_of

#: FlashInfer's tuner has no counter for fallbacks (its `cache_misses` is never incremented): the DEBUG lines
#: of its logger are the only account of them.
#: Later releases put the key on the same line, earlier ones on a line of its own.
_FALLBACK = re.compile(r"Using fallback tactic for (\S+) with input shapes (.*?)(?:; generated key (.*))?$")
_MISSED_KEY = re.compile(r"Generated key(.*)$")
_SKIPPED = re.compile(r"Skipping autotuning for '([^']+)'")
_OUT_OF_MEMORY = re.compile(r"OOM detected")


class TuningUnavailable(RuntimeError):
    """Tuning was wanted and cannot be had; the message says what is missing and the remedy."""


def version() -> str:
    """Version of the installed FlashInfer.

    Raises:
        TuningUnavailable: it cannot be imported.
    """
    try:
        import flashinfer
    except Exception as error:  # a broken install raises all kinds: missing libraries, version checks
        raise TuningUnavailable(
            f"FlashInfer cannot be imported ({type(error).__name__}: {error}); "
            "reinstall flashinfer-python, or start with --disable-flashinfer-autotune"
        ) from error
    return str(flashinfer.__version__)


def tuner() -> Any:
    """The process's AutoTuner (public `flashinfer.autotuner.AutoTuner`)."""
    from flashinfer.autotuner import AutoTuner

    return AutoTuner.get()


def load_timing_module() -> None:
    """Load or build the module with the tuner's delay kernel.

    Without it every tactic of every op fails silently and tuning yields only defaults, so it is loaded
    before the first step. Leans on `flashinfer.tllm_utils.get_trtllm_utils_module`.

    Raises:
        TuningUnavailable: it neither loads nor builds.
    """
    try:
        from flashinfer.tllm_utils import get_trtllm_utils_module

        get_trtllm_utils_module()
    except Exception as error:
        raise TuningUnavailable(
            f"FlashInfer's timing module neither loads nor builds ({type(error).__name__}: {str(error)[:400]}); "
            "install the matching flashinfer-jit-cache wheel or a CUDA toolkit with nvcc"
        ) from error


def environment() -> dict[str, str]:
    """The seven fields by which FlashInfer decides whether a stored tactic still means the same kernel.

    Leans on `save_configs` writing `_metadata` into a fresh file; that avoids a private collector. Call it
    after CUDA is initialised: the cuDNN version can read differently before.
    """
    with scratch_directory() as scratch:
        path = Path(scratch, "stamp.json")
        with _quiet_logger():
            tuner().save_configs(str(path))
        return {str(k): str(v) for k, v in json.loads(path.read_text())["_metadata"].items()}


#: Memory-backed on Linux, and there where everything else is read-only or full.
_SHARED_MEMORY = "/dev/shm"
_SCRATCH_BYTES = 16 * 2**20


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for one exchange of files with FlashInfer, which takes and gives records only as files.

    Raises:
        TuningUnavailable: no place for one can be written.
    """
    try:
        roomy = os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) and _free_bytes(_SHARED_MEMORY) >= _SCRATCH_BYTES
        scratch = tempfile.TemporaryDirectory(
            prefix="sglang-autotune-", dir=_SHARED_MEMORY if roomy else None, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise TuningUnavailable(
            f"no directory for temporary files can be written ({error}); set TMPDIR to one that can"
        ) from error
    with scratch as name:
        try:
            yield Path(name)
        except OSError as error:
            raise TuningUnavailable(
                f"records cannot be handed to FlashInfer ({error}); free some space"
            ) from error


def _free_bytes(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def load_records(path: Path) -> bool:
    """Load a file in FlashInfer's format on top of what is loaded; False when it refuses the environment."""
    with _quiet_logger():
        return tuner().load_configs(str(path)) is not False


def stored_entries() -> dict[str, list[Any]]:
    """Everything that serves, live winners and loaded records, as ``key -> [runner, tactic, policy]``.

    Leans on `save_configs` to a fresh file: it holds both, with tactics in their JSON form. Of several runners'
    records for one question the live winner is given, since the lookup asks for those first; what is loaded never
    holds two.
    """
    live = {key.file_key for key in tuner().profiling_cache}
    with scratch_directory() as scratch:
        path = Path(scratch, "winners.json")
        with _quiet_logger():
            tuner().save_configs(str(path))
        document = json.loads(path.read_text())
    entries = {
        key: value for key, value in document.items() if not key.startswith("_") and isinstance(value, list)
    }
    answered = {question_of(key) for key in live}
    return {key: value for key, value in entries.items() if key in live or question_of(key) not in answered}


def forget_everything() -> None:
    """Drop live winners and loaded records; the tuner cannot forget a loaded record alone."""
    tuner().clear_cache()


def drop_winners(file_keys: Collection[str]) -> None:
    """Forget these live winners (public `profiling_cache` dict); loaded records stay."""
    cache = tuner().profiling_cache
    for key in [key for key in cache if key.file_key in file_keys]:
        del cache[key]


def policy_of(op_name: str, runner: str) -> tuple[Any, ...] | None:
    """How FlashInfer measures an op, as it stores it beside a record; None for an op that this tree does not know.

    A record whose policy is another is measured again in tuning mode. The CUTLASS MoE and the in-tree ops use the
    plain configuration; the trtllm-gen MoE ops are timed by graph replay with a cold L2.
    """
    if op_name.startswith("flashinfer::trtllm_"):
        return ("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold")
    if op_name.startswith(("trtllm::fused_moe::", "sglang::")):
        return ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
    return None


def lookup(op_name: str, runners: Sequence[Any], config: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether some record answers these inputs (public `AutoTuner.search_cache`)."""
    shapes = tuple(tuple(t.shape) for t in inputs)
    hit, *_ = tuner().search_cache(op_name, list(runners), shapes, config, inputs=inputs)
    return bool(hit)


def file_winner(op_name: str, runner: Any, config: Any, inputs: list[torch.Tensor], tactic: Any) -> str:
    """File a winner that was measured outside FlashInfer's profiler; returns its file key.

    Leans on the public `profiling_cache` dict and `ProfilingCacheKey`; the key's profile is the inputs'
    shapes with every dynamic dimension mapped to its bucket, as the lookup computes it.
    """
    from flashinfer.autotuner import ProfilingCacheKey

    profile = [list(t.shape) for t in inputs]
    for spec in config.dynamic_tensor_specs:
        bucket = spec.map_to_tuning_buckets(profile[spec.input_idx[0]][spec.dim_idx[0]])
        for index, dim in zip(spec.input_idx, spec.dim_idx, strict=True):
            profile[index][dim] = bucket
    key = ProfilingCacheKey(
        custom_op=op_name,
        runner_class_name=type(runner).__name__,
        runner_hash=hash(runner),
        nearest_profile=tuple(tuple(shape) for shape in profile),
        extras=runner.get_cache_key_extras(inputs),
    )
    cache, question = tuner().profiling_cache, question_of(key.file_key)
    for rival in [other for other in cache if question_of(other.file_key) == question]:
        del cache[rival]  # the lookup would take the first runner's, whichever was measured last
    cache[key] = (tactic, None)
    return str(key.file_key)


#: Where FlashInfer can (0.7.4), tactics that measure this near the fastest are timed again and the first of them is
#: kept: separate starts then choose alike more often. It is what such a choice may cost, a third of the guard's noise.
TIE_TOLERANCE = 0.01


def _settles_near_ties(autotune: Any) -> bool:
    return "tie_tolerance" in inspect.signature(autotune).parameters


@contextlib.contextmanager
def tuning(bucket: int, skip_ops: Sequence[str]) -> Iterator[None]:
    """Tune what the forward inside asks for, at one grid bucket.

    Inside `autotune_v2` without a policy the default path races as a candidate, so a stored default is a
    legitimate winner. The bucket override confines the op's sweep of its whole grid to this bucket; the
    bucket is on the grid, so the record hits later without the override.
    """
    import flashinfer

    with contextlib.ExitStack() as stack:
        near_ties: dict[str, Any] = (
            {"tie_tolerance": TIE_TOLERANCE} if _settles_near_ties(flashinfer.autotune) else {}
        )
        stack.enter_context(
            flashinfer.autotune(
                True, tuning_buckets=(bucket,), round_up=True, skip_ops=set(skip_ops), **near_ties
            )
        )
        autotune_v2 = _autotune_v2()
        if autotune_v2 is not None:
            stack.enter_context(autotune_v2("tune", persistent_cache=False))
        stack.enter_context(_shorter_delay())
        yield


#: FlashInfer delays the stream before it times a tactic, so that the host has queued all runs when the first begins.
#: Ten runs are queued in well under a millisecond; FlashInfer's 5 ms are most of what a small tactic costs.
STREAM_DELAY_US = 2000


@contextlib.contextmanager
def _shorter_delay() -> Iterator[None]:
    """Lower the tuner's delay (its public `stream_delay_micro_secs`) for the length of a step."""
    before = tuner().stream_delay_micro_secs
    tuner().stream_delay_micro_secs = min(before, STREAM_DELAY_US)
    try:
        yield
    finally:
        tuner().stream_delay_micro_secs = before


@contextlib.contextmanager
def only_defaults(op_names: Sequence[str]) -> Iterator[None]:
    """Serve ``op_names`` with their default tactic, whatever is stored: a skipped op never looks up."""
    import flashinfer

    with flashinfer.autotune(False, skip_ops=set(op_names)):
        yield


@contextlib.contextmanager
def timings_reduced_over(group: Any | None) -> Iterator[None]:
    """Reduce each tactic's time over ``group`` so that its ranks choose alike; restores the former group."""
    if group is None:
        yield
        return
    from flashinfer.autotuner import get_autotune_process_group, set_autotune_process_group

    before = get_autotune_process_group()
    set_autotune_process_group(group)
    try:
        yield
    finally:
        set_autotune_process_group(before)


@contextlib.contextmanager
def timings_not_reduced() -> Iterator[None]:
    """Without a group for FlashInfer's reductions; restores the one that is set."""
    from flashinfer.autotuner import get_autotune_process_group, set_autotune_process_group

    before = get_autotune_process_group()
    if before is None:
        yield
        return
    set_autotune_process_group(None)
    try:
        yield
    finally:
        set_autotune_process_group(before)


BLOCKLIST_VARIABLE = "FLASHINFER_TACTICS_BLOCKLIST"


def blocklist_in_force() -> Path | None:
    """The file whose tactics FlashInfer leaves out: what the user's variable names, or `use_blocklist` set."""
    name = os.environ.get(BLOCKLIST_VARIABLE)
    return Path(name) if name else None


def use_blocklist(path: Path | None) -> None:
    """Have FlashInfer leave out the tactics that ``path`` lists (None: no list).

    FlashInfer reads its variable once, when the tuner is created: only before the tuner's first use.
    """
    if path is None:
        os.environ.pop(BLOCKLIST_VARIABLE, None)
    else:
        os.environ[BLOCKLIST_VARIABLE] = str(path)


def not_blocked(op_name: str, runner: Any, tactics: list[Any]) -> list[Any]:
    """``tactics`` without those that the blocklist in force names (public `TacticsBlocklist.filter`)."""
    from flashinfer.tactics_blocklist import TacticsBlocklist

    path, blocklist = blocklist_in_force(), TacticsBlocklist()
    if path is not None and path.is_file():
        with _quiet_logger():
            blocklist.load(str(path))
    return list(blocklist.filter(op_name, runner, tactics))


def _autotune_v2() -> Any | None:
    try:
        from flashinfer.autotune_cache import autotune_v2
    except ImportError:  # releases without it do not race the default; verification compares it anyway
        return None
    return autotune_v2


@dataclass(frozen=True)
class Fallback:
    """One lookup that found no record: the op, its input shapes as logged, and the key that was missing."""

    op_name: str
    shapes: str
    key: str | None


@dataclass
class Lookups:
    """What FlashInfer's tuner said while observed."""

    fallbacks: list[Fallback] = field(default_factory=list)
    skipped_ops: set[str] = field(default_factory=set)
    out_of_memory: int = 0
    warnings: list[str] = field(default_factory=list)


class _Observer(logging.Handler):
    def __init__(self, lookups: Lookups) -> None:
        super().__init__(logging.DEBUG)
        self.lookups = lookups

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if match := _FALLBACK.search(text):
            self.lookups.fallbacks.append(Fallback(match[1], match[2], match[3]))
        elif match := _MISSED_KEY.search(text):
            if self.lookups.fallbacks and self.lookups.fallbacks[-1].key is None:
                last = self.lookups.fallbacks[-1]
                self.lookups.fallbacks[-1] = Fallback(last.op_name, last.shapes, match[1])
        elif match := _SKIPPED.search(text):
            self.lookups.skipped_ops.add(match[1])
        elif record.levelno >= logging.WARNING:
            self.lookups.out_of_memory += bool(_OUT_OF_MEMORY.search(text))
            if "No tuned config covers" not in text:  # the fallback itself is counted above
                self.lookups.warnings.append(text)


@contextlib.contextmanager
def observed() -> Iterator[Lookups]:
    """Collect fallbacks, skips and warnings of the lookups inside; nothing of it reaches the console."""
    lookups = Lookups()
    observer = _Observer(lookups)
    with _quiet_logger(level=logging.DEBUG):
        logger = _jit_logger()
        logger.addHandler(observer)
        try:
            yield lookups
        finally:
            logger.removeHandler(observer)


@contextlib.contextmanager
def _quiet_logger(level: int | None = None) -> Iterator[None]:
    """Mute the logger's own handlers, at ``level`` for handlers added inside; restores both."""
    logger = _jit_logger()
    before = logger.level
    muted = [(handler, handler.level) for handler in logger.handlers]
    for handler, _ in muted:
        handler.setLevel(logging.CRITICAL + 1)
    if level is not None:
        _set_level(logger, level)
    try:
        yield
    finally:
        _set_level(logger, before)
        for handler, handler_level in muted:
            handler.setLevel(handler_level)


def _set_level(logger: logging.Logger, level: int) -> None:
    """FlashInfer's logger is not in logging's registry, so `setLevel` does not clear its memo of enabled levels."""
    logger.setLevel(level)
    getattr(logger, "_cache", {}).clear()


def _jit_logger() -> logging.Logger:
    from flashinfer.jit.core import logger

    return logger
