"""Whether what was tuned is used, right, and faster.

Coverage: a step's forward runs with tuning off and must find only records; a lookup that falls back is counted
with its op and bucket. Comparison: the op of one layer runs with the tuned and with the default choice on the same
inputs. A choice that is wrong or slower goes back to the default at once, for all ranks that choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.host import Host, OpProbe
from sglang.srt.autotune.plan import Step, bucket_grid
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

    Times are milliseconds of the op of one layer; None where the clock gave none. ``fault`` says in words why the tuned
    choice must go; then ``wrong_ops`` are the ops to blame for a wrong output (none when it is merely slower).
    ``doubt`` says in words what is wrong and is no fault of the tuned choice.
    """

    default_ms: float | None
    tuned_ms: float | None
    relative_error: float
    fault: str | None = None
    wrong_ops: tuple[str, ...] = field(default=())
    doubt: str | None = None


#: What a comparison of two outputs shows, from harmless to damning for the tuned one.
_OFF, _DEFAULT_NOT_FINITE, _NEITHER_FINITE, _TUNED_NOT_FINITE = range(4)
_NOT_FINITE_WORDS = {
    _DEFAULT_NOT_FINITE: "the default's output is not finite",
    _NEITHER_FINITE: "neither the tuned nor the default's output is finite",
    _TUNED_NOT_FINITE: "the tuned output is not finite",
}


@dataclass(frozen=True, order=True)
class _Finding:
    """One comparison of outputs at ``num_tokens``; the larger, the worse."""

    kind: int
    error: float
    num_tokens: int

    @property
    def is_beyond_comparison(self) -> bool:
        """Whether there is no sound output to hold the tuned one against."""
        return self.kind in (_DEFAULT_NOT_FINITE, _NEITHER_FINITE)

    def words(self, tolerance: float) -> str:
        off = f"the tuned output is off by {self.error:.2e}, more than {tolerance:g}"
        return f"{_NOT_FINITE_WORDS.get(self.kind, off)}, at {self.num_tokens} tokens"


class Verifier:
    """Compares tuned with default choices. ``level``: off (times only), finite, or full (see `docs/autotune.md`)."""

    def __init__(self, host: Host, level: str, alike: Agreement, timer: OpTimer) -> None:
        self._host, self._level, self._alike, self._timer = host, level, alike, timer
        self._noise = NOISE["cuda" if host.device.type == "cuda" else "cpu"]
        self._tolerance = TOLERANCE.get(host.probe_dtype, TOLERANCE[torch.bfloat16])
        self._grid = bucket_grid(host.limits.max_op_tokens)

    def judge(self, step: Step) -> Verdict:
        """Check the step's choice; every rank that chooses alike calls this together."""
        with flashinfer_api.observed():
            probe = self._host.op_probe(step.bucket)
            worst = self._agree_on_worst(step, self._findings(step, probe))
            times = self._times(step, probe)
            error = 0.0 if worst is None else worst.error
            if worst is not None and worst.is_beyond_comparison:
                # Going back to the default would mend nothing; whoever looks into wrong outputs must know.
                return Verdict(*times, error, doubt=worst.words(self._tolerance))
            if worst is not None and worst.error > self._tolerance:
                if self._default_is_the_wrong_one(worst.num_tokens):
                    doubt = (
                        f"the default's output is wrong at {worst.num_tokens} tokens, the tuned one is right"
                    )
                    return Verdict(*times, error, doubt=doubt)
                blamed = self._ops_to_blame(self._host.op_probe(worst.num_tokens))
                return Verdict(*times, error, worst.words(self._tolerance), blamed)
            if self._is_slower(times):
                times = self._times(step, probe)
                if self._is_slower(times):
                    fault = (
                        f"tuned was slower than the default ({times[1] or inf:.4g} against {times[0]:.4g} ms)"
                    )
                    return Verdict(*times, error, fault)
        return Verdict(*times, error)

    def _findings(self, step: Step, probe: OpProbe) -> list[_Finding]:
        """What the outputs show at this level: at the bucket itself, at its edges, against the reference."""
        if self._level == "off":
            return []
        inside = edges(step.bucket, self._grid)
        # The fewest tokens leave the most padding; one more look there costs little.
        sizes = inside if self._level == "full" else inside[:1]
        findings = [self._compare(probe, step.bucket)]
        findings += [self._compare(self._host.op_probe(n), n) for n in sizes]
        if self._level == "full":
            rows, reference = probe.reference(REFERENCE_ROWS)
            findings.append(_finding(probe.run()[rows].float(), reference, step.bucket))
        return findings

    def _compare(self, probe: OpProbe, num_tokens: int) -> _Finding:
        tuned = probe.run().float()
        with flashinfer_api.only_defaults(self._host.op_names):
            default = probe.run().float()
        return _finding(tuned, default, num_tokens)

    def _agree_on_worst(self, step: Step, findings: list[_Finding]) -> _Finding | None:
        """The worst finding of all ranks, the same on each."""
        mine = max(findings, default=None)
        answer = None if mine is None else [mine.kind, mine.error, mine.num_tokens]
        answers = self._alike.gather(f"errors of {step.name}", answer)
        return max((_Finding(*answer) for answer in answers.values() if answer is not None), default=None)

    def _default_is_the_wrong_one(self, num_tokens: int) -> bool:
        """Whether the float32 reference sides with the tuned output against the default's, on every rank."""
        probe = self._host.op_probe(num_tokens)
        rows, reference = probe.reference(REFERENCE_ROWS)
        tuned = relative_error(probe.run()[rows].float(), reference)
        with flashinfer_api.only_defaults(self._host.op_names):
            default = relative_error(probe.run()[rows].float(), reference)
        sides_with_tuned = tuned <= self._tolerance < default
        return all(self._alike.gather(f"reference at {num_tokens} tokens", sides_with_tuned).values())

    def _times(self, step: Step, probe: OpProbe) -> tuple[float | None, float | None]:
        tuned_ms = self._timer.measure_ms(probe.run)
        with flashinfer_api.only_defaults(self._host.op_names):
            default_ms = self._timer.measure_ms(probe.run)
        mean = self._alike.mean_times(f"default and tuned time of {step.name}", [default_ms, tuned_ms])
        default, tuned = (None if time_ms == inf else time_ms for time_ms in mean)
        return default, tuned

    def _is_slower(self, times: tuple[float | None, float | None]) -> bool:
        """Without a time of the default nothing is known; a tuned choice that could not be timed is no choice."""
        default_ms, tuned_ms = times
        return default_ms is not None and (tuned_ms is None or tuned_ms > default_ms * (1 + self._noise))

    def _ops_to_blame(self, probe: OpProbe) -> tuple[str, ...]:
        """The ops whose default alone mends the output; all of them when no single one does.

        The default of an op with several runners mends what is wrong in an op that only one of them calls: then the
        inner one is to blame.
        """
        with flashinfer_api.only_defaults(self._host.op_names):
            default = probe.run().float()
        blamed = []
        for op in self._host.op_names:
            with flashinfer_api.only_defaults([op]):
                mended = probe.run().float()
            if relative_error(mended, default) <= self._tolerance:
                blamed.append(op)
        answers = self._alike.gather("ops to blame", blamed)
        of_any = [op for op in self._host.op_names if any(op in answer for answer in answers.values())]
        outer = {op.name for op in self._host.tuned_ops}
        inner = [op for op in of_any if op not in outer]
        return tuple(inner or of_any or self._host.op_names)


def _finding(tuned: torch.Tensor, reference: torch.Tensor, num_tokens: int) -> _Finding:
    tuned_is_finite = bool(torch.isfinite(tuned).all())
    if not bool(torch.isfinite(reference).all()):
        return _Finding(_DEFAULT_NOT_FINITE if tuned_is_finite else _NEITHER_FINITE, inf, num_tokens)
    if not tuned_is_finite:
        return _Finding(_TUNED_NOT_FINITE, inf, num_tokens)
    return _Finding(_OFF, relative_error(tuned, reference), num_tokens)


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """``|t - r| / |r|`` over all elements; infinite when either holds anything that is not finite."""
    if not bool(torch.isfinite(tensor).all() and torch.isfinite(reference).all()):
        return inf
    return float((tensor - reference).norm() / reference.norm().clamp_min(1e-20))


def edges(bucket: int, grid: Sequence[int]) -> list[int]:
    """Token counts below ``bucket`` that it serves and that are worth a look, ascending.

    One above the bucket before it (``2^k + 1``), an odd one between, and one below itself (``2^k - 1``).
    """
    before = max((b for b in grid if b < bucket), default=0)
    inside = {before + 1, ((before + 2 * bucket) // 3) | 1, bucket - 1}
    return sorted(n for n in inside if before < n < bucket)
