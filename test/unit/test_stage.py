"""The stage on one rank: what it tunes, keeps, loads, skips and reports."""

import json
import os
import time

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune import cache_phase, flashinfer_api
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.failures import StepFailed
from sglang.srt.autotune.plan import Limits
from sglang.srt.autotune.records.record import with_runner
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.layers.moe.portfolio import OP_NAME
from sglang.srt.layers.moe.reference import ReferenceMoE
from support.tiny_host import TinyHost, start

STEPS = ["decode 1", "decode 2", "decode 4", "prefill 16", "prefill 8"]


@pytest.fixture(autouse=True)
def clean_tuner():
    yield
    AutoTuner.get().clear_cache()


def names(report):
    return [f"{step.phase} {step.num_tokens}" for step in report.steps]


def sources(report):
    return {f"{step.phase} {step.num_tokens}": step.source for step in report.steps}


def stored_keys(report):
    document = json.loads(open(report.cache_path).read())
    return {key for key in document if not key.startswith("_")}


def test_a_cold_start_tunes_every_step_and_leaves_no_fallback(tmp_path):
    report = start(tmp_path)
    assert report.status == "completed"
    assert names(report) == STEPS
    assert report.profiles_tuned == 5 and report.records.tuned == 5
    assert report.fallbacks == 0
    assert set(sources(report).values()) == {"tuned"}
    for step in report.steps:
        assert step.default_ms > 0 and step.tuned_ms > 0 and step.relative_error < 1e-4
        assert OP_NAME in step.winners


def test_a_second_start_tunes_nothing_and_writes_nothing(tmp_path):
    first = start(tmp_path)
    before = (open(first.cache_path, "rb").read(), sorted(p.name for p in tmp_path.rglob("*")))
    second = start(tmp_path)
    assert second.status == "completed"
    assert second.profiles_tuned == 0 and second.fallbacks == 0
    assert second.records.user == 5
    assert set(sources(second).values()) == {"user"}
    assert (open(first.cache_path, "rb").read(), sorted(p.name for p in tmp_path.rglob("*"))) == before
    assert second.steps[0].tuned_ms == pytest.approx(first.steps[0].tuned_ms), "stored times are shown again"


def test_what_was_tuned_is_what_serves_afterwards(tmp_path):
    host = TinyHost()
    first = start(tmp_path, host)
    again = start(tmp_path, host)
    assert [step.winners for step in again.steps] == [step.winners for step in first.steps]
    with flashinfer_api.observed() as lookups:
        for num_tokens in (1, 3, 4, 7, 16):
            host.op_probe(num_tokens).run()
    assert not lookups.fallbacks


def test_deleting_one_record_tunes_its_step_alone(tmp_path):
    first = start(tmp_path)
    (gone,) = [key for key in stored_keys(first) if "((4, 16)" in key]
    RecordStore(first.cache_path, flashinfer_api.environment()).remove([gone])
    second = start(tmp_path)
    assert second.profiles_tuned == 1
    assert {name for name, source in sources(second).items() if source == "tuned"} == {"decode 4"}
    assert start(tmp_path).profiles_tuned == 0


class Killed(BaseException):
    """Stands for a kill: nothing may catch it and tidy up."""


@pytest.mark.parametrize("fatal", range(5))
def test_a_start_killed_at_any_step_resumes_with_the_finished_ones(tmp_path, fatal):
    def between(shape):
        if len(host.forwards) == fatal + 1:
            raise Killed

    host = TinyHost(between=between)
    with pytest.raises(Killed):
        start(tmp_path, host)
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0
    assert [step for step, source in sources(report).items() if source == "user"] == STEPS[:fatal]
    assert report.profiles_tuned == len(STEPS) - fatal


def test_disabled_names_the_flag_and_runs_no_forward(tmp_path):
    host = TinyHost()
    report = start(tmp_path, host, disabled=True)
    assert report.status == "skipped" and "--disable-flashinfer-autotune" in report.reason
    assert not host.forwards and not list(tmp_path.rglob("*.json"))


def test_deterministic_inference_skips_the_stage(tmp_path):
    report = start(tmp_path, deterministic=True)
    assert report.status == "skipped" and "--enable-deterministic-inference" in report.reason


def test_skipping_the_only_op_skips_the_stage(tmp_path):
    report = start(tmp_path, skip_ops=(OP_NAME,))
    assert report.status == "skipped" and "--flashinfer-autotune-skip-ops" in report.reason


def test_a_skipped_op_is_neither_profiled_nor_stored_and_an_unasked_one_is_named(tmp_path):
    host = TinyHost()
    host.op_names = (OP_NAME, "another::op")
    report = start(tmp_path, host, skip_ops=(OP_NAME, "never::asked"))
    assert report.status == "completed" and report.profiles_tuned == 0 and report.fallbacks == 0
    assert report.skipped_ops == {"names": [OP_NAME, "never::asked"], "never_asked": ["never::asked"]}
    assert not flashinfer_api.stored_entries()


def test_without_reuse_nothing_is_loaded_and_the_users_file_stays_as_it_is(tmp_path):
    first = start(tmp_path)
    before = open(first.cache_path, "rb").read()
    fresh = start(tmp_path, use_cache=False)
    assert fresh.profiles_tuned == 5 and fresh.records.user == 0
    assert fresh.cache_path != first.cache_path and "/runs/" in fresh.cache_path
    assert open(first.cache_path, "rb").read() == before
    assert start(tmp_path).profiles_tuned == 0


def test_records_of_an_op_that_is_gone_are_counted_apart_and_stay_in_the_file(tmp_path):
    first = start(tmp_path)
    document = json.loads(open(first.cache_path).read())
    old = {key.replace(OP_NAME, "sglang::reference_moe"): document[key] for key in stored_keys(first)}
    del document["_generation"]
    open(first.cache_path, "w").write(json.dumps(document | old))
    report = start(tmp_path)
    assert report.profiles_tuned == 0 and report.records.user == 5
    words = "5 user records of sglang::reference_moe, which no kernel here asks for"
    assert report.records.unused == [words]
    assert old.keys() <= stored_keys(report)


def test_prefill_can_be_left_out(tmp_path):
    assert names(start(tmp_path, include_prefill=False)) == STEPS[:3]


def test_other_limits_keep_what_they_cover(tmp_path):
    start(tmp_path, TinyHost(Limits((1, 2, 4), 4, 16)))
    report = start(tmp_path, TinyHost(Limits((1, 2, 4, 8), 8, 32)))
    assert {name for name, source in sources(report).items() if source == "tuned"} == {"prefill 32"}


def test_another_geometry_or_skip_list_has_its_own_file(tmp_path):
    paths = {
        start(tmp_path).cache_path,
        start(tmp_path, TinyHost(model={"num_experts": 8})).cache_path,
        start(tmp_path, skip_ops=("some::op",)).cache_path,
    }
    assert len(paths) == 3


def test_a_given_record_stands_over_the_users_and_is_not_tuned(tmp_path):
    first = start(tmp_path)
    (key,) = [key for key in stored_keys(first) if "((4, 16)" in key]
    given = tmp_path / "given.json"
    other = "DenseMoE" if "SortedMoE" in key else "SortedMoE"
    document = {"_metadata": flashinfer_api.environment(), with_runner(key, other): [other, 1]}
    given.write_text(json.dumps(document))
    report = start(tmp_path, given_records=(given,))
    assert report.profiles_tuned == 0
    assert report.records.given == 1 and report.records.user == 4
    assert {s.winners[OP_NAME] for s in report.steps if s.num_tokens == 4} == {f"{other} 1"}
    assert sources(report)["decode 4"] == "given"
    (words,) = report.records.superseded
    assert words.startswith(f"given record {other} 1 stands over user record ")
    assert sources(start(tmp_path))["decode 4"] == "user", "what was given never ends in the user's file"


def test_a_file_of_another_environment_is_reported_and_everything_is_tuned(tmp_path):
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"_metadata": {**flashinfer_api.environment(), "flashinfer_version": "0.0"}}))
    report = start(tmp_path, given_records=(given,))
    assert report.status == "completed" and report.profiles_tuned == 5
    (rejected,) = report.records.rejected
    assert "flashinfer_version" in rejected["reason"]


def test_out_of_memory_in_one_step_leaves_it_out_and_goes_on(tmp_path):
    def between(shape):
        if shape.op_tokens == 4:
            raise torch.cuda.OutOfMemoryError("tried to allocate 3 GiB")

    report = start(tmp_path, TinyHost(Limits((1, 2, 4), 4, 16), between=between))
    assert report.status == "completed"
    assert sources(report)["decode 4"] == "left out"
    assert "3 GiB" in report.left_out[0]["reason"]


def test_an_error_in_a_step_ends_the_start_and_the_next_leaves_the_step_out(tmp_path):
    def between(shape):
        if shape.op_tokens == 16:
            raise RuntimeError("illegal memory access")

    with pytest.raises(StepFailed, match="prefill 16.*illegal memory access"):
        start(tmp_path, TinyHost(between=between))
    healthy = TinyHost()
    report = start(tmp_path, healthy)
    assert report.status == "completed"
    assert sources(report)["prefill 16"] == "left out"
    assert "illegal memory access" in report.left_out[0]["reason"]
    assert len(healthy.forwards) and 16 not in {shape.op_tokens for shape in healthy.forwards}


def test_too_little_memory_for_a_step_leaves_it_out_before_it_runs(tmp_path):
    host = TinyHost()
    host.free_bytes = 1 << 10
    report = start(tmp_path, host)
    assert set(sources(report).values()) == {"left out"}
    assert "--mem-fraction-static" in report.left_out[0]["reason"]


def test_without_a_usable_flashinfer_the_engine_serves_untuned(tmp_path, monkeypatch, caplog):
    def broken():
        raise flashinfer_api.TuningUnavailable("FlashInfer cannot be imported (ImportError: x)")

    monkeypatch.setattr(flashinfer_api, "version", broken)
    report = start(tmp_path)
    assert report.status == "failed" and "cannot be imported" in report.reason
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_the_report_is_written_where_it_was_asked_for(tmp_path):
    path = tmp_path / "deep" / "report.json"
    start(tmp_path, report_path=path)
    document = json.loads(path.read_text())
    assert document["schema"] == 1 and document["status"] == "completed"
    assert document["ranks"][0]["profiles_tuned"] == 5
    assert {"records", "coverage", "steps", "verification"} <= set(document["timings"])


def test_a_report_that_cannot_be_written_is_an_error_line_not_a_failure(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert start(tmp_path, report_path=tmp_path / "file" / "report.json").status == "completed"
    assert "--flashinfer-autotune-report" in caplog.text


def test_a_lookup_that_still_falls_back_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_phase.CachePhase, "commit", lambda self, step, report: 0)
    host = TinyHost()
    for op in host.tuned_ops:  # an op that ignores its profiler: nothing is tuned, and that must show
        op.choose = type(op).choose.__get__(type("Deaf", (), {**vars(op), "profiler": None})())
    report = start(tmp_path, host)
    assert report.fallbacks == 5
    assert report.fallback_details[0].op == OP_NAME


class WrongAndFast(ReferenceMoE):
    """Tactic 3 takes no time and returns the wrong numbers, as some kernels have been known to."""

    wrong = 0.0

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        if tactic == 3:
            return torch.full_like(inputs[0], self.wrong)
        return super().forward(inputs, tactic, do_preparation, **kwargs)


class Slower(ReferenceMoE):
    """The only candidate beside the default is a slow one."""

    def get_valid_tactics(self, inputs, profile):
        return [3]

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        if tactic == 3:
            time.sleep(0.02)  # far above what a busy machine adds to the default
        return super().forward(inputs, tactic, do_preparation, **kwargs)


def notes_on_outputs(report):
    """What the report says against choices, without what a busy machine makes of their times."""
    return [step.note for step in report.steps if step.note and "slower than the default" not in step.note]


def host_with(runner, **changes):
    host = TinyHost(**changes)
    host.runner.op.runners = [runner]
    return host


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_fast_but_wrong_tactic_goes_back_to_the_default_now_and_is_blocked_for_later(
    tmp_path, wrong, monkeypatch
):
    monkeypatch.setenv(flashinfer_api.BLOCKLIST_VARIABLE, "")
    runner = WrongAndFast()
    runner.wrong = wrong
    host = host_with(runner)
    report = start(tmp_path, host)
    assert report.status == "completed" and report.fallbacks == 0
    for step in report.steps:
        assert step.winners[OP_NAME] == "WrongAndFast default"
        assert "back to the default" in step.note
    (blocklist,) = tmp_path.rglob("tactics_blocklist.json")
    assert json.loads(blocklist.read_text())["invalid_tactics"] == {f"{OP_NAME}::WrongAndFast": [3]}
    os.remove(report.cache_path)
    later = start(tmp_path, host_with(runner))
    assert os.environ[flashinfer_api.BLOCKLIST_VARIABLE] == str(blocklist)
    assert not notes_on_outputs(later), "the blocked tactic was tried again"
    assert "WrongAndFast 3" not in {step.winners[OP_NAME] for step in later.steps}


def test_a_wrong_tactic_passes_unseen_only_when_verification_is_off(tmp_path):
    report = start(tmp_path, host_with(WrongAndFast()), verify="off")
    assert {step.winners[OP_NAME] for step in report.steps} == {"WrongAndFast 3"}


def test_a_choice_that_is_slower_than_the_default_goes_back_to_it(tmp_path):
    host = host_with(Slower())

    def ensure_slow_wins(op_name, runners, config, inputs, kwargs):
        flashinfer_api.file_winner(op_name, runners[0], config, inputs, 3)

    monkey = pytest.MonkeyPatch()
    monkey.setattr(CpuProfiler, "ensure_tuned", lambda self, *args: ensure_slow_wins(*args))
    try:
        report = start(tmp_path, host)
    finally:
        monkey.undo()
    assert {step.winners[OP_NAME] for step in report.steps} == {"Slower default"}
    assert all("slower than the default" in step.note for step in report.steps)
    assert start(tmp_path, host_with(Slower())).profiles_tuned == 0, "the default is stored as the choice"


def test_full_verification_compares_with_a_float32_reference_and_at_bucket_edges(tmp_path, monkeypatch):
    seen = []
    original = TinyHost.op_probe
    monkeypatch.setattr(TinyHost, "op_probe", lambda self, n: (seen.append(n), original(self, n))[1])
    report = start(tmp_path, verify="full")
    assert not notes_on_outputs(report)
    assert {9, 13, 15} <= set(seen)


def test_a_default_that_is_itself_wrong_is_seen_by_full_verification(tmp_path):
    class WrongAlways(ReferenceMoE):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            return torch.zeros_like(inputs[0])

    report = start(tmp_path, host_with(WrongAlways()), verify="full")
    assert all("off by" in step.note for step in report.steps)


def test_a_spent_budget_keeps_what_was_tuned_and_the_next_start_goes_on(tmp_path):
    def between(shape):
        time.sleep(0.05)

    report = start(tmp_path, TinyHost(between=between), budget_s=0.12)
    done = [name for name, source in sources(report).items() if source == "tuned"]
    left = [name for name, source in sources(report).items() if source == "over budget"]
    assert done and left and done + left == STEPS, "hottest first, then nothing"
    assert report.status == "completed" and "left to the next start" in report.reason
    later = start(tmp_path)
    assert [name for name, source in sources(later).items() if source == "tuned"] == left


def test_an_estimate_precedes_the_first_step_and_takes_the_pace_of_the_last_start(tmp_path, caplog):
    caplog.set_level("INFO")
    start(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    (estimate,) = [line for line in lines if "will take about" in line]
    assert "5 steps at 0.35 s, as measured with the built-in model" in estimate
    assert lines.index(estimate) < next(i for i, line in enumerate(lines) if "completed in" in line)
    caplog.clear()
    start(tmp_path, TinyHost(Limits((1, 2, 4), 4, 64)))
    (estimate,) = [r.getMessage() for r in caplog.records if "will take about" in r.getMessage()]
    assert "2 steps" in estimate and "the pace of the last start here" in estimate
    caplog.clear()
    start(tmp_path, TinyHost(Limits((1, 2, 4), 4, 64)))
    assert "will take about" not in caplog.text
