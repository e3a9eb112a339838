"""Whether what was tuned is used, right, and faster.

Coverage: a step's forward runs with tuning off and must find only records; a lookup that falls back is counted
with its op and bucket. Comparison: the op of one layer runs with the tuned and with the default choice on the same
inputs. A choice that is wrong or slower goes back to the default at once, for all ranks that choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.host import Host, OpProbe
from sglang.srt.autotune.plan import Step
from sglang.srt.autotune.timer import OpTimer

#: Largest relative error (norm of the difference over norm of the reference) of a correct choice. BF16: 0.3-0.6%
#: was measured between FlashInfer's default and tuned tactics on an H200, another summation order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
#: A tuned choice is slower when it loses by more than this share, twice in a row.
NOISE = {"cuda": 0.03, "cpu": 0.10}
#: Rows that are compared with the float32 reference under ``full``.
REFERENCE_ROWS = 16


@dataclass(frozen=True)
class Coverage:
    """What one forward of a step found with tuning off."""

    fallbacks: tuple[flashinfer_api.Fallback, ...]
    skipped_ops: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        return not self.fallbacks


def coverage_of(host: Host, step: Step, skip_ops: Sequence[str], *, every_layer: bool = True) -> Coverage:
    """Run the step's forward with tuning off and report every lookup that fell back."""
    with flashinfer_api.observed() as lookups, flashinfer_api.only_defaults(skip_ops):
        host.dummy_forward(step.shape, every_layer=every_layer)
    return Coverage(tuple(lookups.fallbacks), frozenset(lookups.skipped_ops))


@dataclass(frozen=True)
class Verdict:
    """Tuned against default at one step, the same on all ranks that choose alike.

    Times are milliseconds of the op of one layer. ``fault`` says in words why the tuned choice must go; then
    ``wrong_ops`` are the ops to blame for a wrong output (none when it is merely slower).
    """

    default_ms: float
    tuned_ms: float
    relative_error: float
    fault: str | None = None
    wrong_ops: tuple[str, ...] = field(default=())


class Verifier:
    """Compares tuned with default choices. ``level``: off (times only), finite, or full (see `docs/autotune.md`)."""

    def __init__(self, host: Host, level: str, alike: Agreement) -> None:
        self._host, self._level, self._alike = host, level, alike
        self._timer = OpTimer(host.device)
        self._noise = NOISE["cuda" if host.device.type == "cuda" else "cpu"]
        self._tolerance = TOLERANCE.get(host.probe_dtype, TOLERANCE[torch.bfloat16])

    def judge(self, step: Step) -> Verdict:
        """Check the step's choice; every rank that chooses alike calls this together."""
        with flashinfer_api.observed():
            probe = self._host.op_probe(step.bucket)
            error = 0.0 if self._level == "off" else self._error(probe)
            if self._level == "full":
                error = max([error, self._reference_error(probe), *map(self._edge_error, edges(step.bucket))])
            errors = self._alike.gather(f"errors of {step.name}", error if error < float("inf") else None)
            times = self._times(step, probe)
            worst = max(float("inf") if e is None else e for e in errors.values())
            if worst > self._tolerance:
                return Verdict(*times, worst, self._words(worst), self._ops_to_blame(probe))
            if self._is_slower(times):
                times = self._times(step, probe)
                if self._is_slower(times):
                    fault = f"tuned was slower than the default ({times[1]:.4g} against {times[0]:.4g} ms)"
                    return Verdict(*times, worst, fault)
        return Verdict(*times, worst)

    def _times(self, step: Step, probe: OpProbe) -> tuple[float, float]:
        tuned_ms = self._timer.measure_ms(probe.run)
        with flashinfer_api.only_defaults(self._host.op_names):
            default_ms = self._timer.measure_ms(probe.run)
        mean = self._alike.mean_times(f"default and tuned time of {step.name}", [default_ms, tuned_ms])
        return mean[0], mean[1]

    def _is_slower(self, times: tuple[float, float]) -> bool:
        default_ms, tuned_ms = times
        return tuned_ms > default_ms * (1 + self._noise)

    def _error(self, probe: OpProbe) -> float:
        tuned = probe.run().float()
        with flashinfer_api.only_defaults(self._host.op_names):
            default = probe.run().float()
        return relative_error(tuned, default)

    def _reference_error(self, probe: OpProbe) -> float:
        rows, reference = probe.reference(REFERENCE_ROWS)
        return relative_error(probe.run()[rows].float(), reference)

    def _edge_error(self, num_tokens: int) -> float:
        return self._error(self._host.op_probe(num_tokens))

    def _ops_to_blame(self, probe: OpProbe) -> tuple[str, ...]:
        """The ops whose default alone mends the output; all of them when no single one does."""
        blamed = []
        for op in self._host.op_names:
            with flashinfer_api.only_defaults([op]):
                mended = probe.run().float()
            with flashinfer_api.only_defaults(self._host.op_names):
                default = probe.run().float()
            if relative_error(mended, default) <= self._tolerance:
                blamed.append(op)
        answers = self._alike.gather("ops to blame", blamed)
        return tuple(
            op for op in self._host.op_names if any(op in answer for answer in answers.values())
        ) or (self._host.op_names)

    def _words(self, error: float) -> str:
        if error == float("inf"):
            return "the tuned output is not finite"
        return f"the tuned output is off by {error:.2e}, more than {self._tolerance:g}"


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """``|t - r| / |r|`` over all elements; infinite when ``tensor`` holds anything that is not finite."""
    if not bool(torch.isfinite(tensor).all()):
        return float("inf")
    return float((tensor - reference).norm() / reference.norm().clamp_min(1e-20))


def edges(bucket: int) -> list[int]:
    """Token counts served by ``bucket`` that are worth a look: just below it, just above half of it, and an odd one."""
    inside = {bucket - 1, bucket // 2 + 1, (bucket * 3 // 4) | 1}
    return sorted(n for n in inside if bucket // 2 < n < bucket)
