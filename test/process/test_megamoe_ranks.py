"""MegaMoE profiles on four real ranks, EP4: tuned together, warm together, and no error of one rank hangs the others.

The ranks exchange tokens over gloo with the reference kernel, vote over a TCP store and keep record files of their own.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang.srt.autotune.journal import Journal
from sglang.srt.autotune.megamoe import bench, knob_file
from sglang.srt.autotune.megamoe.env_guard import KNOB_CACHE_VARIABLE
from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels import reference_layer
from sglang.srt.autotune.megamoe.kernels.base import Geometry, MegaMoEError
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.records import NAMESPACE, key_of
from sglang.srt.autotune.plan import Limits, capacity_ladder
from support.megamoe import CAPACITIES, FileRecords, MegaRank, MemoryRecords, random_experts
from support.ranks import free_port, results_of, run_ranks

SIZE = 4
COUNTS = ([0, 1, 1, 2], [0, 1, 2, 7], [8, 8, 8, 8], [0, 4, 9, 16])


def on_four_ranks(target: Callable[..., Any], *args: Any) -> list[Any]:
    return results_of(run_ranks(SIZE, target, free_port(), *args))


def message_of(call: Callable[[], Any]) -> str:
    """The error's type and text; fails when there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("this must not have worked")


def namespace_of(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())["_records"][NAMESPACE]


def equal_to_a_fixed_default(rank: MegaRank, outputs: list[torch.Tensor]) -> bool:
    """Whether a session with one knob choice everywhere gives the same bits."""
    fixed = MegaMoEProfiles(rank.kernel, 16)
    for layer in (0, 1):
        fixed.add_owner(rank.kernel.prepare_weights(*random_experts(rank.kernel.geometry, layer)))
    fixed.open_ordinary()
    expected = rank.outputs(fixed, COUNTS)
    fixed.close()
    return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


# a start, cold and warm -------------------------------------------------------------------------------------


def let_the_clock_run_ahead(seconds: int) -> None:
    """Ranks note a winner at different seconds, which on one machine happens now and then."""

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return super().now(tz) + datetime.timedelta(seconds=seconds)

    knob_file.datetime = SimpleNamespace(datetime=Ahead)  # type: ignore[assignment]


def run_cold_and_warm(rank_number: int, port: int, root: str, policy: str | None) -> dict[str, Any]:
    let_the_clock_run_ahead(100 * rank_number)
    rank = MegaRank(rank_number, SIZE, port)
    path = Path(root, f"rank{rank_number}.json")
    os.environ[KNOB_CACHE_VARIABLE] = "/nonexistent/of the user.json"
    result: dict[str, Any] = {"path": str(path)}

    profiles, records = rank.profiles(), FileRecords(path)
    cold = rank.stage(profiles, records, policy=policy)
    outputs = rank.outputs(profiles, COUNTS)
    result["cold"] = [cold.tuned, cold.cached, cold.problems]
    result["capacities"] = profiles.capacities
    result["shapes"] = [tuple(output.shape) for output in outputs[::2]]
    first, second = profiles.owners
    shared = profiles.workspaces(0)[0].buffers
    result["owners_share"] = all(
        a.buffers is b.buffers for a, b in zip(profiles.workspaces(0), profiles.workspaces(1), strict=True)
    )
    result["knobs"] = [ws.buffers.knobs for ws in profiles.workspaces(0)]
    references = [reference_layer.pooled_workspace_refcount(shared)]
    second.destroy()
    references.append(reference_layer.pooled_workspace_refcount(shared))
    first.destroy()
    references.append(reference_layer.pooled_workspace_refcount(shared))
    result["references"] = references
    profiles.close()
    result["pooled_after"] = reference_layer.pooled_workspace_count()

    before = path.read_bytes()
    profiles, records = rank.profiles(), FileRecords(path)
    warm = rank.stage(profiles, records, policy=policy)
    again = rank.outputs(profiles, COUNTS)
    result["warm"] = [warm.tuned, warm.cached, records.commits, path.read_bytes() == before]
    result["warm_knobs"] = [ws.buffers.knobs for ws in profiles.workspaces(1)]
    result["same_as_cold"] = all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    profiles.close()
    result["same_as_fixed"] = equal_to_a_fixed_default(rank, outputs)
    result["environment"] = os.environ[KNOB_CACHE_VARIABLE]
    return result


@pytest.mark.parametrize("policy", [None, "native"], ids=["sweep", "native"])
def test_ranks_tune_once_and_start_warm_with_the_same_winners_and_the_same_bits(tmp_path, policy):
    results = on_four_ranks(run_cold_and_warm, str(tmp_path), policy)
    files = [namespace_of(result["path"]) for result in results]
    for number, result in enumerate(results):
        assert result["cold"] == [5, 0, []]
        assert tuple(result["capacities"]) == CAPACITIES
        assert result["shapes"] == [(row[number], 64) for row in COUNTS]
        assert result["owners_share"]
        assert result["references"] == [2, 1, 0] and result["pooled_after"] == 0
        assert result["warm"] == [0, 5, 0, True], "a warm start tunes nothing and writes nothing"
        assert result["same_as_cold"] and result["same_as_fixed"]
        assert result["knobs"] == result["warm_knobs"] == results[0]["knobs"]
        assert result["environment"] == "/nonexistent/of the user.json"
        assert len(files[number]) == 5 and files[number] == files[0]


def test_the_ladder_of_the_scenario_follows_from_its_limits():
    limits = Limits((1, 2, 4, 8, 16), max_running_requests=16, prefill_ceiling=8)
    assert capacity_ladder(limits) == CAPACITIES


# records ----------------------------------------------------------------------------------------------------


def run_with_records(rank_number: int, port: int, root: str) -> list[Any]:
    rank = MegaRank(rank_number, SIZE, port)
    records = FileRecords(Path(root, f"rank{rank_number}.json"))
    profiles = rank.profiles(num_layers=1)
    report = rank.stage(profiles, records)
    profiles.close()
    return [report.tuned, report.cached, [bad["reason"] for bad in report.rejected], str(records.path)]


def spoil(path: str, capacity: int) -> None:
    """Give the stored winner of a capacity knobs that do not exist."""
    document = json.loads(Path(path).read_text())
    (key,) = (key for key in document["_records"][NAMESPACE] if key.endswith(f"max_tokens={capacity}"))
    document["_records"][NAMESPACE][key]["entry"]["knobs"]["tile_rows"] = 7
    Path(path).write_text(json.dumps(document))


def test_an_invalid_record_is_replaced_by_rank_0s_and_tuned_again_only_where_rank_0_has_none(tmp_path):
    paths = [result[3] for result in on_four_ranks(run_with_records, str(tmp_path))]
    spoil(paths[2], 4)
    results = on_four_ranks(run_with_records, str(tmp_path))
    assert [result[:2] for result in results] == [[0, 5]] * SIZE
    assert [result[2] for result in results] == [[], [], ["knob tile_rows cannot be 7"], []]
    assert namespace_of(paths[2]) == namespace_of(paths[0])

    spoil(paths[0], 8)
    results = on_four_ranks(run_with_records, str(tmp_path))
    assert [result[:2] for result in results] == [[1, 4]] * SIZE
    assert all(namespace_of(path) == namespace_of(paths[0]) for path in paths)


# what must not work -----------------------------------------------------------------------------------------


def run_misuses(rank_number: int, port: int) -> dict[str, str]:
    rank, messages = MegaRank(rank_number, SIZE, port), {}
    profiles = rank.profiles()

    inputs = routed_inputs(1, rank.kernel.geometry, torch.float32, rank.kernel.device)
    messages["too early"] = message_of(lambda: profiles.forward(0, inputs, 1))
    with reference_layer.capturing():
        messages["in capture"] = message_of(lambda: rank.stage(profiles, MemoryRecords()))
    rank.stage(profiles, MemoryRecords())
    messages["twice"] = message_of(lambda: rank.stage(profiles, MemoryRecords()))
    messages["overflow"] = message_of(lambda: rank.outputs(profiles, [[0, 1, 2, 17]]))
    with reference_layer.capturing():
        messages["created in capture"] = message_of(lambda: profiles.owners[0].create_workspace(3))
        rank.outputs(profiles, COUNTS)  # a captured forward allocates nothing
    profiles.close()

    ordinary = rank.profiles()
    ordinary.open_ordinary()
    rank.outputs(ordinary, [[1, 0, 2, 4]])
    messages["ordinary overflow"] = message_of(lambda: rank.outputs(ordinary, [[1, 0, 2, 5]]))
    messages["after a forward"] = message_of(lambda: rank.stage(ordinary, MemoryRecords()))
    ordinary.close()

    # Half of the ranks each: an EP group that does not span them all.
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    kernel = ReferenceMegaMoE(Geometry(64, 32, 8, 2, 2, rank_number % 2), halves[rank_number // 2])
    partial = MegaMoEProfiles(kernel, 4)
    partial.add_owner(kernel.prepare_weights(*random_experts(kernel.geometry, 0)))
    messages["partial group"] = message_of(lambda: rank.stage(partial, MemoryRecords()))
    partial.close()
    return messages


def test_every_misuse_is_the_same_error_on_every_rank():
    results = on_four_ranks(run_misuses)
    for messages in results:
        assert "before its workspaces were opened" in messages["too early"]
        assert "cannot be tuned inside a graph capture" in messages["in capture"]
        assert "staged once per start" in messages["twice"]
        assert "has 17 tokens on one rank and the largest workspace holds 16" in messages["overflow"]
        assert messages["overflow"].startswith("CapacityExceeded")
        assert "cannot run during CUDA graph capture" in messages["created in capture"]
        assert "has 5 tokens on one rank and the largest workspace holds 4" in messages["ordinary overflow"]
        assert "before the first forward, and one has run" in messages["after a forward"]
        assert "the EP group spans 2 of 4 ranks" in messages["partial group"]


def run_with_a_failure(rank_number: int, port: int, where: str) -> dict[str, Any]:
    rank = MegaRank(rank_number, SIZE, port)
    profiles = rank.profiles()
    if rank_number == 2:
        _break(profiles, where)
    before = dict(os.environ)
    message = message_of(lambda: rank.stage(profiles, MemoryRecords()))
    left = reference_layer.pooled_workspace_count()
    profiles.close()
    return {"message": message, "pooled": left, "environment": before == dict(os.environ)}


def _break(profiles: MegaMoEProfiles, where: str) -> None:
    """Make this rank fail: while it opens a public workspace, or with every candidate of the sweep."""

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError(f"no memory ({where})")

    if where == "workspace":
        profiles.owners[1].create_workspace = fail  # type: ignore[method-assign]
    else:
        profiles.kernel.create_owner = fail  # type: ignore[method-assign]


def test_a_rank_that_cannot_open_a_workspace_ends_the_staging_of_all_with_its_name():
    for result in on_four_ranks(run_with_a_failure, "workspace"):
        assert result["message"] == "MegaMoEError: rank 2: MemoryError: no memory (workspace)"
        assert result["pooled"] == 0, "what was opened is closed again"
        assert result["environment"]


def run_after_a_failure(rank_number: int, port: int, root: str) -> dict[str, Any]:
    """Two starts in one process: rank 2 cannot open the first capacity, then all can."""
    rank, records = MegaRank(rank_number, SIZE, port), MemoryRecords()
    results: dict[str, Any] = {}
    for start in ("first", "second"):
        profiles = rank.profiles()
        if (start, rank_number) == ("first", 2):
            _break(profiles, "workspace")
        with Journal(Path(root, f"{rank_number}.journal")) as journal:
            try:
                results[start] = rank.stage(profiles, records, journal=journal)
            except MegaMoEError as error:
                results[start] = str(error)
        if start == "second":
            results["same"] = equal_to_a_fixed_default(rank, rank.outputs(profiles, COUNTS))
        profiles.close()
    return results


def test_what_one_rank_could_not_open_is_left_to_the_default_by_all_at_the_next_start(tmp_path):
    for result in on_four_ranks(run_after_a_failure, str(tmp_path)):
        assert result["first"] == "rank 2: MemoryError: no memory (workspace)"
        report = result["second"]
        sources = [winner["source"] for winner in report.winners.values()]
        assert sources == ["default", "tuned", "tuned", "tuned", "tuned"]
        (problem,) = report.problems
        assert "capacity 1: an earlier start failed there: MemoryError: no memory (workspace)" in problem
        assert result["same"], "one launch has one choice on all ranks"


def run_with_bad_candidates(rank_number: int, port: int) -> dict[str, Any]:
    rank = MegaRank(rank_number, SIZE, port)
    profiles = rank.profiles()
    if rank_number == 2:
        _break(profiles, "candidate")
    report = rank.stage(profiles, MemoryRecords())
    same = equal_to_a_fixed_default(rank, rank.outputs(profiles, COUNTS)) if rank_number != 2 else None
    if rank_number == 2:
        del profiles.kernel.create_owner
        equal_to_a_fixed_default(rank, rank.outputs(profiles, COUNTS))
    return {"tuned": report.tuned, "problems": report.problems, "same": same}


def test_candidates_that_fail_on_one_rank_fail_on_all_and_the_defaults_serve():
    for number, result in enumerate(on_four_ranks(run_with_bad_candidates)):
        assert result["tuned"] == 0 and len(result["problems"]) == 5
        assert "rank 2: MemoryError: no memory (candidate)" in result["problems"][0]
        assert result["same"] is (None if number == 2 else True)


def run_with_a_silent_rank(rank_number: int, port: int) -> str | None:
    rank = MegaRank(rank_number, SIZE, port, bound_s=2.0)
    if rank_number == 3:
        return None  # it never comes
    return message_of(lambda: rank.stage(rank.profiles(), MemoryRecords()))


def test_a_rank_that_never_comes_is_named_within_the_bound():
    messages = on_four_ranks(run_with_a_silent_rank)
    assert all(
        "rank 3" in message and "MegaMoE profiles may be staged" in message for message in messages[:3]
    )


def run_with_a_slow_rank(rank_number: int, port: int) -> dict[str, Any]:
    rank = MegaRank(rank_number, SIZE, port)
    if rank_number == 2:
        bench.time = SimpleNamespace(perf_counter=lambda: 1e6 * time.perf_counter())
    profiles = rank.profiles()
    report = rank.stage(profiles, MemoryRecords(), capacities=(2,))
    profiles.close()
    return {"tuned": report.tuned}


def test_a_rank_whose_launches_seem_slow_launches_as_often_as_the_others():
    assert on_four_ranks(run_with_a_slow_rank) == [{"tuned": 1}] * SIZE


# what is kept -----------------------------------------------------------------------------------------------


def run_two_ladders(rank_number: int, port: int) -> dict[str, Any]:
    rank, records = MegaRank(rank_number, SIZE, port), MemoryRecords()
    target, second = rank.profiles(), rank.profiles()
    rank.stage(target, records, capacities=(2, 4))
    for capacity in (2, 4):  # records that say something else than what is open
        payload = records.content[NAMESPACE][key_of(rank.kernel, capacity)]
        payload["entry"]["knobs"] = {"experts": "batched", "tile_rows": 32}
    report = rank.stage(second, records, capacities=(2, 4, 8))
    knobs = [
        [workspace.buffers.knobs for workspace in profiles.workspaces(0)] for profiles in (target, second)
    ]
    second.close()
    still_open = [workspace.is_destroyed for workspace in target.workspaces(0)]
    target.close()
    return {"report": [report.kept, report.tuned, report.cached], "knobs": knobs, "destroyed": still_open}


def test_workspaces_that_are_open_in_the_process_keep_their_winners():
    for result in on_four_ranks(run_two_ladders):
        assert result["report"] == [2, 1, 0]
        assert result["knobs"][0] == result["knobs"][1][:2]
        assert result["destroyed"] == [False, False]
