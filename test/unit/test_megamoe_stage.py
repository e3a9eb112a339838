"""MegaMoE inside the stage: after the ordinary steps, in the same record file, never for a draft model."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.journal import Journal
from sglang.srt.autotune.megamoe import staging
from sglang.srt.autotune.megamoe.host import MegaMoEHost
from sglang.srt.autotune.megamoe.kernels import reference_layer
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.records import NAMESPACE
from sglang.srt.autotune.megamoe.staging import stage_profiles
from sglang.srt.autotune.megamoe.tuning import tune
from sglang.srt.autotune.ops import MEGAMOE_OP
from support.megamoe import MemoryRecords, random_experts, small_geometry
from support.tiny_host import TinyHost, start

CAPACITIES = [1, 2, 4, 16]


@pytest.fixture
def host():
    """A host that has ordinary steps and MegaMoE profiles of two layers; a new ladder with each `host()`."""
    opened: list[MegaMoEProfiles] = []

    def make(*, draft: bool = False) -> TinyHost:
        kernel = ReferenceMegaMoE(small_geometry())
        profiles = MegaMoEProfiles(kernel, 4)
        for layer in (0, 1):
            profiles.add_owner(kernel.prepare_weights(*random_experts(kernel.geometry, layer)))
        opened.append(profiles)
        tiny = TinyHost()
        tiny.megamoe = MegaMoEHost(profiles, torch.float32)
        tiny.identity = dataclasses.replace(tiny.identity, draft=draft)
        return tiny

    yield make
    for profiles in opened:
        profiles.close()


def close(host: TinyHost) -> None:
    host.megamoe.profiles.close()


def test_steps_and_profiles_share_one_stage_and_one_file(host, tmp_path):
    cold_host = host()
    cold = start(tmp_path, cold_host)
    assert cold.status == "completed" and cold.megamoe["capacities"] == CAPACITIES
    assert cold.megamoe["tuned"] == 4 and cold.profiles_tuned > 4
    assert set(cold.timings) >= {"steps", "megamoe"}
    document = json.loads(Path(cold.cache_path).read_text())
    assert len(document["_records"][NAMESPACE]) == 4
    assert any(not key.startswith("_") for key in document)
    close(cold_host)

    before = Path(cold.cache_path).read_bytes()
    warm = start(tmp_path, host())
    assert warm.profiles_tuned == 0 and warm.megamoe["cached"] == 4
    assert Path(cold.cache_path).read_bytes() == before, "a warm start writes no record file"


def test_without_reuse_profiles_are_tuned_afresh_into_a_file_of_their_own(host, tmp_path):
    first_host = host()
    first = start(tmp_path, first_host)
    before = Path(first.cache_path).read_bytes()
    close(first_host)
    fresh = start(tmp_path, host(), use_cache=False)
    assert fresh.megamoe["tuned"] == 4 and fresh.cache_path != first.cache_path
    assert len(json.loads(Path(fresh.cache_path).read_text())["_records"][NAMESPACE]) == 4
    assert Path(first.cache_path).read_bytes() == before


def test_skipping_the_op_leaves_the_profiles_alone_and_tunes_the_rest(host, tmp_path):
    skipping = host()
    report = start(tmp_path, skipping, skip_ops=(MEGAMOE_OP,))
    assert report.status == "completed" and report.profiles_tuned > 0
    assert report.megamoe is None and not skipping.megamoe.profiles.is_frozen


def test_a_draft_models_profiles_are_never_tuned(host, tmp_path):
    draft = host(draft=True)
    report = start(tmp_path, draft)
    assert report.status == "completed" and report.megamoe is None
    assert not draft.megamoe.profiles.is_frozen


def test_a_start_that_ends_while_it_tunes_keeps_the_winners_that_it_had(host):
    records, first = MemoryRecords(), host().megamoe.profiles
    opened = []

    def end_after_two(capacity: int) -> None:
        opened.append(capacity)
        if len(opened) == 2:
            raise KeyboardInterrupt

    def stage(profiles, **options):
        return stage_profiles(
            profiles, CAPACITIES, records, Agreement.alone(), dtype=torch.float32, **options
        )

    with pytest.raises(KeyboardInterrupt):
        stage(first, on_capacity=end_after_two)
    assert not first.is_frozen and len(records.content[NAMESPACE]) == 2
    report = stage(host().megamoe.profiles)
    assert (report.tuned, report.cached) == (2, 2)


# what broke an earlier start ------------------------------------------------------------------------------------


@pytest.fixture
def staged(host, tmp_path):
    """A start of the profiles alone over the same records and journal; each closes the one before."""
    records, before = MemoryRecords(), []

    def run(journal: str = "here.journal", **options):
        for profiles in before:
            profiles.close()
        profiles = host().megamoe.profiles
        before[:] = [profiles]
        with Journal(tmp_path / journal) as open_journal:
            report = stage_profiles(
                profiles,
                CAPACITIES,
                records,
                Agreement.alone(),
                dtype=torch.float32,
                journal=open_journal,
                **options,
            )
        return report

    return run


def break_opening(monkeypatch):
    """Warming a workspace of four tokens raises, unless it has the default's knobs."""
    warmup = reference_layer.ReferenceMegaLayer.warmup

    def failing(self, inputs=None, *, workspace=None):
        if workspace is not None and workspace.max_tokens_per_rank == 4:
            if workspace.buffers.knobs != reference_layer.DEFAULT_KNOBS:
                raise RuntimeError("an illegal memory access")
        warmup(self, inputs, workspace=workspace)

    monkeypatch.setattr(reference_layer.ReferenceMegaLayer, "warmup", failing)


def test_a_winner_that_cannot_be_opened_ends_one_start_and_the_next_serves_the_default_there(
    staged, monkeypatch, tmp_path
):
    other = {"experts": "batched", "tile_rows": 32}
    assert other != reference_layer.DEFAULT_KNOBS
    monkeypatch.setattr(ReferenceMegaMoE, "candidates", lambda self, capacity: [other])
    monkeypatch.setattr(ReferenceMegaMoE, "default_knobs", lambda self, capacity: dict(other))
    break_opening(monkeypatch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        staged()
    monkeypatch.undo()
    break_opening(monkeypatch)
    report = staged()
    assert report.winners["4"]["source"] == "default" and report.tuned + report.cached == 3
    (problem,) = report.problems
    assert "capacity 4: an earlier start failed there: RuntimeError: an illegal memory access" in problem
    assert f"delete {tmp_path / 'here.journal'} to try it again" in problem
    assert staged().winners["4"]["source"] == "default", "as long as the journal says so"
    (tmp_path / "here.journal").unlink()
    monkeypatch.undo()
    again = staged()
    assert not again.problems and again.winners["4"]["source"] == "cached"


def test_a_search_that_raises_ends_one_start_and_the_next_serves_defaults_for_what_is_missing(
    staged, monkeypatch
):
    def raising(policy, context, capacities):
        yield from islice(tune(policy, context, capacities), 2)
        raise RuntimeError("the search broke the context")

    monkeypatch.setattr(staging, "tune", raising)
    with pytest.raises(RuntimeError, match="broke the context"):
        staged()
    report = staged()
    sources = [report.winners[str(capacity)]["source"] for capacity in CAPACITIES]
    assert sources == ["cached", "cached", "default", "default"]
    assert len(report.problems) == 2 and "the search broke the context" in report.problems[0]
    assert len(staged().problems) == 2, "as long as the journal says so"


@pytest.mark.parametrize(
    ("entry", "sources"),
    [("megamoe 4", ["tuned", "tuned", "default", "tuned"]), ("megamoe search", ["default"] * 4)],
)
def test_what_starts_vanish_in_is_left_to_the_default_the_third_time(staged, tmp_path, entry, sources):
    path = tmp_path / "here.journal"
    for _ in range(2):
        with Journal(path) as journal:
            journal.begin(entry)  # and the process is gone
    report = staged()
    assert [report.winners[str(capacity)]["source"] for capacity in CAPACITIES] == sources
    assert all("2 earlier starts ended there without an error" in problem for problem in report.problems)


def test_a_start_that_goes_well_leaves_no_journal(host, tmp_path):
    for is_warm in (False, True):
        profiles = host()
        assert bool(start(tmp_path, profiles).megamoe["cached"]) is is_warm
        assert not list(tmp_path.rglob("*.journal"))
        close(profiles)


def test_a_start_does_not_call_a_capacity_at_the_default_covered(host, tmp_path):
    first = start(tmp_path, profiles := host())
    assert "default" not in first.reason
    close(profiles)
    with Journal(Path(first.cache_path).with_suffix(".journal")) as journal:
        journal.failed("megamoe 4", "RuntimeError: no")
    second = start(tmp_path, host())
    assert second.reason == "nothing tuned, MegaMoE's default at capacities 4"


def test_the_stage_notes_what_it_opens(host, tmp_path, monkeypatch):
    """The journal is that of the ordinary steps."""
    seen = []
    create = MegaMoEProfiles.create

    def looking(self, capacity, knobs):
        seen.extend(json.loads(path.read_text())["open"]["step"] for path in tmp_path.rglob("*.journal"))
        create(self, capacity, knobs)

    monkeypatch.setattr(MegaMoEProfiles, "create", looking)
    start(tmp_path, host())
    assert seen == [f"megamoe {capacity}" for capacity in CAPACITIES]
