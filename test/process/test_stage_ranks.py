"""The stage on several real ranks: whatever their files, clocks or memory do, they take one branch and none hangs.

The ranks form one TP group over a real gloo group and vote over a real TCP store; each forward of the tiny host has a
real all-reduce in it, so a rank that strays leaves its peers in a collective, as it would in an engine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang.srt.autotune import flashinfer_api, stage
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.cpu_tuner import CpuProfiler
from sglang.srt.autotune.identity import Topology
from sglang.srt.autotune.plan import Limits
from sglang.srt.autotune.records.record import with_runner
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.layers.moe.portfolio import OP_NAME
from support.ranks import free_port, join_gloo, results_of, run_ranks
from support.tiny_host import TinyHost, start

BOUND_S = 8.0
NUM_STEPS = 5


class Rank:
    """What a rank of these tests is: its group, its votes and its host."""

    def __init__(
        self, rank: int, size: int, port: int, *, bound_s: float = BOUND_S, pp_size: int = 1
    ) -> None:
        self.rank, self.size = rank, size
        self.store = join_gloo(rank, size, port, bound_s)
        tp_size = size // pp_size
        stages = [tuple(range(s * tp_size, (s + 1) * tp_size)) for s in range(pp_size)]
        groups = [dist.new_group(stage) for stage in stages]
        self.stage = rank // tp_size
        self.group = groups[self.stage]
        self.topology = Topology(
            rank=rank,
            world_size=size,
            tp_rank=rank % tp_size,
            pp_rank=self.stage,
            coupled=tuple(range(size)),
            alike=stages[self.stage],
        )
        self.agreement = Agreement(dist.PrefixStore("votes", self.store), rank, range(size), bound_s)
        self.collectives = 0

    def host(self, before=lambda shape: None, **changes) -> TinyHost:
        def between(shape):
            before(shape)
            self.collectives += 1
            dist.all_reduce(torch.ones(1), group=self.group)

        return TinyHost(topology=self.topology, between=between, **changes)

    def start(self, root: str, host: TinyHost | None = None, **settings) -> dict:
        report = start(Path(root), host or self.host(), self.agreement, **settings)
        return {**report.to_json(), "collectives": self.collectives, "winners": winners()}


def winners() -> dict:
    return {key: entry[:2] for key, entry in flashinfer_api.stored_entries().items()}


def plain_start(rank, size, port, root, pp_size=1, settings=None):
    return Rank(rank, size, port, pp_size=pp_size).start(root, **(settings or {}))


def all_start(size, root, target=plain_start, *args, timeout_s=120.0):
    return results_of(run_ranks(size, target, size, free_port(), str(root), *args, timeout_s=timeout_s))


def files(root) -> list[Path]:
    return sorted(path for path in Path(root).rglob("rank_*.json"))


def same_everywhere(reports, field):
    values = [report[field] for report in reports]
    assert all(value == values[0] for value in values), f"{field} differs: {values}"
    return values[0]


@pytest.mark.parametrize("size", [2, 4])
def test_cold_then_warm(tmp_path, size):
    cold = all_start(size, tmp_path)
    assert [report["profiles_tuned"] for report in cold] == [NUM_STEPS] * size
    same_everywhere(cold, "winners")
    same_everywhere(cold, "collectives")
    assert len(files(tmp_path)) == size
    warm = all_start(size, tmp_path)
    assert [report["profiles_tuned"] for report in warm] == [0] * size
    assert [report["fallbacks"] for report in warm] == [0] * size
    assert [entry["rank"] for entry in warm[0]["ranks"]] == list(range(size))


def test_only_rank_0s_file_present(tmp_path):
    all_start(2, tmp_path)
    os.remove(files(tmp_path)[1])
    reports = all_start(2, tmp_path)
    assert [report["profiles_tuned"] for report in reports] == [NUM_STEPS] * 2, "both tune, neither waits"
    same_everywhere(reports, "collectives")
    assert [report["profiles_tuned"] for report in all_start(2, tmp_path)] == [0, 0]


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    document.pop("_generation", None)
    change(document, [key for key in document if not key.startswith("_")])
    path.write_text(json.dumps(document))


def without_one_entry(document, keys):
    del document[keys[0]]


def with_one_key_renamed(document, keys):
    document[keys[0].replace("(4, 16, 8)", "(4, 16, 9)")] = document.pop(keys[0])


def corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("change", [without_one_entry, with_one_key_renamed])
def test_one_entry_of_one_rank_is_gone_and_its_step_alone_is_tuned_by_both(tmp_path, change):
    all_start(2, tmp_path)
    edit(files(tmp_path)[1], change)
    reports = all_start(2, tmp_path)
    assert [report["profiles_tuned"] for report in reports] == [1, 1]
    same_everywhere(reports, "winners")
    assert [report["fallbacks"] for report in reports] == [0, 0]


def test_one_ranks_file_is_corrupt(tmp_path):
    all_start(2, tmp_path)
    corrupt(files(tmp_path)[1])
    reports = all_start(2, tmp_path)
    assert [report["profiles_tuned"] for report in reports] == [NUM_STEPS] * 2
    assert reports[1]["records"]["rejected"] and not reports[0]["records"]["rejected"]
    assert [report["profiles_tuned"] for report in all_start(2, tmp_path)] == [0, 0]


def skip_lists_differ(rank, size, port, root):
    return Rank(rank, size, port).start(root, skip_ops=("some::op",) if rank else ())


def test_different_skip_lists_are_refused_before_any_forward(tmp_path):
    for outcome in run_ranks(2, skip_lists_differ, 2, free_port(), str(tmp_path)):
        assert "rank 1 differs from rank 0 in its skip list" in outcome.error
        assert "--flashinfer-autotune-skip-ops" in outcome.error
    assert not files(tmp_path)


def disabled_on_one(rank, size, port, root):
    return Rank(rank, size, port).start(root, disabled=rank == 1)


def test_one_rank_with_the_stage_disabled_means_none_runs_it(tmp_path):
    reports = all_start(2, tmp_path, disabled_on_one)
    assert [report["status"] for report in reports] == ["skipped", "skipped"]
    assert "rank 1: --disable-flashinfer-autotune" in reports[0]["reason"]


def stage_without_flashinfer(rank, size, port, root):
    me = Rank(rank, size, port, pp_size=2)
    if me.stage == 1:

        def broken():
            raise flashinfer_api.TuningUnavailable("FlashInfer cannot be imported (ImportError)")

        flashinfer_api.version = broken
    return me.start(root)


def test_a_pipeline_stage_without_flashinfer_leaves_all_ranks_untuned(tmp_path):
    reports = all_start(4, tmp_path, stage_without_flashinfer)
    assert {report["status"] for report in reports} == {"failed"}
    assert all("rank 2" in report["reason"] for report in reports)
    assert {report["collectives"] for report in reports} == {0}


def little_memory(rank, size, port, root):
    me = Rank(rank, size, port)
    host = me.host()
    if rank == 1:
        host.free_memory_bytes = lambda: 1 << 30
        host.step_memory_bytes = lambda shape: 1 << 34 if shape.op_tokens == 4 else 1
    return me.start(root, host)


def test_too_little_headroom_on_one_rank_leaves_the_step_out_on_all(tmp_path):
    reports = all_start(2, tmp_path, little_memory)
    for report in reports:
        assert [left["step"] for left in report["left_out"]] == ["decode 4"]
        assert "rank 1 has 1.00 GiB free" in report["left_out"][0]["reason"]
        assert report["profiles_tuned"] == NUM_STEPS - 1
    same_everywhere(reports, "collectives")


def out_of_memory(rank, size, port, root):
    me = Rank(rank, size, port, bound_s=4.0)

    def before(shape):
        if rank == 1 and shape.op_tokens == 4:
            raise torch.cuda.OutOfMemoryError("tried to allocate 3 GiB")

    return me.start(root, me.host(before))


def test_out_of_memory_in_a_coupled_forward_is_bounded_and_named_and_left_out_next_time(tmp_path):
    outcomes = run_ranks(2, out_of_memory, 2, free_port(), str(tmp_path))
    assert "rank 1 failed in autotune step decode 4" in outcomes[1].error
    assert outcomes[0].error is not None and "still running" not in outcomes[0].error
    reports = all_start(2, tmp_path)
    for report in reports:
        assert [left["step"] for left in report["left_out"]] == ["decode 4"]
        assert report["status"] == "completed"
    same_everywhere(reports, "profiles_tuned")


def sleeper(rank, size, port, root):
    me = Rank(rank, size, port, bound_s=2.0)
    if rank == 1:
        me.agreement.announce("loading weights")
        me.store.wait(["rank 0 gave up"])
        return None
    try:
        return me.start(root)
    finally:
        me.store.set("rank 0 gave up", b"1")


def test_a_rank_that_sleeps_past_the_bound_is_named_with_what_it_was_doing(tmp_path):
    first, *_ = run_ranks(2, sleeper, 2, free_port(), str(tmp_path))
    assert "rank 1" in first.error and "loading weights" in first.error
    assert "SGLANG_AUTOTUNE_TIMEOUT" in first.error


def jittery(rank, size, port, root, seed):
    """Clocks whose noise exceeds the differences between tactics, other noise on each rank."""
    me = Rank(rank, size, port)
    noise = random.Random(1000 * seed + rank)

    def noisy_time(self, candidate, inputs, kwargs, best_s):
        return 1.0 + 0.001 * (int(candidate.tactic) % 3) + noise.uniform(-0.05, 0.05)

    CpuProfiler.time_s = noisy_time
    results = []
    for attempt in range(10):
        results.append(me.start(f"{root}/{attempt}", verify="off")["winners"])
    return results


@pytest.mark.parametrize("seed", range(5))
def test_clock_jitter_that_flips_local_winners_leaves_all_ranks_agreed(tmp_path, seed):
    per_rank = all_start(3, tmp_path, jittery, seed)
    for attempt in range(10):
        assert per_rank[0][attempt] == per_rank[1][attempt] == per_rank[2][attempt]


def fewer_ops(rank, size, port, root):
    """TP2 x PP3 with one stage whose forward asks for nothing tunable."""
    me = Rank(rank, size, port, pp_size=3)
    host = me.host()
    if me.stage == 1:
        host.dummy_forward = lambda shape, every_layer=True: host.between(shape)
    return me.start(root, host)


def test_a_stage_with_one_op_fewer_does_not_hang_the_others(tmp_path):
    reports = all_start(6, tmp_path, fewer_ops)
    assert {report["status"] for report in reports} == {"completed"}
    tuned = [report["profiles_tuned"] for report in reports]
    assert tuned == [NUM_STEPS, NUM_STEPS, 0, 0, NUM_STEPS, NUM_STEPS]
    warm = all_start(6, tmp_path, fewer_ops)
    assert {report["profiles_tuned"] for report in warm} == {0}


def own_experts(rank, size, port, root):
    """Expert-parallel ranks: each has keys of its own, in a file of its own."""
    me = Rank(rank, size, port)
    host = me.host()
    extras = host.runner.op.runners[0].get_cache_key_extras
    for runner in host.runner.op.runners:
        runner.get_cache_key_extras = lambda inputs: (*extras(inputs), f"ep{rank}")
    return me.start(root, host)


def test_ranks_with_different_experts_keep_different_records_across_restarts(tmp_path):
    cold = all_start(2, tmp_path, own_experts)
    assert set(cold[0]["winners"]).isdisjoint(cold[1]["winners"])
    before = [path.read_bytes() for path in files(tmp_path)]
    warm = all_start(2, tmp_path, own_experts)
    assert [report["profiles_tuned"] for report in warm] == [0, 0]
    assert [path.read_bytes() for path in files(tmp_path)] == before


def of_another_runner(record):
    other = "DenseMoE" if record.runner == "SortedMoE" else "SortedMoE"
    return replace(record, key=with_runner(record.key, other), runner=other, tactic=1)


def different_winners(rank, size, port, root):
    me = Rank(rank, size, port)
    path = me.start(root)["cache_path"]
    if rank == 1:
        environment = flashinfer_api.environment()
        store = RecordStore(path, environment)
        records = list(store.load().records.values())
        store.commit([of_another_runner(record) for record in records[:2]])
    me.agreement.gather("edited", True)
    first = me.start(root)
    second = me.start(root)
    return first, second


def test_a_difference_between_ranks_that_must_agree_is_repaired_from_the_lowest_rank(tmp_path):
    (first0, second0), (first1, second1) = all_start(2, tmp_path, different_winners)
    assert first0["disagreements"] == [] and len(first1["disagreements"]) == 2
    assert first0["winners"] == first1["winners"] == second0["winners"] == second1["winners"]
    assert second1["disagreements"] == [], "the repair was kept"
    assert first0["ranks"][1]["disagreements"] == 2, "rank 0's report tells of it"


def given_to(rank, size, port, root, path, ranks):
    me = Rank(rank, size, port)
    return me.start(root, given_records=(Path(path),) if rank in ranks else ())


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_given_record_stands_only_where_every_rank_was_given_it(tmp_path, ranks):
    (key, *_), stamp = all_start(2, tmp_path / "a")[0]["winners"], flashinfer_api.environment()
    key = with_runner(key, "DenseMoE")
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"_metadata": stamp, key: ["DenseMoE", 1]}))
    reports = all_start(2, tmp_path / "b", given_to, str(given), ranks)
    same_everywhere(reports, "winners")
    same_everywhere(reports, "collectives")
    assert [report["profiles_tuned"] for report in reports] == [NUM_STEPS - (len(ranks) == 2)] * 2
    if len(ranks) == 2:
        assert reports[0]["winners"][key] == ["DenseMoE", 1]


def one_runner_fewer(rank, size, port, root):
    me = Rank(rank, size, port)
    host = me.host()
    if rank == 1:
        host.runner.op.runners.pop()
    return me.start(root, host)


def test_a_runner_that_one_rank_does_not_have_competes_on_none(tmp_path):
    reports = all_start(2, tmp_path, one_runner_fewer)
    assert [report["status"] for report in reports] == ["completed", "completed"]
    chosen = same_everywhere(reports, "winners")
    assert {runner for runner, _ in chosen.values()} == {"SortedMoE"}
    assert reports[0]["warnings"] == ["DenseMoE does not compete in sglang::moe: rank 1 does not have it"]
    assert reports[1]["warnings"] == []


def test_a_pin_of_one_rank_on_a_runner_that_is_not_here_costs_one_start(tmp_path):
    def pinned_strangers(document, keys):
        notes = document["_metadata"]["sglang"]["records"]
        for key in keys:
            policy, renamed = document.pop(key)[2:], with_runner(key, "WarpMoE")
            document[renamed] = ["WarpMoE", 3, *policy]
            notes[renamed] = {"tactic": 3, "pinned": True}

    all_start(2, tmp_path)
    edit(files(tmp_path)[1], pinned_strangers)
    for profiles_tuned in (NUM_STEPS, 0):
        reports = all_start(2, tmp_path)
        assert [report["profiles_tuned"] for report in reports] == [profiles_tuned] * 2
        assert [len(report["records"]["rejected"]) for report in reports] == [0, 1]
        same_everywhere(reports, "winners")
        same_everywhere(reports, "collectives")


def killed_at(rank, size, port, root, victim, step):
    me = Rank(rank, size, port, bound_s=3.0)
    host = me.host()
    plain = host.between

    def between(shape):
        if rank == victim and len(host.forwards) == step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(shape)

    host.between = between
    return me.start(root, host)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_sigkill_of_a_rank_at_a_step_ends_the_others_and_the_restart_resumes(tmp_path, victim, step):
    outcomes = run_ranks(2, killed_at, 2, free_port(), str(tmp_path), victim, step)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    survivor = outcomes[1 - victim]
    assert survivor.error is not None and "still running" not in survivor.error
    reports = all_start(2, tmp_path)
    for report in reports:
        assert report["status"] == "completed" and report["fallbacks"] == 0
        assert report["profiles_tuned"] >= NUM_STEPS - step - 1
    same_everywhere(reports, "winners")


def idle_ranks(rank, size, port, root):
    me = Rank(rank, size, port)
    return me.start(root, me.host(limits=Limits((1, 2), 2, 4, moe_gather=2)))


def test_ranks_without_tokens_take_part(tmp_path):
    reports = all_start(2, tmp_path, idle_ranks)
    same_everywhere(reports, "collectives")
    assert [1, 0] in [step["tokens_per_rank"] for step in reports[0]["plan"]["steps"]]


def budgets(rank, size, port, root):
    """Rank 1's clock runs twenty times as fast, so that it alone has spent its budget after a step or two."""
    me = Rank(rank, size, port)
    if rank == 1:
        stage.time = types.SimpleNamespace(monotonic=lambda: 20 * time.monotonic())
    return me.start(root, me.host(lambda shape: time.sleep(0.05)), budget_s=3.0)


def test_all_ranks_stop_after_the_same_step_when_one_has_spent_the_budget(tmp_path):
    reports = all_start(2, tmp_path, budgets)
    left = [
        [step["num_tokens"] for step in report["steps"] if step["source"] == "over budget"]
        for report in reports
    ]
    assert left[0] == left[1] and 0 < len(left[0]) < NUM_STEPS
    assert OP_NAME in str(reports[0]["winners"])
