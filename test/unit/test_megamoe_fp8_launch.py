"""Direct launches of the Hopper FP8 kernel without a GPU: when they serve, and what their staging kernel writes.

The launch itself and FlashInfer's layer are stand-ins here, since both need a GPU; the staging kernel is computed by
Triton's interpreter and compiled for Hopper, in child processes that run this file as a script.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.autotune import flashinfer_moe_ep
from sglang.srt.autotune.flashinfer_moe_ep import HopperBuffers
from sglang.srt.autotune.megamoe.kernels.base import CapacityExceeded, Geometry, MegaInputs
from sglang.srt.autotune.megamoe.kernels.flashinfer import (
    FlashInferOwner,
    HopperFp8MegaMoE,
    HopperFp8Owner,
)
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
HIDDEN, TOP_K, CAPACITY = 256, 2, 4
CHILD_WITHIN_S = 300
STAGING = "sglang.srt.autotune.megamoe.kernels.fp8_staging"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (it has wheels for Linux only)",
)


def inputs(num_tokens: int = 3, output: torch.Tensor | None = None) -> MegaInputs:
    hidden = torch.arange(num_tokens * HIDDEN, dtype=torch.float32).view(num_tokens, HIDDEN) / 100
    ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
    return MegaInputs(hidden, ids, torch.full((num_tokens, TOP_K), 0.5), output)


def buffers(capacity: int = CAPACITY, hidden: int = HIDDEN, top_k: int = TOP_K) -> HopperBuffers:
    columns = -(-(hidden // 128) // 4) * 4
    return HopperBuffers(
        torch.zeros(capacity, hidden).to(FP8),
        torch.full((capacity, columns), 7.0),
        torch.full((capacity, top_k), 5),
        torch.zeros(capacity, top_k),
        torch.zeros(capacity, hidden),
    )


class Device:
    """A GPU that doubles its input, seen by FlashInfer's way (`forward`) and by ours (`stage`, then a launch)."""

    supports_output_view = False

    def __init__(self) -> None:
        self.buffers, self.staged = buffers(), torch.empty(0)
        self.public_launches = self.direct_launches = self.built = self.stream = 0
        self.factor, self.fails_at = 2.0, ""

    # FlashInfer's layer
    def create_workspace(self, max_tokens_per_rank: int) -> Workspace:
        return Workspace(max_tokens_per_rank)

    def warmup(self, tensors: Any, *, workspace: Any) -> None:
        pass

    def destroy(self) -> None:
        pass

    def forward(self, tensors: Any, *, workspace: Any, return_workspace_view: bool) -> torch.Tensor:
        self.public_launches += 1
        result = tensors.hidden_states * 2
        return result if tensors.output is None else tensors.output.copy_(result)

    # what the direct way leans on
    def find_buffers(self, workspace: Any) -> HopperBuffers:
        if self.fails_at == "buffers":
            raise AttributeError("no x here")
        return self.buffers

    def stage(self, hidden: torch.Tensor, *rest: torch.Tensor) -> None:
        if self.fails_at == "staging":
            raise RuntimeError("Triton has no compiler\nand more")
        self.staged = hidden

    def build(self, weights: Any, workspace: Any) -> Any:
        self.built += 1

        def launch() -> None:
            self.direct_launches += 1
            self.buffers.output[: self.staged.shape[0]] = self.staged * self.factor

        return launch


@dataclasses.dataclass
class Workspace:
    max_tokens_per_rank: int = CAPACITY
    is_destroyed: bool = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    result = Device()
    monkeypatch.setattr(flashinfer_moe_ep, "hopper_buffers", result.find_buffers)
    monkeypatch.setattr(flashinfer_moe_ep, "hopper_launch", result.build)
    staging = types.ModuleType(STAGING)
    staging.stage = result.stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, STAGING, staging)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=result.stream)
    )
    return result


def owner(device: Device) -> HopperFp8Owner:
    from flashinfer.moe_ep import MoEEpTensors

    return HopperFp8Owner(device, MoEEpTensors, ("first", "second"))


def test_a_warmed_layer_launches_directly_and_gives_a_view_of_the_workspace(device):
    layer, workspace = owner(device), Workspace()
    assert layer.warmup(inputs(), workspace=workspace) is None and layer.launches_directly(workspace)
    before = device.public_launches
    result = layer.forward(inputs(2), workspace=workspace)
    assert device.public_launches == before
    assert result.shape == (2, HIDDEN) and result.data_ptr() == device.buffers.output.data_ptr()
    torch.testing.assert_close(result, inputs(2).hidden_states * 2)


def test_the_arguments_of_a_launch_are_built_once_for_each_stream(device):
    """A launch belongs to the stream that it was built on: a capture on another one would miss it."""
    layer, workspace = owner(device), Workspace()
    layer.warmup(inputs(), workspace=workspace)
    for stream in (0, 0, 9, 9, 0):
        device.stream = stream
        layer.forward(inputs(), workspace=workspace)
    assert device.built == 2


@pytest.mark.parametrize("fault", ["buffers", "staging", "result"])
def test_flashinfers_way_serves_where_the_direct_one_fails_and_says_why(device, fault):
    """Whatever a rank finds it launches twice: the others wait for it in each launch."""
    reasons = {"buffers": "no x here", "staging": "Triton has no compiler", "result": "gave another result"}
    device.fails_at, device.factor = fault, 2.5 if fault == "result" else 2.0
    layer, workspace = owner(device), Workspace()
    remark = layer.warmup(inputs(), workspace=workspace)
    assert device.public_launches + device.direct_launches == 2
    assert "launches go through FlashInfer's forward" in remark and reasons[fault] in remark
    assert not layer.launches_directly(workspace)
    before = device.public_launches
    torch.testing.assert_close(
        layer.forward(inputs(), workspace=workspace), inputs().hidden_states * 2, rtol=0, atol=0
    )
    assert device.public_launches == before + 1


def test_a_given_output_another_workspace_and_a_destroyed_one_go_flashinfers_way(device):
    layer, workspace = owner(device), Workspace()
    layer.warmup(inputs(), workspace=workspace)
    before, output = device.direct_launches, torch.empty(3, HIDDEN)
    assert layer.forward(inputs(output=output), workspace=workspace) is not None
    torch.testing.assert_close(output, inputs().hidden_states * 2)
    layer.forward(inputs(), workspace=Workspace())
    layer.forward(inputs())
    workspace.is_destroyed = True
    layer.forward(inputs(), workspace=workspace)
    assert device.direct_launches == before


def test_a_destroyed_layer_keeps_no_buffers(device):
    layer, workspace = owner(device), Workspace()
    layer.warmup(inputs(), workspace=workspace)
    layer.destroy()
    before = device.direct_launches
    layer.forward(inputs(), workspace=workspace)
    assert device.direct_launches == before


def test_buffers_of_a_destroyed_workspace_are_let_go_when_another_is_opened(device):
    layer, workspace = owner(device), Workspace()
    layer.warmup(inputs(), workspace=workspace)
    workspace.is_destroyed = True
    layer.create_workspace(8)
    assert not layer.launches_directly(workspace)


def test_more_tokens_than_the_workspace_holds_are_refused(device):
    layer, workspace = owner(device), Workspace()
    layer.warmup(inputs(), workspace=workspace)
    with pytest.raises(CapacityExceeded, match="5 tokens, and the workspace holds 4"):
        layer.forward(inputs(5), workspace=workspace)


def test_sums_in_no_fixed_order_are_left_to_flashinfer():
    """Two ways could not be compared bit by bit."""
    for reduces, expected in ((False, HopperFp8Owner), (True, FlashInferOwner)):
        kernel = HopperFp8MegaMoE(Geometry(256, 128, 8, 2), CPU, MegaMoEOptions(in_kernel_fc2_reduce=reduces))
        assert type(kernel._owner(Device(), tuple, ("first", "second"))) is expected


def test_flashinfer_keeps_what_the_direct_way_leans_on():
    """Fails when FlashInfer renames a buffer or changes how a launch is made."""
    from flashinfer.moe_ep.kernel_src.sm90 import pull_style_cutedsl_megakernel as hopper

    fields = {field.name for field in dataclasses.fields(hopper.MegaMoEHopperFp8SymmBuffer)}
    assert {"x", "x_sf", "topk_idx", "topk_weights", "output_activation"} <= fields
    parameters = list(inspect.signature(hopper.hopper_fp8_mega_launch_thunk).parameters)
    assert parameters[:3] == ["transformed_l1", "transformed_l2", "symm_buffer"]
    backend = types.SimpleNamespace(x=1, x_sf=2, topk_idx=3, topk_weights=4, output_activation=5)
    found = flashinfer_moe_ep.hopper_buffers(types.SimpleNamespace(_backend_workspace=backend))
    assert found == HopperBuffers(1, 2, 3, 4, 5)  # type: ignore[arg-type]


# the staging kernel ---------------------------------------------------------------------------------------

#: Hidden size, top-k, capacity, tokens: blocks that are no power of two, an idle rank, a full workspace.
CASES = [(256, 2, 4, 3), (2048, 8, 8, 8), (3584, 6, 16, 0), (1152, 4, 4, 2), (512, 1, 2, 1)]


def stage_as_flashinfer(given: MegaInputs, into: HopperBuffers) -> None:
    """The torch operations of `flashinfer.moe_ep`, with the scale as CUDA computes it: times the inverse of 448."""
    num_tokens, hidden = given.hidden_states.shape
    blocks = given.hidden_states.float().reshape(num_tokens, hidden // 128, 128)
    scales = (blocks.abs().amax(-1) * torch.tensor(1 / 448)).clamp(min=1e-30)
    into.payload[:num_tokens] = (blocks / scales.unsqueeze(-1)).reshape(num_tokens, hidden).to(FP8)
    into.scales[:num_tokens] = 0
    into.scales[:num_tokens, : hidden // 128] = scales
    into.ids[:num_tokens], into.shares[:num_tokens] = given.topk_ids.long(), given.topk_weights
    into.ids[num_tokens:] = -1


def interpret() -> list[dict[str, Any]]:
    from sglang.srt.autotune.megamoe.kernels.fp8_staging import stage

    rows = []
    for hidden, top_k, capacity, num_tokens in CASES:
        generator = torch.Generator().manual_seed(hidden + num_tokens)
        # Rows of wider tensors, as views give them; one row of zeros, whose scale is the smallest.
        states = torch.randn(num_tokens, hidden + 8, generator=generator).bfloat16()[:, :hidden] * 3
        states[1:2] = 0
        ids = torch.randint(0, 64, (num_tokens, top_k + 1), generator=generator, dtype=torch.int32)
        shares = torch.rand(num_tokens, top_k + 1, generator=generator)
        given = MegaInputs(states, ids[:, :top_k], shares[:, :top_k])
        expected, found = (buffers(capacity, hidden, top_k) for _ in range(2))
        stage_as_flashinfer(given, expected)
        stage(
            given.hidden_states,
            given.topk_ids,
            given.topk_weights,
            found.payload,
            found.scales,
            found.ids,
            found.shares,
        )
        theirs, ours = expected.payload.float(), found.payload.float()
        rows.append(
            {
                "scales": torch.equal(expected.scales, found.scales),
                "ids": torch.equal(expected.ids, found.ids),
                "shares": torch.equal(expected.shares, found.shares),
                "differing": float((theirs != ours).float().mean()),
                "off": float((theirs - ours).norm() / theirs.norm().clamp_min(1e-20)),
            }
        )
    return rows


def compile_for_hopper() -> dict[str, bool]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang.srt.autotune.megamoe.kernels import fp8_staging

    kernel = fp8_staging._stage_row
    pointers = {"hidden": "*bf16", "ids": "*i32", "shares": "*fp32", "payload_out": "*fp8e4nv"}
    pointers |= {"scales_out": "*fp32", "ids_out": "*i64", "shares_out": "*fp32"}
    numbers = dict.fromkeys(("num_tokens", "hidden_stride", "ids_stride", "shares_stride"), "i32")
    constants = {"num_blocks": 16, "scale_columns": 16, "top_k": 8, "block": 128, "blocks_padded": 16}
    constants |= {"slots_padded": 8, "smallest_scale": 1e-30, "inverse_of_fp8_max": 1 / 448}
    types_of = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        signature={name: types_of[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return {
        "rounds to the nearest": "cvt.rn.satfinite.e4m3x2.f32" in code,
        "divides exactly": "div.rn.f32" in code and "div.full" not in code and "div.approx" not in code,
    }


def child(mode: str, folder: Path, **environment: str) -> Any:
    test = Path(__file__).parents[1]
    path = os.pathsep.join([str(test.parent / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    finished = subprocess.run(
        [sys.executable, __file__, mode],
        capture_output=True,
        text=True,
        timeout=CHILD_WITHIN_S,
        env={**os.environ, **environment},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout)


@needs_triton
@pytest.mark.timeout(CHILD_WITHIN_S + 20)
def test_staging_writes_what_flashinfer_writes(tmp_path):
    """The interpreter cuts floats to FP8 where a GPU rounds: the payload may differ here, and nothing else."""
    for case, row in zip(CASES, child("interpret", tmp_path, TRITON_INTERPRET="1"), strict=True):
        assert row["scales"] and row["ids"] and row["shares"], case
        assert row["differing"] < 0.05 and row["off"] < 0.1, (case, row)


@needs_triton
@pytest.mark.timeout(CHILD_WITHIN_S + 20)
def test_staging_rounds_and_divides_as_torch_does_on_hopper(tmp_path):
    found = child("compile", tmp_path)
    assert all(found.values()), found


if __name__ == "__main__":
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else compile_for_hopper()))
