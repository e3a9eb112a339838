"""The search of a sweep: what it tries next and how it decides, without a process or a timer."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang.srt.autotune.megamoe.kernels.base import Geometry, Knobs
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.lockstep import LockstepSweep
from sglang.srt.autotune.megamoe.sweep import PRELOADED, num_workers, sweep_reserve_bytes
from sglang.srt.autotune.megamoe.sweep_search import LadderSearch, pick_anchors
from sglang.srt.autotune.megamoe.sweep_worker import Outcome
from sglang.srt.autotune.megamoe.tuning import tune

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


class ScriptedKernel(ReferenceMegaMoE):
    """A kernel of `num_tiles` tiles with two minor variants each; the default is tile 0."""

    tolerance = 0.01

    def __init__(self, num_tiles: int = 8) -> None:
        super().__init__(Geometry(64, 32, 8, 2))
        self.num_tiles = num_tiles

    def default_knobs(self, capacity: int) -> Knobs:
        return {"tile": 0, "minor": 0}

    def candidates(self, capacity: int) -> list[Knobs]:
        return [{"tile": tile, "minor": minor} for tile in range(self.num_tiles) for minor in (0, 1)]

    def screened(self, capacity: int) -> list[Knobs]:
        return [knobs for knobs in self.candidates(capacity) if knobs["minor"] == 0]

    def variants(self, knobs: Knobs) -> list[Knobs]:
        return [{**knobs, "minor": 1}]


def best_tile(capacity: int) -> int:
    return min(7, int(math.log2(capacity)) // 2 + 1)


def time_of(capacity: int, knobs: Knobs) -> float:
    return 100 + 10 * abs(knobs["tile"] - best_tile(capacity)) - 2 * knobs["minor"]


def play(search: LadderSearch, answer=time_of, workers: int = 3) -> list:
    """Run the search with a timing function, several workers at a time; returns the choices."""
    kept, choices = {}, []
    for _ in range(10_000):
        jobs = [job for worker in range(workers) if (job := search.take(worker)) is not None]
        if not jobs:
            break
        for job in jobs:
            if job.kind == "screen":
                kept[job.number] = (job.capacity, job.knobs)
            result = answer(*kept[job.number])
            if isinstance(result, Outcome):
                search.report(Outcome(job.number, result.time_us, result.error, 0.0, result.problem))
            else:
                search.report(Outcome(job.number, result, 1e-6 if job.kind == "screen" else None))
        choices += search.take_choices()
    return choices


def test_a_long_ladder_has_three_anchors_and_a_short_one_is_all_anchors():
    assert pick_anchors(LADDER) == (4, 64, 1024)
    assert pick_anchors((1, 2, 8)) == (1, 2, 8)


def test_every_capacity_gets_its_best_candidate_from_a_fraction_of_the_compilations():
    search = LadderSearch(ScriptedKernel(), LADDER)
    choices = {choice.capacity: choice for choice in play(search)}
    assert search.is_done and set(choices) == set(LADDER)
    for capacity, choice in choices.items():
        assert choice.knobs == {"tile": best_tile(capacity), "minor": 1}, capacity
        assert choice.default_us == time_of(capacity, {"tile": 0, "minor": 0})
    assert search.num_candidates < 0.6 * len(LADDER) * 16


def test_an_exhaustive_search_tries_every_candidate_everywhere():
    search = LadderSearch(ScriptedKernel(), LADDER, exhaustive=True)
    choices = play(search)
    assert search.num_candidates == len(LADDER) * 16
    assert all(choice.knobs["tile"] == best_tile(choice.capacity) for choice in choices)


def test_the_best_are_timed_again_and_the_later_times_decide():
    """Screening saw tile 3 as the fastest by a lucky run."""
    seen: dict[tuple, int] = {}

    def answer(capacity, knobs):
        key = (capacity, knobs["tile"], knobs["minor"])
        seen[key] = seen.get(key, 0) + 1
        lucky = knobs["tile"] == 3 and knobs["minor"] == 0 and seen[key] == 1
        return 90.0 if lucky else time_of(capacity, knobs)

    choices = play(LadderSearch(ScriptedKernel(), (4,)), answer)
    assert choices[0].knobs == {"tile": 2, "minor": 1} and choices[0].time_us == 98
    assert max(seen.values()) == 3, "screened, then two rounds"
    assert seen[(4, 7, 0)] == 1, "a slow candidate is timed once"


def test_a_wrong_candidate_cannot_win_however_fast():
    def answer(capacity, knobs):
        wrong = Outcome(0, 1.0, 0.3)
        return wrong if knobs["tile"] == 5 else time_of(capacity, knobs)

    choice = play(LadderSearch(ScriptedKernel(), (4,)), answer)[0]
    assert choice.knobs["tile"] == 2
    assert any("off by 3.00e-01" in problem for problem in choice.problems)


def test_without_a_right_candidate_there_is_no_choice_but_a_reason():
    def answer(capacity, knobs):
        return Outcome(0, problem="it does not compile")

    choices = play(LadderSearch(ScriptedKernel(), (2, 4)), answer)
    assert [choice.knobs for choice in choices] == [None, None]
    assert choices[0].problems[0] == "it does not compile"


def test_equal_times_go_to_the_default():
    choice = play(LadderSearch(ScriptedKernel(), (4,)), lambda capacity, knobs: 50.0)[0]
    assert choice.knobs == {"tile": 0, "minor": 0}


def test_a_lost_worker_costs_its_running_candidate_only():
    search = LadderSearch(ScriptedKernel(2), (4,))
    first, second = search.take(0), search.take(1)
    search.report(Outcome(second.number, 80.0, 1e-6))
    search.lost(0)
    search.lost(1)
    choices = play(search)
    assert choices[0].knobs == second.knobs or choices[0].knobs["minor"] == 1
    assert "its worker process died" in choices[0].problems
    assert first.number != second.number


def test_giving_up_decides_with_what_is_known():
    search = LadderSearch(ScriptedKernel(), (4, 8))
    job = search.take(0)
    search.report(Outcome(job.number, 70.0, 1e-6))
    search.give_up("the sweep ran out of time")
    choices = {choice.capacity: choice for choice in search.take_choices()}
    assert choices[4].time_us == 70.0 and choices[8].knobs is None and search.is_done


def test_workers_are_bounded_by_memory_cores_and_jobs():
    kernel = ScriptedKernel()
    each = kernel.worker_bytes()
    assert num_workers(kernel, None, num_cores=16) == 15
    assert num_workers(kernel, 3 * each + 1, num_cores=16) == 3
    assert num_workers(kernel, each - 1, num_cores=16) == 0
    assert num_workers(kernel, None, num_jobs=2, num_cores=64) == 2
    assert sweep_reserve_bytes(kernel, num_cores=4) == 3 * each


def test_an_unknown_policy_is_refused():
    with pytest.raises(AssertionError, match="no MegaMoE tuning policy"):
        list(tune("guess", None, [1]))  # type: ignore[arg-type]


def test_what_workers_are_forked_from_holds_nothing_that_may_initialise_cuda():
    """With CuTe DSL installed, importing FlashInfer does."""
    lines = [*(f"import {name}" for name in PRELOADED), "import sys", "print('flashinfer' in sys.modules)"]
    said = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.strip() == "False", said.stderr


def test_ranks_try_everything_where_the_single_rank_sweep_came_to_nothing():
    context = SimpleNamespace(
        profiles=SimpleNamespace(kernel=ScriptedKernel(num_tiles=3)),
        agreement=SimpleNamespace(is_alone=False),
    )
    default, other = {"tile": 0, "minor": 0}, {"tile": 2, "minor": 1}
    sweep = LockstepSweep(context, {1: [other], 2: []})  # type: ignore[arg-type]
    assert sweep._candidates(1, None) == [default, other]
    assert sweep._candidates(2, None) == ScriptedKernel(num_tiles=3).candidates(2)
    assert sweep._candidates(4, [other]) == [default, other], "without any: what did best before"


@pytest.mark.parametrize(("gain", "expected"), [(0.02, 1), (0.05, 3)])
def test_ranks_try_only_the_fastest_where_a_sweep_gains_little_on_the_default(gain, expected):
    """Each candidate of a lock-step sweep is compiled by all ranks, one after the other."""

    def answer(capacity, knobs):
        return 100.0 if knobs["tile"] == 0 else 100 * (1 - gain) + knobs["tile"] - 1 + knobs["minor"] / 10

    search = LadderSearch(ScriptedKernel(), (1, 8))
    play(search, answer=answer)
    contenders = search.contenders(8)
    assert len(contenders) == expected and contenders[0] == {"tile": 1, "minor": 0}


def test_a_sweep_that_came_to_nothing_names_no_contenders():
    search = LadderSearch(ScriptedKernel(), (1, 8))
    play(search, answer=lambda capacity, knobs: Outcome(0, 1.0, 0.5, 0.0, "wrong"))
    assert search.contenders(8) == []
