"""The Triton MoE kernels without a GPU: computed by Triton's interpreter, and compiled for Hopper.

Both need Triton set up before its import, so each is one child process, this file run as a script; the tests look
at what it printed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.moe import triton_grouped
from sglang.srt.layers.moe.activation import MoEActivation
from sglang.srt.layers.moe.base import ExpertWeights, MoEShape
from sglang.srt.layers.moe.triton_grouped import tactics
from support.moe_reference import float32_moe, moe_inputs, moe_weights, relative_error

CPU = torch.device("cpu")
#: The interpreter cuts floats to BF16 where a GPU rounds, so its errors are about twice those of the kernels.
TOLERANCE = 1.2e-2
#: A bound for what hangs, not a measure: a busy machine takes several times what an idle one does.
CHILD_WITHIN_S = 400
MAX_SHARED_BYTES = 227 * 1024

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (it has wheels for Linux only)",
)

#: Sizes that no block divides, and a count of choices that is no power of two.
PLAIN = MoEShape(
    hidden_size=80,
    intermediate_size=48,
    num_experts=6,
    num_local_experts=6,
    top_k=3,
    dtype=torch.bfloat16,
    max_num_tokens=128,
)
GPT_OSS = dataclasses.replace(PLAIN, activation=MoEActivation(1.702, 1.0, 0.7), has_bias=True)
FIRST_RANK = dataclasses.replace(PLAIN, num_local_experts=3, ep_size=2)
LAST_RANK = dataclasses.replace(FIRST_RANK, ep_rank=1)

#: Small blocks, so that sizes of a test make several of them: one configuration of each kind.
FIRST = {
    "gemv": ("gemv", 32, 64, 4, 1),
    "dot": ("dot", 32, 64, 4, 3),
    "swap": ("swap", 64, 32, 4, 3),
    "dot_tma": ("dot_tma", 32, 32, 4, 3),
    "swap_tma": ("swap_tma", 64, 64, 4, 3),
}
SECOND = {
    "gemv": ("gemv", 64, 32, 4, 1),
    "dot": ("dot", 64, 32, 4, 3),
    "swap": ("swap", 64, 32, 4, 3),
    "dot_tma": ("dot_tma", 64, 32, 4, 3),
    "swap_tma": ("swap_tma", 64, 64, 4, 3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    tactic: Any
    num_tokens: int
    shape: MoEShape = PLAIN
    routing: str = "random"

    @property
    def name(self) -> str:
        method, first, second = (
            ("default", "-", "-")
            if self.tactic == -1
            else (part if type(part) is str else part[0] for part in self.tactic)
        )
        shape = self.shape
        words = f"h{shape.hidden_size}i{shape.intermediate_size}e{shape.num_local_experts}k{shape.top_k}"
        words += f"ep{shape.ep_rank}" * (shape.ep_size > 1) + f"tp{shape.tp_rank}" * (shape.tp_size > 1)
        return (
            f"{method}-{first}-{second}-t{self.num_tokens}-{words}{'-bias' * shape.has_bias}-{self.routing}"
        )


def cases() -> Iterator[Case]:
    few = ("few", FIRST["gemv"], SECOND["gemv"])

    def grouped(rows: int, first: str, second: str) -> Any:
        return (f"grouped{rows}", FIRST[first], SECOND[second])

    # Divided by the blocks: no masks.
    whole = dataclasses.replace(PLAIN, hidden_size=64, intermediate_size=64)
    narrow = dataclasses.replace(PLAIN, hidden_size=32)
    for num_tokens in (1, 4):
        yield Case(few, num_tokens)
    for shape in (whole, GPT_OSS, FIRST_RANK, LAST_RANK):
        yield Case(few, 3, shape)
    yield Case(few, 2, dataclasses.replace(GPT_OSS, tp_size=2, tp_rank=1))
    yield Case(few, 2, FIRST_RANK, "all elsewhere")
    for routing in ("an expert twice in a token", "ids of no expert"):
        yield Case(few, 4, routing=routing)
        yield Case(grouped(16, "dot", "swap"), 4, routing=routing)
    for top_k, num_experts in ((1, 4), (2, 8), (4, 5), (8, 16)):
        shape = dataclasses.replace(
            PLAIN, top_k=top_k, num_experts=num_experts, num_local_experts=num_experts
        )
        yield Case(few, 2, shape)
        yield Case(grouped(16, "swap", "dot"), 9, shape)
    for kind in ("dot", "swap", "dot_tma", "swap_tma"):
        yield Case(grouped(16, kind, kind), 9)
        yield Case(grouped(32, kind, kind), 5, whole)
    for first, second in (("dot", "swap"), ("swap", "dot")):
        for shape in (GPT_OSS, FIRST_RANK, LAST_RANK):
            yield Case(grouped(16, first, second), 9, shape)
    yield Case(grouped(16, "dot", "dot"), 2, dataclasses.replace(GPT_OSS, tp_size=2, tp_rank=1))
    yield Case(grouped(16, "dot", "dot"), 4, FIRST_RANK, "all elsewhere")
    for rows in (16, 32, 64, 128):
        yield Case(grouped(rows, "swap_tma", "dot_tma"), 1)
        yield Case(grouped(rows, "swap", "dot"), rows + 1, narrow, "one expert")
    # More slots than one look of the alignment holds.
    tiny = dataclasses.replace(PLAIN, hidden_size=16, intermediate_size=16, top_k=4)
    yield Case(grouped(128, "dot", "dot"), 300, tiny)
    for num_tokens in (1, 17):
        yield Case(-1, num_tokens)


CASES = {case.name: case for case in cases()}


def routed(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, ids, weights = moe_inputs(case.shape, case.num_tokens, CPU)
    if case.routing == "one expert":
        ids[:, 0] = 2  # the other choices of a token stay others
        ids[:, 1:] = torch.tensor([0, 5])[: case.shape.top_k - 1]
    elif case.routing == "an expert twice in a token":
        ids[:, 1] = ids[:, 0]
    elif case.routing == "all elsewhere":
        ids = 3 + ids % 3
    elif case.routing == "ids of no expert":
        ids[::2, 0], ids[1::2, 1] = -7, 1 << 20
    return hidden, ids, weights


# What the child processes run.


def interpret(part: int) -> dict[str, Any]:
    """`{case: {"error": relative norm, ...}}` of every other case, with whatever memory holds at first being NaN."""
    torch.set_deterministic_debug_mode("error")  # it fills what torch.empty gives
    assert torch.empty(3).isnan().all()
    results: dict[str, Any] = {}
    for case in list(CASES.values())[part::2]:
        inputs, weights = routed(case), moe_weights(case.shape, CPU)
        moe = triton_grouped.TritonGroupedMoE(case.shape, CPU)
        out = computed(moe, case, inputs, weights)
        expected = float32_moe(case.shape, *inputs, *weights)
        zero = not expected.any()
        results[case.name] = {
            "dtype": str(out.dtype),
            "error": float(out.abs().max()) if zero else relative_error(out, expected),
        }
    return results


def computed(moe: Any, case: Case, inputs: Any, weights: ExpertWeights) -> torch.Tensor:
    from sglang.srt.layers.moe.triton_grouped.launches import Inputs

    tensors = op_inputs(case.shape, inputs, weights)
    if case.tactic == -1:
        return moe.forward(tensors)
    # The blocks of these tests are smaller than any that is offered, so they are planned past the list.
    launches, out = moe._planner.plan(Inputs(*tensors), case.tactic)
    for launch in launches:
        launch.run()
    return out


def op_inputs(shape: MoEShape, inputs: Any, weights: ExpertWeights) -> list[torch.Tensor]:
    hidden, ids, topk_weights = inputs
    tensors = [hidden, shape.local_expert_ids(ids), topk_weights, weights.w13, weights.w2]
    return tensors if weights.b13 is None or weights.b2 is None else [*tensors, weights.b13, weights.b2]


#: Compiled for Hopper: each kind, with the sizes of Qwen3-30B-A3B and those of gpt-oss-20b, which 128 does not divide.
QWEN = dataclasses.replace(
    PLAIN, hidden_size=2048, intermediate_size=768, num_experts=8, num_local_experts=8, top_k=8
)
UNEVEN = dataclasses.replace(
    QWEN,
    hidden_size=2880,
    intermediate_size=2880,
    top_k=4,
    has_bias=True,
    activation=MoEActivation(1.702, 1.0, 7.0),
)
COMPILED = [
    (QWEN, 1, tactics.KNOWN["few"].tactic(0, 0)),
    (QWEN, 64, ("grouped16", ("swap", 64, 128, 4, 3), ("dot", 64, 128, 4, 3))),
    (QWEN, 1024, tactics.KNOWN["grouped128"].tactic(0, 0)),
    (UNEVEN, 1, tactics.KNOWN["few"].tactic(0, 0)),
    (UNEVEN, 32, tactics.KNOWN["grouped16"].tactic(0, 0)),
]


def compile_for_hopper() -> dict[str, Any]:
    """`{"kernels": [what each takes], "again": how many more other token counts need}` of `COMPILED`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Hopper())

    def kernels(shape: MoEShape, num_tokens: int, tactic: Any) -> dict[str, Any]:
        w13 = torch.empty(8, 2 * shape.intermediate_size, shape.hidden_size, dtype=torch.bfloat16)
        w2 = torch.empty(8, shape.hidden_size, shape.intermediate_size, dtype=torch.bfloat16)
        biases = (w13[:, :, 0].contiguous(), w2[:, :, 0].contiguous()) if shape.has_bias else (None, None)
        moe = triton_grouped.TritonGroupedMoE(shape, CPU)
        tensors = op_inputs(shape, moe_inputs(shape, num_tokens, CPU), ExpertWeights(w13, w2, *biases))
        jobs = [job._launch for job in moe.compile_jobs(tensors, [tactic])]  # type: ignore[attr-defined]
        return {
            f"{shape.hidden_size} {launch.key}": launch.kernel.warmup(
                *launch.args, grid=launch.grid, **launch.meta
            )
            for launch in jobs
        }

    found: dict[str, Any] = {}
    for shape, num_tokens, tactic in COMPILED:
        found |= kernels(shape, num_tokens, tactic)
    again: dict[str, Any] = {}
    for shape, num_tokens, tactic in COMPILED:
        again |= kernels(shape, num_tokens + 3, tactic)
    return {
        "kernels": [
            {
                "name": kernel.metadata.name,
                "shared": kernel.metadata.shared,
                "wgmma": "wgmma" in kernel.asm["ptx"],
                "tma": "cp.async.bulk.tensor" in kernel.asm["ptx"],
                "wide loads": "ld.global.v4" in kernel.asm["ptx"] or "cp.async.cg" in kernel.asm["ptx"],
                "overlaps": "griddepcontrol" in kernel.asm["ptx"],
            }
            for kernel in found.values()
        ],
        "again": len({id(kernel) for kernel in again.values()} - {id(kernel) for kernel in found.values()}),
    }


def children(modes: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    """What this file prints in each of `modes`, all of them at once."""
    test = Path(__file__).parents[1]
    path = [str(test), str(test.parent / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": str(folder), **environment}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *mode.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for mode in modes
    ]
    result: dict[str, Any] = {}
    try:
        for process in started:
            out, errors = process.communicate(timeout=CHILD_WITHIN_S)
            assert process.returncode == 0, errors[-4000:]
            result |= json.loads(out)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return result


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("triton")
    return children(["interpret 0", "interpret 1"], folder, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return children(["compile"], tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.parametrize("name", list(CASES))
def test_the_kernels_compute_the_moe(interpreted, name):
    result = interpreted[name]
    assert result["dtype"] == "torch.bfloat16"
    assert result["error"] < TOLERANCE, "NaN here is memory that nothing wrote"


@needs_triton
def test_kernels_compile_for_hopper_and_fit_it(compiled):
    assert {kernel["name"] for kernel in compiled["kernels"]} == {
        *("first_gemv", "second_gemv", "first_tiles", "second_tiles", "align_slots", "sum_parts"),
    }
    for kernel in compiled["kernels"]:
        assert kernel["shared"] <= MAX_SHARED_BYTES and kernel["overlaps"], kernel
        if "tiles" not in kernel["name"] and kernel["name"] != "align_slots":
            assert kernel["wide loads"], kernel
    tiles = [kernel for kernel in compiled["kernels"] if "tiles" in kernel["name"]]
    assert sum(kernel["tma"] for kernel in tiles) == 4 and sum(kernel["wgmma"] for kernel in tiles) == 5


@needs_triton
def test_one_compiled_kernel_serves_all_token_counts_of_its_tactic(compiled):
    assert compiled["again"] == 0


def all_tactics(num_tokens: int, top_k: int, num_experts: int) -> list[Any]:
    return [t for space in tactics.spaces(num_tokens, top_k, num_experts) for t in space.tactics()]


SIZES = [
    (tokens, top_k, experts)
    for tokens in (1, 2, 4, 5, 8, 64, 200, 512, 8192)
    for top_k, experts in ((8, 128), (2, 16), (4, 32))
]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_offered_is_known_suits_and_survives_a_file(size):
    num_tokens = size[0]
    offered = all_tactics(*size)
    assert offered and len(set(offered)) == len(offered)
    for tactic in [*offered, tactics.default_tactic(*size)]:
        stored = json.loads(json.dumps(tactic))
        assert tactics.normalised(stored) == tactic
        assert tactics.suits(tactic, num_tokens)


@pytest.mark.parametrize("size", SIZES)
def test_no_bucket_offers_more_than_a_start_can_time(size):
    for space in tactics.spaces(*size):
        assert len(space.first) + len(space.second) <= 12


@pytest.mark.parametrize("method", tactics.BLOCK_M)
def test_every_method_of_tiles_has_more_than_one_kind_for_other_gpus_and_shapes(method):
    for configs in (tactics.FIRST_GROUPED[method], tactics.SECOND_GROUPED[method]):
        assert len({config[0] for config in configs}) > 1


def test_an_experts_weights_are_read_for_each_slot_only_where_slots_rarely_share_one():
    for num_tokens, methods in ((2, {"few"}), (4, {"few", "grouped16"}), (5, {"grouped16"})):
        assert {space.method for space in tactics.spaces(num_tokens, 8, 128)} == methods
        assert tactics.default_tactic(num_tokens, 8, 128)[0] == ("few" if num_tokens <= 4 else "grouped16")


def test_a_space_is_searched_one_product_at_a_time():
    space = tactics.Space("few", (("a",), ("b",)), (("c",), ("d",), ("e",)))
    assert list(space.tactics()) == [
        ("few", ("a",), ("c",)),
        ("few", ("b",), ("c",)),
        ("few", ("a",), ("d",)),
        ("few", ("a",), ("e",)),
    ]


class Awkward:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


FIRST_CONFIG, SECOND_CONFIG = tactics.FIRST_GEMV[0], tactics.SECOND_GEMV[0]
FIRST_TILES, SECOND_TILES = tactics.FIRST_GROUPED["grouped16"][0], tactics.SECOND_GROUPED["grouped16"][0]


@pytest.mark.parametrize(
    "stored",
    [
        *(None, True, 0, -2, "few", [], {}, (), Awkward(), torch.ones(3), math.nan),
        ("few", FIRST_CONFIG),
        ("fewer", FIRST_CONFIG, SECOND_CONFIG),
        (["few"], FIRST_CONFIG, SECOND_CONFIG),
        ("few", SECOND_CONFIG, FIRST_CONFIG),
        ("few", Awkward(), SECOND_CONFIG),
        ("few", (*FIRST_CONFIG[:-1], Awkward()), SECOND_CONFIG),
        ("few", (*FIRST_CONFIG[:-1], float(FIRST_CONFIG[-1])), SECOND_CONFIG),
        ("few", (*FIRST_CONFIG[:-1], True), SECOND_CONFIG),
        ("grouped16", FIRST_CONFIG, SECOND_CONFIG),
        ("few", FIRST_TILES, SECOND_TILES),
        ("grouped16", FIRST_TILES, (*SECOND_TILES, 1)),
    ],
)
@needs_triton
def test_a_stored_object_that_is_no_tactic_is_refused_without_an_exception(stored):
    moe = triton_grouped.TritonGroupedMoE(PLAIN, CPU)
    inputs = op_inputs(PLAIN, moe_inputs(PLAIN, 2, CPU), moe_weights(PLAIN, CPU))
    assert moe.validate_tactic(inputs, stored) is False
    assert moe.validate_tactic(inputs, -1) is True


@needs_triton
def test_a_tactic_for_few_tokens_is_refused_for_many():
    moe = triton_grouped.TritonGroupedMoE(PLAIN, CPU)
    tactic = json.loads(json.dumps(("few", tactics.FIRST_GEMV[0], tactics.SECOND_GEMV[0])))
    for num_tokens, answer in ((tactics.MAX_GEMV_TOKENS, True), (tactics.MAX_GEMV_TOKENS + 1, False)):
        inputs = op_inputs(PLAIN, moe_inputs(PLAIN, num_tokens, CPU), moe_weights(PLAIN, CPU))
        assert moe.validate_tactic(inputs, tactic) is answer
    with pytest.raises(ValueError, match="no tactic"):
        moe.forward(inputs, tactic)


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, (8, 0), "needs compute capability 9.0 .* has 8.0: use"),
        ({"dtype": torch.float16}, (9, 0), "set --dtype bfloat16"),
        ({"intermediate_size": 72}, (9, 0), "expert width .* multiple of 16 .got 72.: use"),
        ({"hidden_size": 1032}, (9, 0), "hidden size .* multiple of 16"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused_with_the_remedy(monkeypatch, changes, capability, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=words) as error:
        triton_grouped.check_supported(dataclasses.replace(PLAIN, **changes), torch.device("cuda", 0))
    assert str(error.value).startswith("--moe-runner-backend triton_grouped")


def test_a_cpu_and_a_missing_triton_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="needs a GPU"):
        triton_grouped.check_supported(PLAIN, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    with pytest.raises(ValueError, match="needs Triton"):
        triton_grouped.check_supported(PLAIN, torch.device("cuda", 0))


if __name__ == "__main__":
    print(json.dumps(interpret(int(sys.argv[2])) if sys.argv[1] == "interpret" else compile_for_hopper()))
