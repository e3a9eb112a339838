"""MegaMoE profiles of one rank: selection, records, inputs, environment, and the reference layer's life cycle."""

from __future__ import annotations

import json
import os

import pytest
import torch
from flashinfer.moe_ep import MoEEpConfigError

from sglang.srt.autotune import flashinfer_moe_ep
from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.env_guard import KNOB_CACHE_VARIABLE, environment, scratch_knob_cache
from sglang.srt.autotune.megamoe.inputs import representative_inputs, routed_inputs, synthetic_inputs
from sglang.srt.autotune.megamoe.kernels import reference_layer
from sglang.srt.autotune.megamoe.kernels.base import CapacityExceeded, Geometry, MegaInputs, MegaMoEError
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE
from sglang.srt.autotune.megamoe.kernels.reference_layer import all_knobs, run_experts
from sglang.srt.autotune.megamoe.profiles import MegaMoEProfiles, knobs_in_use
from sglang.srt.autotune.megamoe.records import NAMESPACE, key_of, read_winners
from sglang.srt.autotune.megamoe.staging import stage_profiles
from support.megamoe import CAPACITIES, MemoryRecords, random_experts, small_geometry

CPU = torch.device("cpu")


@pytest.fixture
def kernel():
    return ReferenceMegaMoE(small_geometry())


@pytest.fixture
def profiles(kernel):
    profiles = MegaMoEProfiles(kernel, 4)
    for layer in (0, 1):
        profiles.add_owner(kernel.prepare_weights(*random_experts(kernel.geometry, layer)))
    yield profiles
    profiles.close()
    assert reference_layer.pooled_workspace_count() == 0


def stage(profiles, records=None, capacities=CAPACITIES, **options):
    return stage_profiles(
        profiles, capacities, records or MemoryRecords(), Agreement.alone(), dtype=torch.float32, **options
    )


# selection --------------------------------------------------------------------------------------------------


def test_the_smallest_covering_capacity_is_selected(profiles):
    stage(profiles, capacities=(1, 2, 4, 12, 256))
    chosen = [profiles.capacities[profiles.select(n)] for n in (1, 2, 3, 4, 5, 12, 13, 256)]
    assert chosen == [1, 2, 4, 4, 12, 12, 256, 256]
    with pytest.raises(CapacityExceeded, match="257 tokens on one rank and the largest workspace holds 256"):
        profiles.select(257)


def test_results_are_those_of_the_float_reference_at_every_count(profiles):
    stage(profiles)
    for count in (1, 2, 3, 7, 16):
        inputs = routed_inputs(count, profiles.kernel.geometry, torch.float32, CPU, seed=count)
        for layer in (0, 1):
            expected = profiles.kernel.float_reference(profiles.weights[layer], inputs)
            torch.testing.assert_close(profiles.forward(layer, inputs, count), expected, rtol=1e-4, atol=1e-5)


def test_an_ordinary_forward_reads_no_environment_and_no_file_and_allocates_no_workspace(
    profiles, monkeypatch
):
    stage(profiles)
    inputs = routed_inputs(3, profiles.kernel.geometry, torch.float32, CPU)
    pooled = reference_layer.pooled_workspace_count()

    def refuse(*args, **options):
        raise AssertionError("a forward must not look")

    monkeypatch.setattr(os, "environ", None)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(knob_file, "read_entries", refuse)
    result = profiles.forward(0, inputs, 3)
    monkeypatch.undo()
    assert result.shape == (3, 64) and reference_layer.pooled_workspace_count() == pooled


def test_an_engine_that_does_not_tune_has_one_workspace_with_the_kernels_default(profiles, kernel, tmp_path):
    mine = tmp_path / "mine.json"
    knob_file.record(mine, kernel.entry_fields(), 4, {"experts": "batched", "tile_rows": 32}, 1.0, "autotune")
    with environment({KNOB_CACHE_VARIABLE: str(mine)}):
        profiles.open_ordinary()
    assert profiles.capacities == (4,) and not profiles.is_tuned
    assert profiles.workspaces(0)[0].buffers.knobs == reference_layer.DEFAULT_KNOBS
    inputs = routed_inputs(4, kernel.geometry, torch.float32, CPU)
    assert profiles.forward(0, inputs, 4).shape == (4, 64)


def test_a_forward_before_anything_is_open_is_an_error(profiles):
    with pytest.raises(MegaMoEError, match="before its workspaces were opened"):
        profiles.forward(0, routed_inputs(1, profiles.kernel.geometry, torch.float32, CPU), 1)


# staging and records ----------------------------------------------------------------------------------------


def test_the_report_says_what_was_tuned_and_what_it_gained(profiles):
    report = stage(profiles).to_json()
    assert (report["kernel"], report["policy"], report["tuned"]) == ("reference_megamoe", "sweep", 5)
    assert set(report["winners"]) == {"1", "2", "4", "8", "16"}
    for winner in report["winners"].values():
        assert winner["source"] == "tuned" and 0 < winner["time_us"] <= winner["default_us"]
    json.dumps(report)


def test_what_a_warm_up_remarks_is_said_once_for_all_layers(profiles, monkeypatch, caplog):
    warmup = reference_layer.ReferenceMegaLayer.warmup

    def remarking(self, inputs=None, *, workspace=None):
        warmup(self, inputs, workspace=workspace)
        return None if workspace is None or workspace.max_tokens_per_rank != 8 else "it is slower here"

    monkeypatch.setattr(reference_layer.ReferenceMegaLayer, "warmup", remarking)
    assert stage(profiles).problems == ["capacity 8: it is slower here"]
    assert caplog.text.count("MegaMoE at capacity 8: it is slower here") == 1


def test_records_hold_the_native_payload(profiles, kernel):
    records = MemoryRecords()
    stage(profiles, records, capacities=(2, 8))
    payload = records.content[NAMESPACE][key_of(kernel, 8)]
    assert payload["kernel"] == "reference_megamoe" and payload["version"] == 1
    entry = payload["entry"]
    assert entry["max_tokens"] == 8 and entry["source"] == "sweep" and entry["hidden"] == 64
    assert knobs_in_use(kernel, 8) == entry["knobs"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: p.pop("entry"), "holds no knob-cache entry"),
        (lambda p: p.update(kernel="other"), "belongs to kernel 'other'"),
        (lambda p: p.update(version="1"), "format version is not a number"),
        (lambda p: p["entry"].update(hidden=128), "its hidden is 128, not 64"),
        (lambda p: p["entry"].update(max_tokens=16), "its max_tokens is 16, not 8"),
        (lambda p: p["entry"].update(device="another CPU"), "its device is 'another CPU'"),
        (lambda p: p["entry"].update(knobs=None), "the knobs are not exactly"),
        (lambda p: p["entry"]["knobs"].update(tile_rows=9), "knob tile_rows cannot be 9"),
        (lambda p: p["entry"]["knobs"].update(extra=1), "the knobs are not exactly"),
    ],
)
def test_a_payload_that_does_not_fit_is_rejected_with_its_reason(profiles, kernel, change, reason):
    records = MemoryRecords()
    stage(profiles, records, capacities=(8,))
    payload = json.loads(json.dumps(records.content[NAMESPACE][key_of(kernel, 8)]))
    change(payload)
    winners, rejected = read_winners(kernel, (8,), {key_of(kernel, 8): payload})
    assert not winners and reason in rejected[0]["reason"]


def test_a_payload_of_any_shape_is_only_rejected(kernel):
    for payload in (None, 3, [], "x", {}, {"entry": []}, {"entry": {"knobs": []}, "kernel": kernel.name}):
        winners, rejected = read_winners(kernel, (8,), {key_of(kernel, 8): payload})
        assert not winners and len(rejected) == 1


def test_the_environment_is_restored_also_when_staging_fails(profiles, monkeypatch):
    monkeypatch.setenv(KNOB_CACHE_VARIABLE, "/some/where.json")
    before = dict(os.environ)

    def fail(capacity):
        raise MemoryError("no memory")

    monkeypatch.setattr(profiles.owners[0], "create_workspace", fail)
    with pytest.raises(MegaMoEError, match="no memory"):
        stage(profiles)
    assert dict(os.environ) == before and not profiles.is_frozen


def test_variables_are_restored_and_unset_ones_vanish_again(monkeypatch):
    monkeypatch.delenv("MEGA_NO_DIST", raising=False)
    monkeypatch.setenv("OTHER", "kept")
    with pytest.raises(KeyError), scratch_knob_cache({"MEGA_NO_DIST": "1", "OTHER": "changed"}) as path:
        assert os.environ[KNOB_CACHE_VARIABLE] == str(path) and os.environ["OTHER"] == "changed"
        raise KeyError("whatever")
    assert "MEGA_NO_DIST" not in os.environ and os.environ["OTHER"] == "kept"
    assert not path.parent.exists()


def test_a_second_ladder_of_a_geometry_keeps_the_knobs_of_open_workspaces(profiles, kernel):
    stage(profiles, capacities=(2, 4))
    second = MegaMoEProfiles(kernel, 4)
    second.add_owner(profiles.weights[0])
    report = stage(second, capacities=(2, 4, 8))
    assert (report.kept, report.tuned) == (2, 1)
    assert second.workspaces(0)[0].buffers is profiles.workspaces(0)[0].buffers
    second.close()
    assert knobs_in_use(kernel, 8) is None and knobs_in_use(kernel, 2) is not None


# knob cache -------------------------------------------------------------------------------------------------


def test_flashinfer_reads_the_knob_cache_that_is_written_here_and_the_reverse(tmp_path, monkeypatch):
    path = tmp_path / "knobs.json"
    monkeypatch.setenv(KNOB_CACHE_VARIABLE, str(path))
    fields = {
        "device": "NVIDIA H200",
        "dtype": "fp8_e4m3",
        "fp8_scale_mode": "blockwise",
        "world_size": 1,
        "hidden": 1024,
        "intermediate": 512,
        "num_experts": 8,
        "topk": 2,
    }
    small = {"mma_tiler_mnk": (256, 32, 128), "swap_ab": True}
    large = {"mma_tiler_mnk": (128, 16, 128), "swap_ab": False}
    for capacity, knobs in ((8, small), (64, large)):
        flashinfer_moe_ep.hopper_record(knobs, **fields, max_tokens=capacity, p50_us=50.0, source="autotune")
    # A start stores entries as FlashInfer wrote them, and hands them back one by one under the same version.
    entries, version = [knob_file.entry_at(path, fields, c) for c in (8, 64)], knob_file.version_of(path)
    path.unlink()
    for entry in entries:
        assert entry is not None
        knob_file.restore(path, [json.loads(json.dumps(entry))], version)
    for capacity, expected in ((1, small), (8, small), (9, large), (64, large), (65, large)):
        assert flashinfer_moe_ep.hopper_lookup(**fields, max_tokens=capacity) == expected
        assert knob_file.lookup(path, fields, capacity) == expected
    assert knob_file.lookup(path, {**fields, "topk": 4}, 8) is None
    assert knob_file.entry_at(path, fields, 64)["p50_us"] == 50.0
    assert knob_file.entry_at(path, fields, 16) is None


def test_an_entry_is_replaced_by_its_own_key_only(tmp_path):
    path = tmp_path / "knobs.json"
    for fields, knob in (({"hidden": 1}, 1), ({"hidden": 2}, 2), ({"hidden": 1}, 3)):
        knob_file.record(path, fields, 8, {"a": knob}, None, "sweep")
    assert [entry["knobs"]["a"] for entry in knob_file.read_entries(path)] == [2, 3]


@pytest.mark.parametrize("word", ["0", "off", "None", "disabled"])
def test_the_knob_cache_can_be_switched_off(monkeypatch, word):
    monkeypatch.setenv(KNOB_CACHE_VARIABLE, word)
    assert knob_file.knob_file_path() is None


def test_a_broken_knob_cache_is_empty(tmp_path):
    path = tmp_path / "knobs.json"
    for text in ("", "[]", "{", '{"entries": 3}', '{"version": 1, "entries": [1, {}]}'):
        path.write_text(text)
        assert knob_file.lookup(path, {"hidden": 1}, 8) is None


# inputs -----------------------------------------------------------------------------------------------------


def test_inputs_repeat_or_slice_the_startup_batch():
    geometry = small_geometry()
    startup = routed_inputs(3, geometry, torch.float32, CPU)
    more = representative_inputs(startup, 7, geometry, torch.float32, CPU)
    less = representative_inputs(startup, 2, geometry, torch.float32, CPU)
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        rows = getattr(startup, name)
        assert torch.equal(getattr(more, name), rows[[0, 1, 2, 0, 1, 2, 0]])
        assert torch.equal(getattr(less, name), rows[:2])


def test_an_idle_rank_makes_up_inputs_that_reach_every_rank_with_uniform_weights():
    geometry = Geometry(64, 32, 8, 2, world_size=4, rank=3)
    idle = MegaInputs(torch.empty(0, 64), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    inputs = representative_inputs(idle, 8, geometry, torch.float32, CPU)
    assert inputs.topk_ids.unique().tolist() == list(range(8)), "valid ids over the whole EP range"
    assert (inputs.topk_weights == 0.5).all() and inputs.hidden_states.isfinite().all()
    other = synthetic_inputs(8, Geometry(64, 32, 8, 2, 4, 0), torch.float32, CPU)
    assert not torch.equal(inputs.topk_ids, other.topk_ids), "ranks start at experts of their own"


# the reference layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 32), (128, 128), (512, 256)])
def test_knobs_never_change_a_bit(shape):
    hidden, inner = shape
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn((4, 2 * inner, hidden), generator=generator)
    w2 = torch.randn((4, hidden, inner), generator=generator)
    for num_rows in (1, 2, 3, 9, 70):
        x = torch.randn((num_rows, hidden), generator=generator)
        ids = torch.randint(-1, 4, (num_rows, 2), generator=generator)
        weights = torch.rand((num_rows, 2), generator=generator)
        results = [run_experts(x, ids, weights, w13, w2, knobs) for knobs in all_knobs()]
        assert all(torch.equal(result, results[0]) for result in results)
        alone = run_experts(x[:1], ids[:1], weights[:1], w13, w2, all_knobs()[0])
        assert torch.equal(alone[0], results[0][0]), "a row does not depend on its company"


def test_the_layer_refuses_what_flashinfers_refuses(kernel):
    weights = kernel.prepare_weights(*random_experts(kernel.geometry, 0))
    layer = kernel.create_owner(weights, 4)
    workspace = layer.create_workspace(8)
    inputs = routed_inputs(9, kernel.geometry, torch.float32, CPU)
    few = routed_inputs(2, kernel.geometry, torch.float32, CPU)
    layer.forward(few, workspace=workspace)
    wide = MegaInputs(few.hidden_states, few.topk_ids.long(), few.topk_weights)
    refusals = [
        (lambda: layer.create_workspace(8), "already exists on this layer"),
        (lambda: layer.create_workspace(0), "must be positive"),
        (lambda: layer.create_workspace(True), "must be an int"),
        (lambda: layer.forward(inputs, workspace=workspace), "9 tokens exceed max_tokens_per_rank=8"),
        (lambda: layer.forward(inputs), "9 tokens exceed max_tokens_per_rank=4"),
        (lambda: layer.forward(few, workspace=object()), "created by create_workspace"),
        (lambda: layer.forward(wide, workspace=workspace), "signature changed"),
        (lambda: kernel.create_owner(weights, 4, "auto").create_workspace(8), "needs fixed knobs"),
        (lambda: kernel.create_owner(weights, 4, "guess"), "must be None, a dict or 'auto'"),
    ]
    for call, message in refusals:
        with pytest.raises((MoEEpConfigError, TypeError, ValueError), match=message):
            call()
    other = kernel.create_owner(weights, 4)
    with pytest.raises(MoEEpConfigError, match="belongs to a different layer"):
        other.forward(few, workspace=workspace)
    workspace.destroy()
    workspace.destroy()
    with pytest.raises(MoEEpConfigError, match="workspace has been destroyed"):
        layer.forward(few, workspace=workspace)
    layer.destroy()
    layer.destroy()
    for call in (lambda: layer.forward(few), lambda: layer.create_workspace(2)):
        with pytest.raises(MoEEpConfigError, match="layer has been destroyed"):
            call()


def test_the_bootstrap_capacity_takes_over_the_lazy_workspace(kernel):
    layer = kernel.create_owner(kernel.prepare_weights(*random_experts(kernel.geometry, 0)), 4)
    layer.forward(routed_inputs(2, kernel.geometry, torch.float32, CPU))
    assert reference_layer.pooled_workspace_count() == 1
    workspace = layer.create_workspace(4)
    assert reference_layer.pooled_workspace_refcount(workspace.buffers) == 1
    layer.destroy()
    assert reference_layer.pooled_workspace_count() == 0


def test_auto_knobs_tune_in_the_first_forward_and_record_the_winner(kernel):
    weights = kernel.prepare_weights(*random_experts(kernel.geometry, 0))
    with scratch_knob_cache({}):
        layer = kernel.create_owner(weights, 4, "auto")
        assert kernel.recorded(4) is None
        layer.forward(routed_inputs(3, kernel.geometry, torch.float32, CPU))
        assert kernel.recorded(4) in all_knobs()
        layer.destroy()


def test_sizes_that_break_the_alignment_are_refused_with_the_rule():
    kernel = ReferenceMegaMoE(Geometry(60, 32, 8, 2))
    with pytest.raises(ValueError, match="hidden size must be a multiple of 8 .the model has 60."):
        kernel.prepare_weights(torch.zeros(8, 64, 60), torch.zeros(8, 60, 32))
