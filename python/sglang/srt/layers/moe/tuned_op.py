"""One tunable op as FlashInfer's AutoTuner knows it: a name, its runners, its bucket grid.

During a start the stage lends the op a profiler for the length of one step; it measures what is missing and files the
winner with the AutoTuner before the lookup. Serving asks the AutoTuner once for each bucket, by ``freeze``, and then
bisects its answers: the AutoTuner's own lookup takes a lock and some 40 us of the host's time in every layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, make_hybrid_bucket_mapper


class OpProfiler(Protocol):
    """Measures the candidates of an op whose records do not cover these inputs."""

    skip_ops: frozenset[str]

    def ensure_tuned(
        self,
        op_name: str,
        runners: Sequence[TunableRunner],
        config: TuningConfig,
        inputs: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> None: ...


class TunedOp:
    """Several implementations of one op over the same inputs, chosen per token bucket.

    The first ``num_token_inputs`` inputs have the tokens in dimension 0; the grid is FlashInfer's own up to
    ``max_num_tokens``. ``runners[0]`` with tactic -1 is the default. All runners give the same cache key extras.
    """

    def __init__(
        self, name: str, runners: Sequence[TunableRunner], max_num_tokens: int, num_token_inputs: int
    ) -> None:
        self.name = name
        self.runners = list(runners)
        self.config = TuningConfig(
            dynamic_tensor_specs=(
                DynamicTensorSpec(
                    tuple(range(num_token_inputs)),
                    (0,) * num_token_inputs,
                    get_hybrid_num_tokens_buckets(max_num_tokens),
                    make_hybrid_bucket_mapper(max_num_tokens),
                ),
            )
        )
        #: Set by the stage for the length of a step.
        self.profiler: OpProfiler | None = None
        self._grid: tuple[int, ...] = ()
        self._frozen: tuple[tuple[TunableRunner, Any], ...] = ()

    def freeze(self, inputs_at: Callable[[int], list[torch.Tensor]]) -> None:
        """Take the choices in force for good: tuning, loading records or skipping the op changes nothing any more.

        Args:
            inputs_at: inputs of this many tokens; only their shapes and dtypes are looked at.
        """
        self._grid = tuple(sorted(self.config.dynamic_tensor_specs[0].gen_tuning_buckets))
        self._frozen = tuple(self.choose(inputs_at(bucket)) for bucket in self._grid)

    def choose(self, inputs: list[torch.Tensor], **kwargs: Any) -> tuple[TunableRunner, Any]:
        if self.profiler is not None and self.name not in self.profiler.skip_ops:
            self.profiler.ensure_tuned(self.name, self.runners, self.config, inputs, kwargs)
            # In tuning mode `choose_one` would answer a miss with inputs of its own making, expert ids and all.
            shapes = tuple(tuple(t.shape) for t in inputs)
            _, index, tactic, _ = AutoTuner.get().search_cache(
                self.name, self.runners, shapes, self.config, inputs=inputs
            )
            return self.runners[index], tactic
        return AutoTuner.get().choose_one(self.name, self.runners, self.config, inputs, **kwargs)

    def compile_jobs(self, inputs: list[torch.Tensor]) -> list[Callable[[], None]]:
        """What the choice in force for these inputs would compile when it is launched, as jobs for any thread."""
        runner, tactic = self.choose(inputs)
        compile_jobs = getattr(runner, "compile_jobs", None)
        return [] if compile_jobs is None else list(compile_jobs(inputs, [tactic]))

    def __call__(self, inputs: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        if self._frozen:
            place = bisect_left(self._grid, inputs[0].shape[0])
            runner, tactic = self._frozen[min(place, len(self._frozen) - 1)]
        else:
            runner, tactic = self.choose(inputs, **kwargs)
        return runner(inputs, tactic=tactic, **kwargs)
