"""What tuning chooses is right, stable and never unjudged, whatever kernels, clocks and stored records do."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune import flashinfer_api, session, stage, timer
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.blocklist import Blocklist
from sglang.srt.autotune.cache_phase import CachePhase
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.plan import bucket_grid, make_plan
from sglang.srt.autotune.profiler import choose
from sglang.srt.autotune.report import StageReport
from sglang.srt.autotune.settings import StageSettings
from sglang.srt.autotune.verify import edges
from sglang.srt.layers.moe.portfolio import OP_NAME
from sglang.srt.layers.moe.reference import DenseMoE, ReferenceMoE, SortedMoE
from sglang.srt.layers.moe.tuned_op import TunedOp
from support.tiny_host import TinyHost, start

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def clean_tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(flashinfer_api.BLOCKLIST_VARIABLE, "")
    AutoTuner.get()  # it reads the variable once, and raises for a file that tests below put there
    yield
    AutoTuner.get().clear_cache()


def host_with(runner: ReferenceMoE, **changes) -> TinyHost:
    host = TinyHost(**changes)
    host.runner.op.runners = [runner]
    return host


def edit_tactics(report: StageReport, tactic: object) -> None:
    """Change every stored tactic by hand, as a faulty or hostile writer would."""
    path = Path(report.cache_path)
    document = json.loads(path.read_text())
    document.pop("_generation")
    for key in [key for key in document if not key.startswith("_")]:
        document[key][1] = tactic
    path.write_text(json.dumps(document))


# Stored records


@pytest.mark.parametrize("tactic", [77, -2, True, 1.5, "1", [1, 2], None])
def test_a_stored_tactic_that_does_not_exist_is_a_miss_and_tuned_anew(tmp_path, tactic):
    edit_tactics(start(tmp_path), tactic)
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0 and report.profiles_tuned == 5
    assert start(tmp_path).profiles_tuned == 0, "the file is mended"


class Picky(ReferenceMoE):
    """Trusts its records, and cannot run tactic 3 where ``picky``."""

    validate_tactic = None
    picky = False

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        if tactic == 3 and self.picky:
            raise RuntimeError("tactic 3 needs another GPU")
        return super().forward(inputs, max(int(tactic), 0), do_preparation, **kwargs)


def test_records_that_a_forward_cannot_run_with_are_dropped_told_and_tuned_anew(tmp_path, caplog):
    runner = Picky()
    edit_tactics(start(tmp_path, host_with(runner)), 3)
    runner.picky = True
    report = start(tmp_path, host_with(runner))
    assert report.status == "completed" and report.fallbacks == 0 and report.profiles_tuned == 5
    assert len(report.records.rejected) == 5
    assert "tactic 3 needs another GPU" in report.records.rejected[0]["reason"]
    assert "cannot be run" in caplog.text
    assert start(tmp_path, host_with(runner)).records.rejected == []


def test_dropping_the_records_of_one_bucket_keeps_what_was_tuned_at_another(tmp_path):
    start(tmp_path, include_prefill=False)
    AutoTuner.get().clear_cache()
    host, report = TinyHost(), StageReport()
    cache = CachePhase(host, StageSettings(cache_root=tmp_path), report)
    cache.load()
    probe = host.op_probe(16)
    inputs = [probe._hidden, probe._ids, probe._weights, host.w13, host.w2]
    op = host.runner.op
    live = flashinfer_api.file_winner(OP_NAME, op.runners[0], op.config, inputs, 2)
    step = next(step for step in make_plan(host.limits).steps if step.bucket == 4)
    assert cache.reject(step, "cannot be run")
    stored = flashinfer_api.stored_entries()
    assert stored[live][1] == 2, "serving would lose a choice that this start made"
    assert not [key for key in stored if "((4, 16)" in key]
    assert len([key for key in stored if "((1, 16)" in key or "((2, 16)" in key]) == 2


def test_a_step_that_broke_a_start_is_left_out_together_with_its_records(tmp_path):
    report = start(tmp_path)
    Path(report.cache_path).with_suffix(".journal").write_text('{"decode 4": {"vanished": 2}}')
    report = start(tmp_path)
    (left,) = report.left_out
    assert left["step"] == "decode 4" and "its records are not used" in left["reason"]
    assert not [key for key in flashinfer_api.stored_entries() if "((4, 16)" in key]
    assert report.profiles_tuned == 0


def test_nothing_reaches_the_disk_before_it_was_judged(tmp_path, monkeypatch):
    judged: list[str] = []
    original = stage.Judge.judge

    def judge(self, step, step_report):
        stored = "".join(path.read_text() for path in tmp_path.rglob("rank_*.json"))
        assert f"(({step.bucket}, 16)" not in stored
        judged.append(step.name)
        original(self, step, step_report)

    monkeypatch.setattr(stage.Judge, "judge", judge)
    start(tmp_path)
    assert len(judged) == 5


# Wrong outputs


class Wrong(ReferenceMoE):
    """Adds ``by`` to the output of the tactics in ``wrong``; tactic 2 takes no time."""

    wrong: tuple[int, ...] = ()
    by = 1.0
    above = 0

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        if tactic in self.wrong and inputs[0].shape[0] > self.above:
            return torch.full_like(inputs[0], self.by)
        return super().forward(inputs, tactic, do_preparation, **kwargs)


def file_winner(monkeypatch: pytest.MonkeyPatch, tactic: int) -> None:
    """Tuning that always finds ``tactic`` fastest."""
    monkeypatch.setattr(
        CpuProfiler,
        "ensure_tuned",
        lambda self, op_name, runners, config, inputs, kwargs: flashinfer_api.file_winner(
            op_name, runners[0], config, inputs, tactic
        ),
    )
    monkeypatch.setattr(timer.OpTimer, "measure_ms", lambda self, run: 1.0)


@pytest.mark.parametrize("by", [math.nan, math.inf, 7.0])
def test_a_wrong_default_is_told_and_a_right_winner_stays(tmp_path, monkeypatch, by):
    file_winner(monkeypatch, 2)
    runner = Wrong()
    runner.wrong, runner.by = (-1,), by
    report = start(tmp_path, host_with(runner))
    assert {step.winners[OP_NAME] for step in report.steps} == {"Wrong 2"}
    assert all("default's output" in step.note for step in report.steps)
    assert len(report.warnings) == 5
    assert not list(tmp_path.rglob("tactics_blocklist.json"))


def test_where_neither_output_is_finite_nothing_is_blamed(tmp_path, monkeypatch):
    file_winner(monkeypatch, 2)
    runner = Wrong()
    runner.wrong, runner.by = (-1, 2), math.nan
    report = start(tmp_path, host_with(runner))
    assert all("neither" in step.note for step in report.steps)
    assert not list(tmp_path.rglob("tactics_blocklist.json"))


class WrongDense(DenseMoE):
    """The second runner of an op, wrong with tactic 1."""

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        out = super().forward(inputs, tactic, do_preparation, **kwargs)
        return out * 2 if tactic == 1 else out


def host_of_two() -> TinyHost:
    host = TinyHost()
    host.runner.op.runners = [SortedMoE(), WrongDense()]
    return host


def file_second_runner(monkeypatch: pytest.MonkeyPatch, tactic: int, times_ms: dict[str, float]) -> None:
    """Tuning that always finds the second runner fastest; the guard's clock says ``times_ms`` by default and tuned."""
    monkeypatch.setattr(
        CpuProfiler,
        "ensure_tuned",
        lambda self, op_name, runners, config, inputs, kwargs: (
            flashinfer_api.lookup(op_name, runners, config, inputs)
            or flashinfer_api.file_winner(op_name, runners[1], config, inputs, tactic)
        ),
    )

    def measure_ms(self, run):
        with flashinfer_api.observed() as lookups:
            run()
        return times_ms["default" if lookups.skipped_ops else "tuned"]

    monkeypatch.setattr(timer.OpTimer, "measure_ms", measure_ms)


def test_a_wrong_winner_of_another_runner_goes_back_to_the_first_and_is_blocked_under_its_name(
    tmp_path, monkeypatch
):
    file_second_runner(monkeypatch, 1, {"default": 1.0, "tuned": 1.0})
    report = start(tmp_path, host_of_two())
    assert {step.winners[OP_NAME] for step in report.steps} == {"SortedMoE default"}
    assert report.fallbacks == 0 and all("back to the default" in step.note for step in report.steps)
    (blocklist,) = tmp_path.rglob("tactics_blocklist.json")
    assert Blocklist(blocklist).read() == {f"{OP_NAME}::WrongDense": [1]}
    keys = [key for key in json.loads(Path(report.cache_path).read_text()) if not key.startswith("_")]
    assert len(keys) == 5 and all("'SortedMoE'" in key for key in keys)
    assert start(tmp_path, host_of_two()).profiles_tuned == 0


def test_a_slower_winner_of_another_runner_goes_back_to_the_first_and_is_not_blocked(tmp_path, monkeypatch):
    file_second_runner(monkeypatch, 0, {"default": 1.0, "tuned": 2.0})
    report = start(tmp_path, host_of_two())
    assert {step.winners[OP_NAME] for step in report.steps} == {"SortedMoE default"}
    assert all("slower than the default" in step.note for step in report.steps)
    assert not list(tmp_path.rglob("tactics_blocklist.json"))
    assert start(tmp_path, host_of_two()).profiles_tuned == 0


class Outer(DenseMoE):
    """A runner that asks the tuner for an op of its own, whose tactic 1 is wrong."""

    nested_ops = ("inner::op",)

    def __init__(self, inner) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        out = super().forward(inputs, 0, do_preparation, **kwargs)
        return out * 2 if self._inner.choose(inputs)[1] == 1 else out


def test_a_wrong_tactic_of_an_inner_op_is_blamed_and_not_the_runner_that_calls_it(tmp_path, monkeypatch):
    host = TinyHost()
    inner = TunedOp("inner::op", [SortedMoE()], 16, 3)
    host.runner.op.runners = [SortedMoE(), Outer(inner)]
    host.op_names = (OP_NAME, "inner::op")
    file_second_runner(monkeypatch, 0, {"default": 1.0, "tuned": 1.0})
    tune = CpuProfiler.ensure_tuned

    def tune_both(self, op_name, runners, config, inputs, kwargs):
        tune(self, op_name, runners, config, inputs, kwargs)
        if not flashinfer_api.lookup("inner::op", inner.runners, inner.config, inputs):
            flashinfer_api.file_winner("inner::op", inner.runners[0], inner.config, inputs, 1)

    monkeypatch.setattr(CpuProfiler, "ensure_tuned", tune_both)
    report = start(tmp_path, host)
    assert {step.winners[OP_NAME] for step in report.steps} == {"SortedMoE default"}
    assert all("inner::op" not in step.winners for step in report.steps), "nobody asks for it there"
    (blocklist,) = tmp_path.rglob("tactics_blocklist.json")
    assert Blocklist(blocklist).read() == {"inner::op::SortedMoE": [1]}


class WrongAtAnEdge(ReferenceMoE):
    """Tactic 2 is wrong at ``size`` tokens alone."""

    size = 0

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        out = super().forward(inputs, tactic, do_preparation, **kwargs)
        return out * 2 if tactic == 2 and inputs[0].shape[0] == self.size else out


@pytest.mark.parametrize(
    ("level", "size", "seen"), [("finite", 9, True), ("full", 15, True), ("off", 9, False)]
)
def test_a_winner_that_is_wrong_beside_its_bucket_alone_goes_back(tmp_path, monkeypatch, level, size, seen):
    file_winner(monkeypatch, 2)
    runner = WrongAtAnEdge()
    runner.size = size
    report = start(tmp_path, host_with(runner), verify=level)
    winners = {step.num_tokens: step.winners[OP_NAME] for step in report.steps}
    assert winners[16] == ("WrongAtAnEdge default" if seen else "WrongAtAnEdge 2")
    assert winners[8] == "WrongAtAnEdge 2"
    if seen:
        assert f"at {size} tokens" in next(step.note for step in report.steps if step.num_tokens == 16)


@pytest.mark.parametrize(
    ("bucket", "top", "inside"),
    [
        (1, 8, []),
        (2, 8, []),
        (4, 8, [3]),
        (8, 8, [5, 7]),
        (256, 8192, [129, 213, 255]),
        (2048, 8192, [1793, 1963, 2047]),
    ],
)
def test_edges_lie_within_what_a_bucket_serves(bucket, top, inside):
    assert edges(bucket, bucket_grid(top)) == inside


# Clocks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_times_that_are_none_leave_the_default_and_break_nothing(tmp_path, monkeypatch, value):
    monkeypatch.setattr(timer.OpTimer, "measure_ms", lambda self, run: value)
    readings = iter(range(10**9))
    clock = {math.inf: lambda: math.inf, -1.0: lambda: -float(next(readings))}.get(value, lambda: value)
    monkeypatch.setattr(session, "CpuProfiler", functools.partial(CpuProfiler, clock=clock))
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0
    assert {step.winners[OP_NAME] for step in report.steps} == {"SortedMoE default"}
    assert all(step.tuned_ms is None for step in report.steps)
    json.dumps(report.to_json(), allow_nan=False)
    assert start(tmp_path).profiles_tuned == 0


def test_what_is_no_time_wins_no_race():
    assert choose([2.0, math.nan, -1.0, 0.0, math.inf, 1.0]) == 5
    assert choose([math.nan, -1.0, 0.0]) == 0


def test_a_time_that_is_none_on_one_rank_is_none_in_the_mean():
    alone = Agreement.alone()
    assert alone.mean_times("t", [1.0, -1.0, 0.0, math.nan, math.inf]) == [1.0, *[math.inf] * 4]


class NoisyMachine:
    """A clock that forwards advance: each tactic takes its true time, give or take 2%, the same for all starts."""

    TRUE_MS = {
        1: {-1: 1.000, 0: 1.000, 1: 0.995, 2: 1.004, 3: 1.300},
        2: {-1: 1.000, 0: 1.000, 1: 0.992, 2: 0.990, 3: 1.080},
        4: {-1: 1.200, 0: 1.200, 1: 1.002, 2: 1.000, 3: 1.090},
        8: {-1: 1.500, 0: 1.500, 1: 1.400, 2: 1.006, 3: 1.000},
        16: {-1: 1.000, 0: 1.000, 1: 2.000, 2: 0.600, 3: 0.598},
    }

    def __init__(self, seed: int) -> None:
        self.now_s, self.dice = 0.0, random.Random(seed)

    def __call__(self) -> float:
        return self.now_s

    def runner(self) -> ReferenceMoE:
        machine = self

        class Timed(ReferenceMoE):
            def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
                bucket = 1 << (inputs[0].shape[0] - 1).bit_length()
                machine.now_s += 1e-3 * machine.TRUE_MS[bucket][tactic] * machine.dice.uniform(0.98, 1.02)
                return super().forward(inputs, tactic, do_preparation, **kwargs)

        return Timed()


def test_twenty_fresh_starts_under_one_noise_choose_the_same(tmp_path, monkeypatch):
    chosen = set()
    for seed in range(20):
        machine = NoisyMachine(seed)
        monkeypatch.setattr(session, "CpuProfiler", functools.partial(CpuProfiler, clock=machine))
        monkeypatch.setattr(timer.time, "perf_counter", machine)
        report = start(tmp_path / str(seed), host_with(machine.runner()))
        assert report.profiles_tuned == 5
        chosen.add(tuple(step.winners[OP_NAME] for step in report.steps))
    assert len(chosen) == 1, chosen
    # Near-ties go to the default, or to the first: a gain within the noise is none.
    by_bucket = dict(zip((step.num_tokens for step in report.steps), chosen.pop(), strict=True))
    assert by_bucket == {1: "Timed default", 2: "Timed default", 4: "Timed 1", 16: "Timed 2", 8: "Timed 2"}


# The blocklist


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"[1]"),
        lambda path: path.write_bytes(b'{"a":' * 50_000),
        lambda path: path.write_bytes(b'{"invalid_tactics": {"op::R": [{"a": 1}]}}'),
        lambda path: path.write_bytes(b'{"invalid_tactics": 3}'),
        fifo,
    ],
)
def test_a_blocklist_that_would_break_flashinfers_tuner_is_not_handed_to_it(tmp_path, monkeypatch, make):
    path = tmp_path / "list.json"
    make(path)
    monkeypatch.setenv(flashinfer_api.BLOCKLIST_VARIABLE, str(path))
    assert start(tmp_path / "root").status == "completed"
    assert flashinfer_api.blocklist_in_force() is None


def test_a_blocklist_that_the_user_named_stands(tmp_path, monkeypatch):
    path = tmp_path / "list.json"
    content = {
        "_metadata": flashinfer_api.environment(),
        "invalid_tactics": {f"{OP_NAME}::{runner}": [0, 1] for runner in ("SortedMoE", "DenseMoE")},
    }
    path.write_text(json.dumps(content))
    monkeypatch.setenv(flashinfer_api.BLOCKLIST_VARIABLE, str(path))
    report = start(tmp_path / "root")
    assert {step.winners[OP_NAME] for step in report.steps} == {"SortedMoE default"}


def test_what_another_build_found_wrong_is_set_aside_not_taken_over(tmp_path):
    blocklist = Blocklist(tmp_path / "b" / "tactics_blocklist.json")
    blocklist.add([("op", "R", 1)], "wrong", {"flashinfer_version": "1"})
    blocklist.add([("op", "R", 2)], "wrong", {"flashinfer_version": "2"})
    assert blocklist.read() == {"op::R": [2]}
    assert "tactics_blocklist.json.old-1" in os.listdir(tmp_path / "b")


def test_ranks_that_note_wrong_tactics_at_once_lose_none(tmp_path):
    blocklist = Blocklist(tmp_path / "tactics_blocklist.json")
    threads = [
        threading.Thread(target=blocklist.add, args=([("op", "R", number)], "wrong", {"gpu": "x"}))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(blocklist.read()["op::R"]) == list(range(8))
