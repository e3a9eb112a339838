"""The sweep in real worker processes: what a crashing or wrong candidate costs, and that timing is exclusive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe import sweep as sweep_module
from sglang.srt.autotune.megamoe.context import TuningContext
from sglang.srt.autotune.megamoe.env_guard import scratch_knob_cache
from sglang.srt.autotune.megamoe.inputs import synthetic_inputs
from sglang.srt.autotune.megamoe.kernels.base import BenchSpec, Geometry, Knobs, MegaMoEError
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.staging import stage_profiles
from sglang.srt.autotune.megamoe.sweep import WorkerSweep
from sglang.srt.autotune.megamoe.tuning import tune
from support.megamoe import MemoryRecords, random_experts, small_geometry


class ScriptedTimes(ReferenceMegaMoE):
    """Candidates with the times that they are to be given; `do` is for the scripted bench."""

    tolerance = 0.01

    def __init__(self, candidates: list[Knobs]) -> None:
        super().__init__(Geometry(64, 32, 8, 2))
        self._candidates = candidates

    def default_knobs(self, capacity: int) -> Knobs:
        return self._candidates[0]

    def candidates(self, capacity: int) -> list[Knobs]:
        return self._candidates

    screened = candidates

    def variants(self, knobs: Knobs) -> list[Knobs]:
        return []


def sweep(
    candidates: list[Knobs], directory: Path, capacities=(1, 2), workers: int = 2, **arguments
) -> WorkerSweep:
    return WorkerSweep(
        ScriptedTimes(candidates),
        capacities,
        workers,
        environment={"SCRIPTED_DIRECTORY": str(directory)},
        spec=BenchSpec("support.megamoe_bench:create", arguments),
        timeout_s=60,
    )


def test_crashing_raising_and_wrong_candidates_cost_themselves_only(tmp_path):
    running = sweep(
        [
            {"us": 50.0},
            {"us": 1.0, "do": "die"},
            {"us": 2.0, "do": "raise"},
            {"us": 3.0, "do": "wrong"},
            {"us": 40.0},
            {"us": 45.0},
        ],
        tmp_path,
        capacities=(1,),
    )
    (choice,) = list(running.run())
    assert choice.knobs == {"us": 40.0} and choice.default_us == 50.0
    assert any("does not compile" in problem for problem in choice.problems)
    assert any("died" in problem for problem in choice.problems)
    assert "exit code 7" in running.problems[0]


def test_timing_is_exclusive_among_workers(tmp_path):
    running = sweep([{"us": float(n)} for n in range(10, 40)], tmp_path, workers=3)
    choices = list(running.run())
    assert {choice.knobs["us"] for choice in choices} == {10.0}
    assert not (tmp_path / "overlap").exists()


def test_workers_that_cannot_start_leave_the_defaults_with_a_reason(tmp_path):
    running = sweep([{"us": 5.0}, {"us": 4.0}], tmp_path, broken=True)
    choices = list(running.run())
    assert [choice.knobs for choice in choices] == [None, None]
    assert "no compiler here" in running.problems[0]
    assert choices[0].problems[0] == "no worker process is left"


def test_the_stage_tunes_with_workers_where_the_kernel_wants_them(tmp_path, monkeypatch):

    kernel = ReferenceMegaMoE(small_geometry())
    monkeypatch.setattr(kernel, "uses_workers", True)
    profiles = MegaMoEProfiles(kernel, 4)
    profiles.add_owner(kernel.prepare_weights(*random_experts(kernel.geometry, 0)))
    records = MemoryRecords()
    report = stage_profiles(profiles, (2, 8), records, Agreement.alone(), dtype=torch.float32)
    assert (report.tuned, report.problems) == (2, [])
    assert report.timings["workers"] >= 1 and report.timings["candidates"] >= 6
    inputs = synthetic_inputs(3, kernel.geometry, torch.float32, kernel.device)
    expected = kernel.float_reference(profiles.weights[0], inputs)
    torch.testing.assert_close(profiles.forward(0, inputs, 3), expected, rtol=1e-4, atol=1e-5)
    profiles.close()


def test_without_memory_for_a_worker_candidates_are_tried_in_the_process(monkeypatch):

    kernel = ReferenceMegaMoE(small_geometry())
    monkeypatch.setattr(kernel, "uses_workers", True)
    profiles = MegaMoEProfiles(kernel, 4)
    profiles.add_owner(kernel.prepare_weights(*random_experts(kernel.geometry, 0)))

    def inputs(capacity):
        return synthetic_inputs(capacity, kernel.geometry, torch.float32, kernel.device)

    with scratch_knob_cache({}) as cache:
        context = TuningContext(profiles, Agreement.alone(), inputs, cache, free_bytes=lambda: 0)
        winners = list(tune("sweep", context, [4]))
    assert winners[0].source == "tuned" and winners[0].default_us is not None
    assert context.problems == ["no sweep worker can be started: candidates are tried in this process"]
    profiles.close()


def test_a_conductor_that_hangs_is_named_within_the_sweeps_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(WorkerSweep, "_conduct", lambda self, decided, stop: stop.wait(20))
    monkeypatch.setattr(sweep_module, "JOB_TIMEOUT_S", 0.2)
    running = sweep([{"us": 1.0}], tmp_path)
    running._timeout_s = 0.1
    with pytest.raises(MegaMoEError, match="sweep did not go on within 0.3 s"):
        list(running.run())
