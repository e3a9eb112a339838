"""What follows from verification: a choice that must go goes now, for later starts too, and the report says so."""

from __future__ import annotations

import logging

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.cache_phase import CachePhase
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.plan import Step
from sglang.srt.autotune.report import StageReport, StepReport
from sglang.srt.autotune.timer import OpTimer
from sglang.srt.autotune.verify import Verifier

logger = logging.getLogger(__name__)


class Judge:
    """Compares each tuned step with the default and acts on the verdict; ranks that choose alike call it together."""

    def __init__(
        self,
        host: Host,
        level: str,
        agreement: Agreement,
        cache: CachePhase,
        report: StageReport,
        timer: OpTimer,
    ) -> None:
        self._host, self._cache, self._report = host, cache, report
        self._verifier = Verifier(host, level, agreement.within(host.topology.alike, "verdicts"), timer)

    def judge(self, step: Step, step_report: StepReport) -> None:
        """Fill in the step's times and error; a choice that is wrong or slower goes back to the default."""
        verdict = self._verifier.judge(step)
        step_report.default_ms, step_report.tuned_ms = verdict.default_ms, verdict.tuned_ms
        step_report.relative_error = verdict.relative_error
        if verdict.doubt is not None:
            step_report.note = verdict.doubt
            self._report.warnings.append(f"step {step.name}: {verdict.doubt}")
            logger.error("FlashInfer autotune, step %s: %s", step.name, verdict.doubt)
        if verdict.fault is None:
            return
        if verdict.wrong_ops:
            self._cache.block(step, verdict.wrong_ops, verdict.fault)
            logger.error("FlashInfer autotune, step %s: %s; back to the default", step.name, verdict.fault)
        self._cache.back_to_default(step, self._ops_to_give_up(verdict.wrong_ops))
        step_report.tuned_ms = verdict.default_ms
        step_report.note = f"{verdict.fault}: back to the default"

    def _ops_to_give_up(self, wrong_ops: tuple[str, ...]) -> tuple[str, ...]:
        """An op with several runners goes back to the first: with an inner op's default its runner would be slow."""
        outer = tuple(op.name for op in self._host.tuned_ops if op.name in self._host.op_names)
        return tuple(dict.fromkeys((*wrong_ops, *outer))) or self._host.op_names


def agree_on_winners(host: Host, agreement: Agreement, cache: CachePhase, report: StageReport) -> None:
    """Ranks that must choose alike compare what they chose; the lowest rank's choice repairs a difference."""
    alike = agreement.within(host.topology.alike, "winners")
    if alike.is_alone:
        return
    rank = host.topology.rank
    answers = alike.gather("winners", cache.winners())
    first, mine = answers[alike.ranks[0]], answers[rank]
    different = {
        question: first[question]
        for question in mine
        if question in first and first[question] != mine[question]
    }
    if not different:
        return
    cache.adopt({key: choice for key, *choice in different.values()})
    report.disagreements = [
        {"key": key, "rank": rank, "had": mine[question][1:], "now": choice}
        for question, (key, *choice) in different.items()
    ]
    logger.warning(
        "FlashInfer autotune: rank %d chose differently from rank %d for %d records and took its choices",
        rank,
        alike.ranks[0],
        len(different),
    )
