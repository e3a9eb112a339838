"""The startup autotune stage, told in its order.

decide -> plan -> records -> coverage -> steps -> verification -> report. Ranks whose forwards are coupled take
every branch together: whatever could differ between them is put to a vote before anything depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.agreement import Agreement, AgreementError
from sglang.srt.autotune.blocklist import put_in_force
from sglang.srt.autotune.cache_phase import CachePhase, blocklist_of
from sglang.srt.autotune.closing import close
from sglang.srt.autotune.contenders import agree_on_runners, compile_choices, inner_ops
from sglang.srt.autotune.decision import Decision, decide
from sglang.srt.autotune.estimate import estimate, measured_pace
from sglang.srt.autotune.failures import StepFailed, describe, is_peer_failure
from sglang.srt.autotune.flashinfer_api import TuningUnavailable
from sglang.srt.autotune.host import Host
from sglang.srt.autotune.journal import Journal, left_out_by_any
from sglang.srt.autotune.megamoe.host import MegaMoEHost
from sglang.srt.autotune.megamoe.staging import stage_profiles
from sglang.srt.autotune.ops import MEGAMOE_OP, asks_the_tuner
from sglang.srt.autotune.plan import Plan, Step, make_plan
from sglang.srt.autotune.progress import Listener, StageProgress
from sglang.srt.autotune.records.placement import sm_name
from sglang.srt.autotune.report import (
    FallbackReport,
    StageReport,
    StepReport,
    capacities_at_default,
    describe_engine,
)
from sglang.srt.autotune.session import Session
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.autotune.timer import OpTimer
from sglang.srt.autotune.verdicts import Judge, agree_on_winners
from sglang.srt.autotune.verify import Coverage, coverage_of

logger = logging.getLogger(__name__)

LEFT_OUT, OVER_BUDGET = "left out", "over budget"
SAME_FLAGS = "start every rank with the same flags"


def run_stage(
    host: Host,
    settings: StageSettings,
    agreement: Agreement,
    listener: Listener | None = None,
) -> StageReport:
    """Run the stage on this rank and report what happened. Called before any graph is captured.

    Tuning that cannot be had leaves the engine untuned with one ERROR line and status ``failed``; a user's
    switch or unsuitable hardware gives status ``skipped``.

    Raises:
        AgreementError: a coupled rank is missing, failed, or was started with other flags.
        StepFailed: a step failed in a forward that other ranks take part in.
    """
    started = time.monotonic()
    report = StageReport(engine=describe_engine(host))
    stage = _Stage(host, settings, agreement, report, listener)
    try:
        stage.run()
    except TuningUnavailable as error:
        if stage.has_begun and not agreement.is_alone:  # the others go on: they must not wait for this rank
            agreement.fail(describe(error))
            raise
        report.status, report.reason = "failed", str(error)
        if stage.is_first:
            logger.error("FlashInfer autotune failed, serving untuned: %s", error)
    except Exception as error:
        agreement.fail(describe(error))
        raise
    report.seconds = time.monotonic() - started
    close(report, host.topology, agreement, settings.report_path)
    return report


class _Stage:
    """The state that the parts of one run share; `run` is the story."""

    def __init__(
        self,
        host: Host,
        settings: StageSettings,
        agreement: Agreement,
        report: StageReport,
        listener: Listener | None,
    ) -> None:
        self.host, self.settings, self.agreement = host, settings, agreement
        self.report, self.listener = report, listener
        self.is_first = host.topology.rank == 0
        self.has_begun = False
        self.step_reports: dict[Step, StepReport] = {}

    def run(self) -> None:
        decision = self._decide()
        if not decision.run:
            self.report.status, self.report.reason = "skipped", decision.reason
            if self.is_first:
                logger.info("FlashInfer autotune skipped: %s", decision.reason)
            return

        plan = self._plan()
        self._check_that_tuning_can_be_had()
        self.report.warnings += agree_on_runners(self.host, self.agreement)
        self.has_begun = True
        if self.is_first:
            self._log_plan(plan)

        with self._timed("records"):
            cache = CachePhase(self.host, self.settings, self.report)
            cache.load()

        with self.host.forward_context(), Journal(cache.journal_path) as journal:
            steps = self._with_headroom(self._without_left_out(plan.steps, cache, journal))
            if cache.merged_count:
                with self._timed("kernels"):
                    self.agreement.announce("compiling the kernels that records name")
                    compile_choices(self.host, steps, self.settings.skip_ops)
            with self._timed("coverage"):
                covered = self._agree_on_coverage(steps, cache, journal)
            todo = [step for step in steps if step not in covered and not self._is_left_out(step)]
            self._log_estimate(todo)
            with self._timed("steps"):
                self._tune(todo, cache, journal)
            self.report.timings["steps"] -= self.report.timings.get("verification", 0.0)
            with self._timed("verification"):
                self._check_coverage(covered, cache, journal)
            if self.host.megamoe is not None:
                with self._timed("megamoe"):
                    self._stage_megamoe(self.host.megamoe, plan, cache, journal)
        agree_on_winners(self.host, self.agreement, cache, self.report)
        cache.finish()
        self.report.status = "completed"
        self.report.reason = self._summary(todo)

    # decide ----------------------------------------------------------------------------------------------

    def _decide(self) -> Decision:
        settings, host = self.settings, self.host
        self.agreement.announce("deciding whether to tune")
        decision = decide(
            disabled=settings.disabled,
            deterministic=settings.deterministic,
            device=host.device.type,
            capability=host.capability,
            tunable_ops=host.op_names,
            skip_ops=settings.skip_ops,
            moe_backend=host.moe_backend,
        )
        self.report.skipped_ops = {"names": list(settings.skip_ops), "never_asked": []}
        self.agreement.all_agree(
            "skip list (--flashinfer-autotune-skip-ops)", list(settings.skip_ops), SAME_FLAGS
        )
        answers = self.agreement.gather("decision to tune", [decision.run, decision.reason])
        for rank, (run, reason) in answers.items():
            if not run:
                where = "" if self.agreement.is_alone or not decision.run else f"rank {rank}: "
                return Decision(False, where + reason)
        return decision

    # plan ------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        plan = make_plan(
            self.host.limits,
            include_prefill=self.settings.include_prefill,
            include_steps=asks_the_tuner(self.host.op_names),
        )
        self.report.plan = plan.to_json()
        self.agreement.all_agree("plan", [[s.phase.value, s.bucket] for s in plan.steps], SAME_FLAGS)
        for step in plan.steps:
            self.step_reports[step] = StepReport(step.phase.value, step.bucket)
        self.report.steps = list(self.step_reports.values())
        return plan

    def _check_that_tuning_can_be_had(self) -> None:
        """Raise on every coupled rank when one of them cannot tune."""
        problem = None
        try:
            flashinfer_api.version()
            put_in_force(blocklist_of(self.settings.cache_root, sm_name(self.host.capability)))
            flashinfer_api.environment()  # the first exchange of files: there must be a place for it
            if self.host.device.type == "cuda":
                flashinfer_api.load_timing_module()
        except TuningUnavailable as error:
            problem = str(error)
        answers = self.agreement.gather("whether tuning can be had", problem)
        for rank, answer in answers.items():
            if answer is not None:
                raise TuningUnavailable(answer if self.agreement.is_alone else f"rank {rank}: {answer}")

    def _log_plan(self, plan: Plan) -> None:
        if not plan.steps:
            logger.info(
                "Running FlashInfer autotune: MegaMoE at capacities %s", " ".join(map(str, plan.capacities))
            )
            return
        decode = [step.bucket for step in plan.steps if step.phase.value == "decode"]
        prefill = [step.bucket for step in plan.steps if step.phase.value == "prefill"]
        logger.info(
            "Running FlashInfer autotune: %d steps, decode at %s tokens, %s (ops: %s)",
            len(plan.steps),
            " ".join(map(str, decode)),
            f"prefill at {' '.join(map(str, prefill))} tokens" if prefill else "no prefill",
            ", ".join(op for op in self.host.op_names if op not in self.settings.skip_ops),
        )

    def _log_estimate(self, todo: Sequence[Step]) -> None:
        if not self.is_first or not todo:
            return
        records = self.report.cache_path
        value = estimate(
            num_steps=len(todo),
            seconds_per_step=None if records is None else measured_pace(Path(records).parent),
            num_capacities=0,
            num_untuned_capacities=0,
            device=self.host.device.type,
            gpu=self.report.environment.get("gpu"),
            will_run=True,
        )
        logger.info("FlashInfer autotune will take about %.0f s: %s", value["seconds"], value["basis"])

    # which steps can run ---------------------------------------------------------------------------------

    def _without_left_out(self, steps: Sequence[Step], cache: CachePhase, journal: Journal) -> list[Step]:
        """Leave out the steps that broke earlier starts of any rank, and what is stored for them."""
        broken = left_out_by_any(self.agreement, journal, "steps that broke earlier starts")
        for step in steps:
            if left := broken.get(step.name):
                self._leave_out(step, f"{left.reason}; its records are not used; {left.remedy}")
        if buckets := {step.bucket for step in steps if step.name in broken}:
            cache.reload_without(buckets)  # it may have been a record that broke the start
        return [step for step in steps if step.name not in broken]

    def _with_headroom(self, steps: Sequence[Step]) -> list[Step]:
        """All coupled ranks have the memory for a step, or none runs it."""
        free = self.host.free_memory_bytes()
        needed = [self.host.step_memory_bytes(step.shape) for step in steps]
        answers = self.agreement.gather(f"headroom for {' '.join(s.name for s in steps)}", [free, needed])
        able = []
        for index, step in enumerate(steps):
            for rank, (rank_free, rank_needed) in answers.items():
                if rank_free is not None and rank_free < rank_needed[index]:
                    who = "" if self.agreement.is_alone else f"rank {rank} has "
                    self._leave_out(
                        step,
                        f"{who}{rank_free / 2**30:.2f} GiB free of the {rank_needed[index] / 2**30:.2f} GiB "
                        "it needs; lower --mem-fraction-static",
                    )
                    break
            else:
                able.append(step)
        return able

    def _leave_out(self, step: Step, reason: str) -> None:
        self.step_reports[step].source = LEFT_OUT
        self.step_reports[step].note = reason
        self.report.left_out.append({"step": step.name, "reason": reason})
        if self.is_first:
            logger.warning("FlashInfer autotune leaves out step %s: %s", step.name, reason)

    def _is_left_out(self, step: Step) -> bool:
        return self.step_reports[step].source == LEFT_OUT

    def _fail(self, step: Step, journal: Journal, error: Exception) -> None:
        """Leave the step out when it ran out of memory and nobody else takes part in it.

        Any other failure ends the start on every coupled rank: their forwards may be waiting for this one.
        """
        message = describe(error)
        if self.agreement.is_alone or not is_peer_failure(error):
            journal.failed(step.name, message)
        if self.agreement.is_alone and isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
            self._leave_out(step, f"out of memory: {message}")
            return
        raise StepFailed(
            f"rank {self.host.topology.rank} failed in autotune step {step.name} ({message}); "
            "the next start leaves this step out"
        ) from error

    # coverage --------------------------------------------------------------------------------------------

    def _agree_on_coverage(
        self, steps: Sequence[Step], cache: CachePhase, journal: Journal
    ) -> dict[Step, Coverage]:
        """Steps whose forward finds only records, on every coupled rank; records of the others are dropped.

        A rank must not keep records of a step that another rank will tune: its lookups would hit where the
        others profile, and their reductions would wait for it.
        """
        self.agreement.announce("checking which steps the records cover")
        have_records = self.agreement.gather("whether records were loaded", cache.merged_count > 0)
        if not any(have_records.values()):
            return {}
        found = {step: self._coverage(step, cache, journal, every_layer=False) for step in steps}
        mine = [coverage is not None and coverage.complete for coverage in found.values()]
        answers = self.agreement.gather("coverage of the steps", mine)
        covered, uncovered_buckets = {}, set()
        for index, (step, coverage) in enumerate(found.items()):
            if coverage is not None and all(answer[index] for answer in answers.values()):
                covered[step] = coverage
            else:
                uncovered_buckets.add(step.bucket)
        if not self.agreement.is_alone and uncovered_buckets:
            given = self.agreement.gather("records given to the ranks", cache.given_keys())
            cache.reload_without(uncovered_buckets, set.intersection(*map(set, given.values())))
        return covered

    def _coverage(
        self, step: Step, cache: CachePhase, journal: Journal, *, every_layer: bool = True
    ) -> Coverage | None:
        """None when the forward fails and nobody else takes part in it: then its records are dropped."""
        skip_ops = self.settings.skip_ops
        journal.begin(step.name)
        try:
            coverage = coverage_of(self.host, step, skip_ops, every_layer=every_layer)
        except Exception as error:
            out_of_memory = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
            if not self.agreement.is_alone or out_of_memory or not cache.reject(step, describe(error)):
                self._fail(step, journal, error)
                return None
            coverage = None
        journal.done(step.name)
        return coverage

    # steps -----------------------------------------------------------------------------------------------

    def _tune(self, steps: list[Step], cache: CachePhase, journal: Journal) -> None:
        """Tune and judge step by step; each is committed before the next begins."""
        alike = self.agreement.within(self.host.topology.alike, "alike")
        timer = OpTimer(self.host.device)
        session = Session(
            self.host,
            self.settings.skip_ops,
            lambda times: alike.mean_times("times of the candidates", times),
            timer,
        )
        judge = Judge(self.host, self.settings.verify, self.agreement, cache, self.report, timer)
        began = time.monotonic()
        progress = StageProgress(len(steps), visible=self.is_first and bool(steps), listener=self.listener)
        with progress:
            for step in steps:
                progress.begin(step.name)
                self.agreement.announce(f"step {step.name}")
                if not self._is_over_budget(step, began) and self._with_headroom([step]):
                    self._tune_one(step, session, judge, cache, journal)
                progress.end()
        for problem in session.failed_candidates():
            self.report.warnings.append(problem)
            logger.warning("FlashInfer autotune: %s", problem)

    def _is_over_budget(self, step: Step, began: float) -> bool:
        """Whether the budget is spent on some rank; then no rank begins this step."""
        budget_s = self.settings.budget_s
        if not budget_s:
            return False
        spent = self.agreement.gather(f"budget before step {step.name}", time.monotonic() - began)
        if max(spent.values()) < budget_s:
            return False
        report = self.step_reports[step]
        report.source = OVER_BUDGET
        report.note = f"--flashinfer-autotune-budget {budget_s:g} s was spent; the next start goes on"
        return True

    def _tune_one(
        self, step: Step, session: Session, judge: Judge, cache: CachePhase, journal: Journal
    ) -> None:
        step_report, began = self.step_reports[step], time.monotonic()
        journal.begin(step.name)
        try:
            with session:
                lookups = session.tune(step)
            if lookups.out_of_memory:
                step_report.note = "some candidates could not be measured for want of memory"
            with self._timed("verification"):
                judge.judge(step, step_report)
        except (AgreementError, TuningUnavailable):
            raise
        except Exception as error:
            self._fail(step, journal, error)
            cache.forget(step)
            return
        step_report.profiles_tuned = cache.commit(step, step_report)
        step_report.seconds = time.monotonic() - began
        step_report.source = "tuned"
        self.report.profiles_tuned += step_report.profiles_tuned
        self.report.warnings += lookups.warnings
        journal.done(step.name)

    # verification ----------------------------------------------------------------------------------------

    def _check_coverage(self, covered: dict[Step, Coverage], cache: CachePhase, journal: Journal) -> None:
        """Every step finds only records with tuning off; a lookup that falls back is counted."""
        self.agreement.announce("checking that every step finds its records")
        asked_and_skipped: set[str] = set()
        checked: dict[Step, StepReport] = {}
        for step, step_report in self.step_reports.items():
            if step_report.source in (LEFT_OUT, OVER_BUDGET):
                continue
            coverage = covered.get(step) or self._coverage(step, cache, journal)
            if coverage is None:
                continue
            checked[step] = step_report
            asked_and_skipped |= coverage.skipped_ops
            for fallback in coverage.fallbacks:
                self.report.fallback_details.append(
                    FallbackReport(fallback.op_name, step.name, fallback.shapes)
                )
        cache.describe(checked, covered)
        self.report.fallbacks = len(self.report.fallback_details)
        # Whether an inner op is asked for depends on which runner won.
        asked_or_inner = asked_and_skipped | inner_ops(self.host)
        never = [op for op in self.settings.skip_ops if op not in asked_or_inner]
        self.report.skipped_ops["never_asked"] = never

    # MegaMoE ---------------------------------------------------------------------------------------------

    def _stage_megamoe(self, megamoe: MegaMoEHost, plan: Plan, cache: CachePhase, journal: Journal) -> None:
        """Tune and open the profiles of an engine that runs on MegaMoE; a draft model's are left alone."""
        if MEGAMOE_OP in self.settings.skip_ops or self.host.identity.draft:
            return
        progress = StageProgress(
            len(plan.capacities), visible=self.is_first, noun="MegaMoE capacities", listener=self.listener
        )

        def opened(capacity: int) -> None:
            progress.end()
            progress.begin(f"MegaMoE, capacity {capacity} is open")

        with progress:
            progress.begin("MegaMoE")
            report = stage_profiles(
                megamoe.profiles,
                plan.capacities,
                cache,
                self.agreement,
                dtype=megamoe.dtype,
                startup=megamoe.startup,
                free_bytes=megamoe.free_bytes,
                on_capacity=opened,
                journal=journal,
            )
        self.report.megamoe = report.to_json()
        self.report.profiles_tuned += report.tuned
        self.report.records.tuned += report.tuned
        self.report.records.user += report.cached
        self.report.warnings += report.problems

    # report ----------------------------------------------------------------------------------------------

    def _summary(self, todo: list[Step]) -> str:
        profiles, defaults = self.report.profiles_tuned, capacities_at_default(self.report.megamoe)
        at_default = f", MegaMoE's default at capacities {' '.join(map(str, defaults))}" if defaults else ""
        if not todo:
            covered = "nothing tuned" if defaults else "every step was covered by records"
            return (f"{profiles} MegaMoE profiles tuned" if profiles else covered) + at_default
        left = sum(report.source == OVER_BUDGET for report in self.step_reports.values())
        rest = f", {left} steps left to the next start" if left else ""
        steps = len(todo) - left
        tuned = f"{profiles} profile{'s' * (profiles != 1)} tuned in {steps} step{'s' * (steps != 1)}"
        return tuned + rest + at_default

    def _timed(self, name: str) -> _Stopwatch:
        """Adds the seconds of its block to ``timings``."""
        timings = self.report.timings
        return _Stopwatch(lambda seconds: timings.update({name: round(timings.get(name, 0.0) + seconds, 4)}))


class _Stopwatch:
    """Hands the seconds that its block took to ``done``."""

    def __init__(self, done: Callable[[float], Any]) -> None:
        self._done = done

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self._done(time.monotonic() - self._began)
