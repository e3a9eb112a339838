"""The `reference_megamoe` kernel: MegaMoE without a GPU, so that every contract runs with real collectives.

Its knobs differ in speed and never in a bit, so what is chosen can be measured and what is computed can be compared.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.autotune.megamoe import knob_file
from sglang.srt.autotune.megamoe.kernels import reference_layer
from sglang.srt.autotune.megamoe.kernels.base import BenchSpec, Geometry, Knobs, MegaInputs, MegaMoEKernel
from sglang.srt.autotune.megamoe.kernels.reference_layer import KNOB_VALUES, ReferenceMegaLayer, all_knobs
from sglang.srt.autotune.records.environment import cpu_model_name

ALIGNMENT = 8


class ReferenceMegaMoE(MegaMoEKernel):
    """See the module. `group` is the gloo group over the EP ranks, None with one rank."""

    name = "reference_megamoe"
    policy = "sweep"
    uses_workers = False
    tolerance = 1e-4

    def __init__(self, geometry: Geometry, group: Any = None) -> None:
        super().__init__(geometry, torch.device("cpu"))
        assert geometry.world_size == 1 or group is not None, (
            "several ranks need a group to exchange tokens over"
        )
        self.group = group
        self._device_name = f"cpu {cpu_model_name()}"

    def prepare_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        geometry = self.geometry
        for what, size in (("hidden", geometry.hidden_size), ("intermediate", geometry.intermediate_size)):
            if size % ALIGNMENT:
                raise ValueError(
                    f"{self.name}: the {what} size must be a multiple of {ALIGNMENT} (the model has {size})"
                )
        expected = (geometry.num_local_experts, 2 * geometry.intermediate_size, geometry.hidden_size)
        assert tuple(w13.shape) == expected, f"w13 is {tuple(w13.shape)}, expected {expected}"
        return w13, w2

    def layer_tensors(self, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[0], weights[1]

    def create_owner(
        self, weights: Any, max_tokens_per_rank: int, knobs: Knobs | str | None = None
    ) -> ReferenceMegaLayer:
        return ReferenceMegaLayer(
            self.geometry, self.group, weights, max_tokens_per_rank, knobs, self.entry_fields()
        )

    def default_knobs(self, capacity: int) -> Knobs:
        return dict(reference_layer.DEFAULT_KNOBS)

    def candidates(self, capacity: int) -> list[Knobs]:
        return all_knobs()

    def screened(self, capacity: int) -> list[Knobs]:
        usual = reference_layer.DEFAULT_KNOBS["tile_rows"]
        return [knobs for knobs in all_knobs() if knobs["tile_rows"] == usual]

    def variants(self, knobs: Knobs) -> list[Knobs]:
        return [
            {**knobs, "tile_rows": rows} for rows in KNOB_VALUES["tile_rows"] if rows != knobs["tile_rows"]
        ]

    def check_knobs(self, knobs: Any) -> Knobs:
        if not isinstance(knobs, dict) or set(knobs) != set(KNOB_VALUES):
            raise ValueError(f"the knobs are not exactly {', '.join(KNOB_VALUES)}")
        for name, value in knobs.items():
            if value not in KNOB_VALUES[name]:
                raise ValueError(f"knob {name} cannot be {value!r}")
        return dict(knobs)

    def entry_fields(self) -> dict[str, Any]:
        return {"device": self._device_name, "dtype": self.name, **self.geometry.entry_fields()}

    def record(self, knobs: Knobs, capacity: int, time_us: float | None, source: str) -> None:
        path = knob_file.knob_file_path()
        if path is not None:
            knob_file.record(path, self.entry_fields(), capacity, knobs, time_us, source)

    def recorded(self, capacity: int) -> Knobs | None:
        return knob_file.lookup(knob_file.knob_file_path(), self.entry_fields(), capacity)

    def is_capturing(self) -> bool:
        return reference_layer.is_capturing()

    def float_reference(self, weights: Any, inputs: MegaInputs, first_expert: int = 0) -> torch.Tensor:
        """Token by token in float64."""
        w13, w2 = (tensor.double() for tensor in weights)
        out = torch.zeros(inputs.num_tokens, self.geometry.hidden_size, dtype=torch.float64)
        for token in range(inputs.num_tokens):
            x = inputs.hidden_states[token].double()
            for k in range(self.geometry.top_k):
                expert = int(inputs.topk_ids[token, k]) - first_expert
                if 0 <= expert < w13.shape[0]:
                    up, gate = (w13[expert] @ x).chunk(2)
                    hidden = torch.nn.functional.silu(gate) * up
                    out[token] += float(inputs.topk_weights[token, k]) * (w2[expert] @ hidden)
        return out.float()

    def bench(self) -> BenchSpec | None:
        return BenchSpec(
            "sglang.srt.autotune.megamoe.kernels.reference:create_bench", self.geometry.on_one_rank()
        )

    def worker_bytes(self) -> int:
        geometry = self.geometry
        weights = 3 * geometry.num_local_experts * geometry.intermediate_size * geometry.hidden_size * 4
        return weights + (512 << 20)


def create_bench(**sizes: int) -> Any:
    """The bench of a worker process: one rank with all its experts, random weights."""
    from sglang.srt.autotune.megamoe.bench import KernelBench

    geometry = Geometry(**sizes)
    generator = torch.Generator().manual_seed(0)
    shape = (geometry.num_experts, 2 * geometry.intermediate_size, geometry.hidden_size)
    w13 = torch.randn(shape, generator=generator) * geometry.hidden_size**-0.5
    w2 = torch.randn((shape[0], shape[2], shape[1] // 2), generator=generator)
    kernel = ReferenceMegaMoE(geometry)
    return KernelBench(
        kernel, kernel.prepare_weights(w13, w2 * geometry.intermediate_size**-0.5), torch.float32
    )
