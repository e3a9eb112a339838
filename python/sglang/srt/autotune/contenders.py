"""The runners that compete within the in-tree ops: the same on all ranks, and compiled before they are needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.gpu_tuner import compile_in_parallel, compile_threads
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Step

logger = logging.getLogger(__name__)


def runners_of(host: Host) -> Iterator[Any]:
    """All runners of all in-tree ops."""
    for op in host.tuned_ops:
        yield from op.runners


def inner_ops(host: Host) -> set[str]:
    """Names of the ops that only some runner asks for: whether anybody does depends on who wins."""
    return {op for runner in runners_of(host) for op in getattr(runner, "nested_ops", ())}


def agree_on_runners(host: Host, agreement: Agreement) -> list[str]:
    """Leave out the runners that some rank could not build; gives a line for each.

    Ranks that choose alike measure candidate by candidate together, so all must have the same ones.
    """
    mine = {op.name: [type(runner).__name__ for runner in op.runners] for op in host.tuned_ops}
    answers = agreement.gather("runners of the ops", mine)
    problems = []
    for op in host.tuned_ops:
        for runner in list(op.runners):
            name = type(runner).__name__
            lacking = [rank for rank, theirs in answers.items() if name not in theirs.get(op.name, [name])]
            if lacking:
                op.runners.remove(runner)
                problems.append(f"{name} does not compete in {op.name}: rank {lacking[0]} does not have it")
        if not op.runners:
            raise ValueError(
                f"{op.name}: the ranks have no runner in common: start every rank with the same packages"
            )
    for problem in problems:
        logger.warning("FlashInfer autotune: %s", problem)
    return problems


def compile_choices(host: Host, steps: Sequence[Step], skip_ops: Sequence[str]) -> None:
    """Compile in parallel what the choices of all steps name and the disk does not have compiled yet."""
    if not any(hasattr(runner, "compile_jobs") for runner in runners_of(host)):
        return
    with flashinfer_api.observed(), flashinfer_api.only_defaults(skip_ops):
        jobs = [job for step in steps for job in host.op_probe(step.bucket).compile_jobs()]
    compile_in_parallel(jobs, compile_threads(host.topology.world_size))
