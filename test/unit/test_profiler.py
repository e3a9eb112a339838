"""How candidates are searched, timed and reduced over ranks, with a fake clock in place of a GPU's."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import inf

import pytest
import torch
from flashinfer.autotuner import AutoTuner, TunableRunner

from sglang.srt.autotune import flashinfer_api, gpu_tuner
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.gpu_tuner import GpuProfiler, compile_in_parallel, compile_threads
from sglang.srt.autotune.profiler import Candidate, choose
from sglang.srt.layers.moe.reference import DenseMoE, SortedMoE
from sglang.srt.layers.moe.tuned_op import TunedOp
from support.tiny_host import TinyHost, start


@pytest.fixture(autouse=True)
def clean_tuner():
    yield
    AutoTuner.get().clear_cache()


@dataclass(frozen=True)
class Space:
    method: str
    first: tuple
    second: tuple

    def tactic(self, i, j):
        return (self.method, self.first[i], self.second[j])


class Plain(TunableRunner):
    """Its tactics and how many milliseconds each takes; ``fails`` raise what they are mapped to."""

    def __init__(self, times_ms, fails=None) -> None:
        self.times_ms, self.fails, self.ran = times_ms, fails or {}, []

    def get_valid_tactics(self, inputs, profile):
        return [tactic for tactic in self.times_ms if tactic != -1]

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        self.ran.append(tactic)
        if tactic in self.fails:
            raise self.fails[tactic]
        return self.times_ms[tactic]


class First(Plain):
    pass


class Second(Plain):
    pass


class Factored(TunableRunner):
    """Two spaces of independent parts: a tactic takes the sum of its parts' milliseconds."""

    nested_ops = ()

    def __init__(self, *spaces: Space, broken: frozenset = frozenset()) -> None:
        self.spaces, self.broken = spaces, broken
        self.compiled, self.ran = [], []

    def tactic_space(self, inputs):
        return list(self.spaces)

    def get_valid_tactics(self, inputs, profile):
        raise AssertionError("a runner with a space is asked for it")

    def compile_jobs(self, inputs, tactics):
        return [lambda tactic=tactic: self.compiled.append(tactic) for tactic in tactics]

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        self.ran.append(tactic)
        method, first, second = tactic
        if method in self.broken:
            raise RuntimeError("does not compile")
        return first + second


@dataclass
class FakeTimer:
    """Takes what a runner returns for its milliseconds."""

    hopes: list = field(default_factory=list)

    def measure_ms(self, run, *, repeats=None, give_up_ms=inf):
        self.hopes.append(give_up_ms)
        return float(run())


@dataclass
class Reduced:
    """Keeps what the ranks exchange."""

    lengths: list = field(default_factory=list)
    others: dict = field(default_factory=dict)

    def __call__(self, times):
        self.lengths.append(len(times))
        extra = self.others.get(len(self.lengths) - 1, [0.0] * len(times))
        return [(a + b) / 2 for a, b in zip(times, extra, strict=True)] if any(extra) else times


def op_of(*runners) -> TunedOp:
    return TunedOp("test::op", runners, 16, 1)


INPUTS = [torch.zeros(4, 2)]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)

    def profiler(**changes):
        return GpuProfiler(**{"timer": FakeTimer(), "num_threads": 2, **changes})

    return profiler


def tuned(op, profiler) -> tuple[str, object]:
    op.profiler = profiler
    try:
        runner, tactic = op.choose(INPUTS)
    finally:
        op.profiler = None
    assert op.choose(INPUTS) == (runner, tactic), "serving chooses what was filed"
    return type(runner).__name__, tactic


def test_the_fastest_runner_and_tactic_are_filed(gpu):
    op = op_of(First({-1: 9.0}), Second({0: 5.0, 1: 3.0, 2: 4.0}))
    profiler = gpu()
    assert tuned(op, profiler) == ("Second", 1)
    (measurement,) = profiler.measurements
    assert measurement.winner == "Second 1"
    assert measurement.times_ms == pytest.approx(
        {"First -1": 9.0, "Second 0": 5.0, "Second 1": 3.0, "Second 2": 4.0}
    )


def test_a_factored_space_is_descended_one_part_at_a_time(gpu):
    few = Space("few", (5.0, 2.0, 8.0), (4.0, 1.0, 3.0))
    many = Space("many", (7.0, 6.0), (2.0, 9.0))
    factored = Factored(few, many)
    reduced = Reduced()
    assert tuned(op_of(First({-1: 50.0}), factored), gpu(reduce_times=reduced)) == (
        "Factored",
        ("few", 2.0, 1.0),
    )
    tried = set(factored.ran)
    assert ("few", 2.0, 3.0) in tried and ("many", 6.0, 9.0) in tried
    assert ("few", 8.0, 1.0) not in tried and ("many", 7.0, 9.0) not in tried
    assert reduced.lengths[:2] == [1 + 3 + 2, 2 + 1], (
        "one exchange for all first parts, one for all second ones"
    )


def test_every_kernel_is_compiled_before_the_first_is_timed_and_only_once(gpu):
    space = Space("few", (5.0, 2.0), (4.0, 1.0))
    factored = Factored(space)
    compiled_before = []
    forward = factored.forward
    factored.forward = lambda *args, **kwargs: (
        compiled_before.append(len(factored.compiled)),
        forward(*args, **kwargs),
    )[1]
    tuned(op_of(First({-1: 50.0}), factored), gpu())
    assert sorted(factored.compiled) == [("few", 2.0, 4.0), ("few", 5.0, 1.0), ("few", 5.0, 4.0)]
    assert set(compiled_before) == {3}


def test_a_space_none_of_which_runs_costs_no_second_round(gpu):
    factored = Factored(Space("bad", (1.0, 2.0), (1.0, 2.0)), broken=frozenset({"bad"}))
    reduced = Reduced()
    assert tuned(op_of(First({-1: 50.0}), factored), gpu(reduce_times=reduced)) == ("First", -1)
    assert reduced.lengths == [3]


def test_what_is_measured_next_follows_from_reduced_times_alone(gpu):
    space = Space("few", (5.0, 2.0), (4.0, 1.0))
    factored, reduced = Factored(space), Reduced(others={0: [50.0, 1.0, 40.0]})
    tuned(op_of(First({-1: 50.0}), factored), gpu(reduce_times=reduced))
    assert ("few", 5.0, 1.0) in factored.ran, "the other rank's times made the first part the better one"
    assert ("few", 2.0, 1.0) not in factored.ran


def test_a_candidate_that_is_far_slower_may_be_given_up(gpu):
    profiler = gpu()
    tuned(op_of(First({-1: 9.0}), Second({0: 2.0, 1: 30.0})), profiler)
    assert profiler.timer.hopes[:3] == pytest.approx([inf, 1.5 * 9.0, 1.5 * 2.0])


def test_near_ties_are_settled_in_rounds_and_go_to_the_earliest(gpu):
    second = Second({0: 5.0, 1: 5.01, 2: 4.99, 3: 9.0})
    reduced = Reduced()
    assert tuned(op_of(First({-1: 90.0}), second), gpu(reduce_times=reduced)) == ("Second", 0)
    assert reduced.lengths == [5, 3]
    assert [second.ran.count(tactic) for tactic in (0, 1, 2, 3)] == [4, 4, 4, 1]


def test_only_the_nearest_few_are_settled(gpu):
    second = Second({tactic: 1.0 + tactic / 1000 for tactic in range(40)})
    reduced = Reduced()
    tuned(op_of(First({-1: 90.0}), second), gpu(reduce_times=reduced))
    assert reduced.lengths == [41, 6]


def test_a_failing_candidate_loses_and_want_of_memory_is_counted(gpu):
    fails = {0: RuntimeError("no kernel"), 1: torch.cuda.OutOfMemoryError("3 GiB")}
    profiler = gpu()
    assert tuned(op_of(First({-1: 9.0}), Second({0: 1.0, 1: 1.0, 2: 8.0}, fails)), profiler) == ("Second", 2)
    assert profiler.out_of_memory == 1


def test_an_error_that_poisons_the_context_names_the_candidate(gpu, monkeypatch):
    def lost(*args):
        raise RuntimeError("an illegal memory access was encountered")

    op = op_of(First({-1: 9.0}), Second({7: 1.0}, {7: RuntimeError("illegal memory access")}))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="Second 7 broke the CUDA context"):
        tuned(op, gpu())


def test_a_runner_with_ops_of_its_own_runs_once_before_anything_is_timed(gpu):
    class Nesting(Second):
        nested_ops = ("inner::op",)

    first, nesting = First({-1: 9.0}), Nesting({0: 1.0})
    ran = []
    nesting.forward = lambda inputs, tactic=-1, **kwargs: (ran.append("nesting"), 1.0)[1]
    first.forward = lambda inputs, tactic=-1, **kwargs: (ran.append("first"), 9.0)[1]
    assert tuned(op_of(first, nesting), gpu()) == ("Nesting", 0)
    assert ran[:3] == ["nesting", "first", "nesting"]


def test_blocked_tactics_are_no_candidates(gpu, monkeypatch):
    monkeypatch.setattr(
        flashinfer_api, "not_blocked", lambda op, runner, tactics: [t for t in tactics if t != 1]
    )
    assert tuned(op_of(First({-1: 9.0}), Second({0: 5.0, 1: 1.0})), gpu()) == ("Second", 0)


def test_a_skipped_op_is_not_measured(gpu):
    op, profiler = op_of(First({-1: 9.0}), Second({0: 1.0})), gpu(skip_ops=frozenset({"test::op"}))
    assert tuned(op, profiler) == ("First", -1)
    assert not profiler.measurements


def test_runners_that_disagree_on_the_question_are_refused(gpu):
    second = Second({0: 1.0})
    second.get_cache_key_extras = lambda inputs: ("another",)
    with pytest.raises(AssertionError, match="disagree"):
        tuned(op_of(First({-1: 9.0}), second), gpu())


def test_on_a_cpu_a_hopeless_candidate_is_timed_once():
    now = [0.0]
    runners = First({-1: 1.0}), Second({0: 10.0})
    for runner in runners:
        forward = runner.forward

        def timed(inputs, tactic=-1, forward=forward, **kwargs):
            now[0] += 1e-3 * forward(inputs, tactic)

        runner.forward = timed
    profiler = CpuProfiler(clock=lambda: now[0])
    assert tuned(op_of(*runners), profiler) == ("First", -1)
    assert len(runners[1].ran) == 2 and len(runners[0].ran) == 6


def test_ties_within_the_margin_go_to_the_earliest():
    assert choose([1.003, 1.0, 0.999], margin=0.005) == 0
    assert choose([1.02, 1.0, 0.9999], margin=0.005) == 1


def test_kernels_compile_in_parallel_and_failures_are_counted_not_raised():
    meeting = threading.Barrier(3, timeout=30)

    def broken():
        raise RuntimeError("ptxas")

    assert compile_in_parallel([meeting.wait, broken, meeting.wait, meeting.wait], 4) == 1


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(64, 1, 16), (16, 4, 4), (2, 8, 1)])
def test_ranks_share_the_cores_that_compile(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(gpu_tuner.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert compile_threads(ranks) == threads


def test_a_candidate_is_named_by_runner_and_tactic():
    assert Candidate(First({}), ("few", 1)).name == "First ('few', 1)"


def test_kernels_that_records_name_are_compiled_before_any_forward(tmp_path, monkeypatch):
    class Compiled(SortedMoE):
        def compile_jobs(self, inputs, tactics):
            return [lambda: compiled.append((inputs[0].shape[0], *tactics))]

    def host():
        host = TinyHost(between=lambda shape: events.append(len(compiled)))
        host.runner.op.runners = [Compiled()]
        return host

    compiled, events = [], []
    report = start(tmp_path, host())
    assert compiled == [], "nothing is named before the first tuning"
    events.clear()
    warm = start(tmp_path, host())
    assert warm.profiles_tuned == 0 and "kernels" in warm.timings
    assert sorted(size for size, _ in compiled) == sorted(step.num_tokens for step in report.steps)
    assert set(events) == {5}


def test_an_inner_op_that_nobody_asked_for_is_not_called_misspelt(tmp_path):
    class Outer(DenseMoE):
        nested_ops = ("inner::op",)

    host = TinyHost()
    host.runner.op.runners = [SortedMoE(), Outer()]
    report = start(tmp_path, host, skip_ops=("inner::op", "outer::typo"))
    assert report.skipped_ops["never_asked"] == ["outer::typo"]


def test_a_start_says_once_how_many_candidates_of_a_runner_failed_and_why(tmp_path, caplog):
    class Failing(DenseMoE):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            raise RuntimeError("no compiler for this tile\nand a long trace")

    host = TinyHost()
    host.runner.op.runners = [SortedMoE(), Failing()]
    report = start(tmp_path, host)
    assert report.status == "completed"
    (line,) = [warning for warning in report.warnings if "Failing" in warning]
    assert (
        "candidates could not be measured; the first: tactic 0, RuntimeError: no compiler for this tile"
        in line
    )
    assert "long trace" not in line
    assert [record.getMessage() for record in caplog.records].count(f"FlashInfer autotune: {line}") == 1
