"""How the knobs of the missing capacities are found: by FlashInfer itself, or by the sweeps of this tree.

`native` is FlashInfer's own search, every candidate of it, compiled one after the other. `sweep` runs worker processes
where a launch has one rank and goes in lock-step where it has several. All of them use temporary owners, which are
gone before a public workspace of the same capacity is opened.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.context import TuningContext
from sglang.srt.autotune.megamoe.kernels.base import MegaMoEError
from sglang.srt.autotune.megamoe.lockstep import LockstepSweep
from sglang.srt.autotune.megamoe.records import Winner
from sglang.srt.autotune.megamoe.sweep import WorkerSweep, num_workers
from sglang.srt.autotune.megamoe.sweep_search import Choice

POLICIES = ("native", "sweep")


def tune(policy: str, context: TuningContext, capacities: Sequence[int]) -> Iterator[Winner]:
    """A winner for each capacity, as they are found; on all ranks together where there are several."""
    assert policy in POLICIES, f"no MegaMoE tuning policy {policy!r}"
    if not capacities:
        return
    if policy == "native":
        yield from _tune_natively(context, capacities)
        return
    kernel = context.profiles.kernel
    for choice in _sweep(context, capacities):
        if choice.knobs is None:
            reason = choice.problems[0] if choice.problems else "no candidate was tried"
            yield Winner(choice.capacity, None, "default", note=f"no candidate can be used: {reason}")
            continue
        kernel.record(choice.knobs, choice.capacity, choice.time_us, "sweep")
        entry = knob_file.entry_at(context.knob_cache, kernel.entry_fields(), choice.capacity)
        assert entry is not None, "the kernel did not write the knob-cache entry where it was told to"
        version = knob_file.version_of(context.knob_cache)
        # All keep rank 0's: an entry names its second, and ranks whose files differ would write them again when warm.
        agreement = context.agreement
        answers = agreement.gather(f"MegaMoE winner at {choice.capacity}", [entry, version])
        entry, version = answers[agreement.ranks[0]]
        yield Winner(
            choice.capacity, choice.knobs, "tuned", entry, version, choice.time_us, choice.default_us
        )


def _sweep(context: TuningContext, capacities: Sequence[int]) -> Iterator[Choice]:
    kernel = context.profiles.kernel
    alone = kernel.geometry.world_size == 1
    workers = 0
    # A daemonic process, as some launchers make them, may not start workers.
    if kernel.uses_workers and not multiprocessing.current_process().daemon:
        workers = num_workers(kernel, context.free_bytes())
    if not alone:
        on_gpu = kernel.device.type == "cuda"
        contenders = _contenders_of_one_rank(context, capacities, workers) if on_gpu else None
        yield from LockstepSweep(context, contenders).tune(capacities)
        return
    if workers == 0:
        if kernel.uses_workers:
            context.problems.append("no sweep worker can be started: candidates are tried in this process")
        yield from LockstepSweep(context).tune(capacities)
        return
    sweep = WorkerSweep(kernel, capacities, workers)
    yield from sweep.run()
    _note_sweep(context, sweep, workers)


def _note_sweep(context: TuningContext, sweep: WorkerSweep, workers: int) -> None:
    context.problems += sweep.problems
    context.timings.update({f"sweep_{name}": seconds for name, seconds in sweep.seconds.items()})
    context.timings |= {"workers": workers, "candidates": sweep.search.num_candidates}


def _contenders_of_one_rank(context: TuningContext, capacities: Sequence[int], workers: int) -> Any:
    """Rank 0 sweeps with its own experts alone; all ranks try what it found worth trying."""
    found: list[list[Any]] | None = None
    kernel = context.profiles.kernel
    if context.agreement.rank == context.agreement.ranks[0] and workers:
        spec = kernel.bench()
        sweep = WorkerSweep(kernel, capacities, workers, environment={"MEGA_NO_DIST": "1"}, spec=spec)
        for _ in sweep.run():
            context.agreement.announce("sweeping MegaMoE candidates on one rank")
        _note_sweep(context, sweep, workers)
        found = [[capacity, sweep.search.contenders(capacity)] for capacity in capacities]
    answers = context.agreement.gather("MegaMoE candidates worth trying", found)
    found = answers[context.agreement.ranks[0]]
    if found is None:
        return None
    # JSON made lists of tuples; the kernel's check turns them back.
    return {capacity: [kernel.check_knobs(knobs) for knobs in contenders] for capacity, contenders in found}


def _tune_natively(context: TuningContext, capacities: Sequence[int]) -> Iterator[Winner]:
    """FlashInfer's AUTO: it tunes in the first forward of a temporary owner and rank 0 records the winner."""
    kernel, agreement = context.profiles.kernel, context.agreement
    for capacity in capacities:
        agreement.announce(f"native MegaMoE tuning at capacity {capacity}")
        owner = kernel.create_owner(context.profiles.weights[0], capacity, "auto")
        try:
            owner.warmup(context.inputs(capacity))
        finally:
            owner.destroy()
        entry = knob_file.entry_at(context.knob_cache, kernel.entry_fields(), capacity)
        version = knob_file.version_of(context.knob_cache)
        answers = agreement.gather(f"native MegaMoE winner at {capacity}", [entry, version])
        theirs, version = answers[agreement.ranks[0]]
        if theirs is None:
            raise MegaMoEError(f"FlashInfer's tuning recorded no MegaMoE winner for capacity {capacity}")
        if entry is None:
            knob_file.restore(context.knob_cache, [theirs], version)
        knobs = kernel.check_knobs(theirs["knobs"])
        yield Winner(capacity, knobs, "tuned", theirs, version, theirs.get("p50_us"))
