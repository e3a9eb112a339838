"""MegaMoE inside the stage: after the ordinary steps, in the same record file, never for a draft model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe.host import MegaMoEHost
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles
from sglang.srt.autotune.megamoe.records import NAMESPACE
from sglang.srt.autotune.megamoe.staging import stage_profiles
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
