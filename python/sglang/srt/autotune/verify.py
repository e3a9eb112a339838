"""Whether what was tuned is used, right, and faster.

Coverage: each step's forward runs with tuning off and must find only records; a lookup that falls back is
counted with its op and bucket. Comparison: the op of one layer runs with the tuned and with the default
choice on the same inputs; outputs must be finite and agree within the dtype's tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Step
from sglang.srt.autotune.timer import OpTimer

#: Largest relative error (norm of the difference over norm of the default's output) between two correct
#: choices. BF16: 0.3-0.6% was measured between FlashInfer's default and tuned tactics on an H200, another
#: summation order; the bound leaves room for longer reductions.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Coverage:
    """What one forward of a step found with tuning off."""

    fallbacks: tuple[flashinfer_api.Fallback, ...]
    skipped_ops: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        return not self.fallbacks


@dataclass(frozen=True)
class Comparison:
    """Tuned against default for one step: times per layer, and the relative difference of the outputs."""

    default_ms: float
    tuned_ms: float
    relative_error: float
    finite: bool
    within_tolerance: bool


def coverage_of(host: Host, step: Step, skip_ops: Sequence[str]) -> Coverage:
    """Run the step's forward with tuning off and report every lookup that fell back."""
    with flashinfer_api.observed() as lookups, flashinfer_api.only_defaults(skip_ops):
        host.dummy_forward(step.shape)
    return Coverage(tuple(lookups.fallbacks), frozenset(lookups.skipped_ops))


def compare(host: Host, step: Step, timer: OpTimer) -> Comparison:
    """Time and compare the op of one layer at the step's bucket, tuned and default."""
    run = host.op_probe(step.bucket)
    with flashinfer_api.observed():
        tuned = run().float()
        tuned_ms = timer.measure_ms(run)
        with flashinfer_api.only_defaults(host.op_names):
            default = run().float()
            default_ms = timer.measure_ms(run)
    finite = bool(torch.isfinite(tuned).all())
    error = float((tuned - default).norm() / default.norm().clamp_min(1e-20)) if finite else float("inf")
    tolerance = TOLERANCE.get(host.probe_dtype, TOLERANCE[torch.bfloat16])
    return Comparison(default_ms, tuned_ms, error, finite, finite and error <= tolerance)
