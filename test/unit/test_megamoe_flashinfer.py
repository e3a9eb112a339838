"""FlashInfer's MegaMoE adapters as far as they go without a GPU: weights, knobs, configs and refusals."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from sglang.srt.autotune import flashinfer_moe_ep
from sglang.srt.autotune.megamoe.env_guard import scratch_knob_cache
from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels.base import Geometry, MegaInputs
from sglang.srt.autotune.megamoe.kernels.flashinfer import (
    FlashInferOwner,
    HopperFp8MegaMoE,
    Mxfp8MegaMoE,
    Nvfp4MegaMoE,
    kernel_class_for,
)
from sglang.srt.autotune.megamoe.kernels.fp8_bench import random_weights
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions
from sglang.srt.autotune.megamoe.kernels.reference import ReferenceMegaMoE

CPU = torch.device("cpu")
GEOMETRY = Geometry(256, 128, 8, 2)


def hopper(geometry: Geometry = GEOMETRY) -> HopperFp8MegaMoE:
    return HopperFp8MegaMoE(geometry, CPU, MegaMoEOptions())


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def experts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn((8, 256, 256), generator=generator) / 16
    w2 = torch.randn((8, 256, 128), generator=generator) / 11
    return w13.bfloat16(), w2.bfloat16()


def test_prepared_weights_compute_the_layers_experts_up_to_quantisation(experts):
    """The layer keeps UP rows first, FlashInfer wants GATE rows first: swapped halves would be off by more than 1."""
    pytest.importorskip("cutlass")
    weights = hopper().prepare_weights(*experts)
    inputs = routed_inputs(16, GEOMETRY, torch.bfloat16, CPU)
    exact = ReferenceMegaMoE(GEOMETRY).float_reference(experts, inputs)
    assert 0.02 < relative_error(hopper().float_reference(weights, inputs), exact) < 0.1


def test_the_reference_of_several_ranks_is_the_sum_of_their_experts(experts):
    pytest.importorskip("cutlass")
    weights = hopper().prepare_weights(*experts)
    inputs = routed_inputs(5, GEOMETRY, torch.bfloat16, CPU)
    whole = hopper().float_reference(weights, inputs)
    halves = torch.zeros_like(whole)
    for first in (0, 4):
        part = tuple(tuple(None if t is None else t[first : first + 4] for t in leg) for leg in weights)
        halves += hopper().float_reference(part, inputs, first)
    torch.testing.assert_close(halves, whole)


def test_the_benchs_random_weights_have_the_layout_of_prepared_ones(experts):
    pytest.importorskip("cutlass")
    prepared, random = hopper().prepare_weights(*experts), random_weights(GEOMETRY, CPU)
    for leg, other in zip(prepared, random, strict=True):
        for tensor, twin in zip(leg, other, strict=True):
            assert (tensor is None) == (twin is None)
            if tensor is not None:
                assert (tensor.shape, tensor.dtype, tensor.stride()) == (
                    twin.shape,
                    twin.dtype,
                    twin.stride(),
                )
    inputs = routed_inputs(4, GEOMETRY, torch.bfloat16, CPU)
    assert 0.05 < float(hopper().float_reference(random, inputs).std()) < 5


def test_the_layer_keeps_the_storage_of_the_prepared_weights():
    weights = random_weights(GEOMETRY, CPU)
    w13, w2 = hopper().layer_tensors(weights)
    assert w13.data_ptr() == weights[0][0].data_ptr() and w2.data_ptr() == weights[1][0].data_ptr()
    assert w13.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("geometry", "rule"),
    [
        (Geometry(192, 128, 8, 2), "hidden size that is a multiple of 128 .the model has 192."),
        (Geometry(256, 64, 8, 2), "expert intermediate size that is a multiple of 128 .the model has 64."),
        (Geometry(256, 128, 6, 2, world_size=4), "6 experts do not divide over --ep-size 4"),
    ],
)
def test_alignment_is_checked_with_the_rule_in_the_message(geometry, rule):
    with pytest.raises(ValueError, match=rule):
        hopper(geometry).check()
    with pytest.raises(ValueError, match="multiple of 64"):
        Mxfp8MegaMoE(Geometry(96, 128, 8, 2), CPU, MegaMoEOptions()).check()


def test_candidates_are_flashinfers_with_its_default_first_and_variants_complete_the_screened():
    kernel = hopper()
    for capacity in (1, 64, 1024):
        candidates, screened = kernel.candidates(capacity), kernel.screened(capacity)
        assert candidates[0] == kernel.default_knobs(capacity) and len(candidates) == 38
        reached = screened + [variant for knobs in screened for variant in kernel.variants(knobs)]
        assert (
            screened[0] == candidates[0]
            and len(screened) == 15
            and all(knobs in reached for knobs in candidates)
        )
        assert all(flashinfer_moe_ep.hopper_is_valid(knobs) for knobs in reached)
        assert {knobs["fp8_accum_mode"] for knobs in candidates} == {"1xacc"}


def test_knobs_survive_json_and_bad_ones_are_refused():
    kernel = hopper()
    knobs = kernel.candidates(64)[5]
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in knobs.items()}
    assert kernel.check_knobs(as_json) == knobs
    for change, reason in (
        ({"mma_tiler_mnk": [256, 32]}, "not three integers"),
        ({"mma_tiler_mnk": [100, 32, 128]}, "cannot be compiled"),
        ({"cluster_shape_mnk": "wide"}, "not three integers"),
        ({"surprise": 1}, "not exactly"),
    ):
        with pytest.raises(ValueError, match=reason):
            kernel.check_knobs({**as_json, **change})
    with pytest.raises(ValueError, match="not exactly"):
        kernel.check_knobs(None)


def test_winners_reach_flashinfer_through_the_scratch_knob_cache_capacity_by_capacity():
    kernel = hopper()
    chosen = {capacity: kernel.candidates(capacity)[capacity % 7 + 1] for capacity in (1, 8, 64)}
    with scratch_knob_cache(kernel.required_environment()):
        for capacity, knobs in chosen.items():
            kernel.record(knobs, capacity, 12.5, "sweep")
        assert {capacity: kernel.recorded(capacity) for capacity in chosen} == chosen
        assert kernel.recorded(2) == chosen[8]


def test_one_rank_needs_no_symmetric_memory_and_several_do():
    assert hopper().required_environment() == {"MEGA_NO_DIST": "1"}
    several = HopperFp8MegaMoE(Geometry(256, 128, 8, 2, 2, 0), CPU, MegaMoEOptions())
    assert several.required_environment() == {}


def test_an_owner_is_built_over_the_public_names_and_keeps_the_weights(monkeypatch):
    """Construction needs no GPU; opening a workspace does."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("MEGA_NO_DIST", "1")
    weights = random_weights(GEOMETRY, CPU)
    owner = hopper().create_owner(weights, 4, hopper().candidates(4)[0])
    assert owner.layer._transformed is weights
    owner.destroy()


def test_every_config_takes_the_options_that_this_tree_gives_it():
    """Fails when FlashInfer renames a field."""
    options = MegaMoEOptions(in_kernel_fc2_reduce=True)
    for kernel_class in (HopperFp8MegaMoE, Mxfp8MegaMoE, Nvfp4MegaMoE):
        config = kernel_class(GEOMETRY, CPU, options)._config(None)
        assert config.intermediate_size == 128 and config.top_k == 2 and config.enable_in_kernel_fc2_reduce
        assert config.kernel_name == kernel_class.name
    config = Nvfp4MegaMoE(GEOMETRY, CPU, MegaMoEOptions(combine_dtype="mxfp8"))._config({"a": 1})
    assert config.combine_dtype == "mxfp8" and config.knobs == {"a": 1}


def test_layer_scales_are_staged_on_every_forward():
    """The layer is a stand-in for the GPU's: it records what it is given."""

    class Layer:
        supports_output_view = True

        def __init__(self):
            self.calls = []

        def forward(self, tensors, *, workspace, return_workspace_view):
            self.calls.append((tensors, return_workspace_view))
            return tensors.hidden_states

    from flashinfer.moe_ep import MoEEpTensors

    scales = {"fc1_alpha": torch.ones(8), "fc2_alpha": torch.ones(8), "fc1_norm_const": torch.ones(8)}
    layer = Layer()
    owner = FlashInferOwner(layer, MoEEpTensors, scales)
    inputs = routed_inputs(2, GEOMETRY, torch.bfloat16, CPU)
    owner.forward(inputs)
    owner.forward(MegaInputs(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, torch.empty(2, 256)))
    for tensors, _ in layer.calls:
        assert tensors.fc1_alpha is scales["fc1_alpha"] and tensors.fc1_norm_const is scales["fc1_norm_const"]
    assert [view for _, view in layer.calls] == [True, False], (
        "a view where there is one and no output was given"
    )


def test_the_kernel_follows_from_gpu_and_quantisation():
    assert kernel_class_for((9, 0), None) is HopperFp8MegaMoE
    assert kernel_class_for((9, 0), "fp8") is HopperFp8MegaMoE
    assert kernel_class_for((10, 0), None) is Mxfp8MegaMoE
    assert kernel_class_for((10, 3), "nvfp4") is Nvfp4MegaMoE
    for capability, quantization in (((9, 0), "nvfp4"), ((8, 0), None), ((12, 0), None)):
        with pytest.raises(ValueError, match="flashinfer_megamoe has no kernel for compute capability"):
            kernel_class_for(capability, quantization)


def test_options_are_checked_with_the_variables_name():
    with pytest.raises(ValueError, match="COMBINE_DTYPE='fp4' is not valid"):
        MegaMoEOptions(combine_dtype="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE=0"):
        MegaMoEOptions(in_kernel_fc2_reduce=True, combine_dtype="mxfp8")


def test_stored_blackwell_knobs_are_checked_for_form_and_for_what_the_user_forbade():
    kernel = Nvfp4MegaMoE(GEOMETRY, CPU, MegaMoEOptions())
    assert kernel.check_knobs({"tile": [128, 64], "on": True}) == {"tile": (128, 64), "on": True}
    for bad in ({}, None, {"a": {}}, {"a": [[1]]}):
        with pytest.raises(ValueError):
            kernel.check_knobs(bad)
    with pytest.raises(ValueError, match="IN_KERNEL_FC2_REDUCE is not set"):
        kernel.check_knobs({"in_kernel_fc2_reduce": True})


def test_summing_in_the_kernel_is_refused_where_ranks_can_be_idle():
    options = MegaMoEOptions(in_kernel_fc2_reduce=True)
    HopperFp8MegaMoE(GEOMETRY, CPU, options).check()
    with pytest.raises(ValueError, match="IN_KERNEL_FC2_REDUCE=1 is for one rank"):
        HopperFp8MegaMoE(Geometry(256, 128, 8, 2, 2, 0), CPU, options).check()


def test_a_flashinfer_without_the_kernel_is_refused_with_the_remedy(monkeypatch):
    import flashinfer.moe_ep

    monkeypatch.delattr(flashinfer.moe_ep, "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig")
    with pytest.raises(ValueError, match="has no usable sm90_fp8.*install flashinfer-python 0.7.2 or later"):
        hopper().check()


def test_references_are_counted_where_flashinfer_keeps_them():
    """Fails when FlashInfer moves its pool or the handle's link to it."""
    from flashinfer.moe_ep import FleetParams, MoEEpMegaWorkspace
    from flashinfer.moe_ep.core.kernel.workspace_pool import acquire_workspace, release_workspace

    # A layer on a GPU would stand here; 0.7.4 asks its kernel for the workspace's knobs.
    buffers, layer = object(), MagicMock()
    handle = MoEEpMegaWorkspace(layer, FleetParams(8, 4, 64), buffers)
    assert flashinfer_moe_ep.pool_references(handle) == 0
    for expected in (1, 2):
        acquire_workspace(("a key",), lambda: buffers)
        assert flashinfer_moe_ep.pool_references(handle) == expected
    assert [release_workspace(buffers), release_workspace(buffers)] == [False, True]
    assert flashinfer_moe_ep.pool_references(handle) == 0
