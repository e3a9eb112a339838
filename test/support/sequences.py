"""Sequences that a test runs through a `ModelRunner` by hand, as the scheduler would."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs


def single_runner(model_path: str, **flags: object) -> ModelRunner:
    """A one-rank runner on the CPU, without autotune unless the flags say otherwise."""
    flags = {"device": "cpu", "disable_flashinfer_autotune": True, "max_total_tokens": 4096, **flags}
    args = ServerArgs(model_path=model_path, **flags)  # type: ignore[arg-type]
    config = ModelConfig.from_path(
        args.model_path,
        overrides=args.model_overrides,
        dtype=args.dtype_on("cpu"),
        context_length=args.context_length,
        quantization=args.quantization,
    )
    return ModelRunner(args, config, ParallelState.single())


@dataclass
class Sequence:
    """A sequence with a row of its own; `ids` are the tokens that were run."""

    runner: ModelRunner
    row: int
    ids: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, runner: ModelRunner) -> Sequence:
        rows = runner.req_to_token_pool.alloc(1)
        assert rows is not None
        return cls(runner, rows[0])

    def end(self) -> None:
        table = self.runner.req_to_token_pool
        self.runner.allocator.free(table.req_to_token[self.row, : len(self.ids)])
        table.free([self.row])


def extend_batch(runner: ModelRunner, pieces: Seq[tuple[Sequence, Seq[int]]]) -> ForwardBatch:
    """A batch in which each sequence takes its piece."""
    prefixes = [len(sequence.ids) for sequence, _ in pieces]
    ids = [token for _, piece in pieces for token in piece]
    slots = _take_slots(runner, pieces)
    lens = [len(piece) for _, piece in pieces]
    return ForwardBatch.extend(ids, lens, prefixes, [s.row for s, _ in pieces], slots, runner.device)


def decode_batch(runner: ModelRunner, tokens: Seq[tuple[Sequence, int]]) -> ForwardBatch:
    """A batch in which each sequence takes one token."""
    slots = _take_slots(runner, [(sequence, [token]) for sequence, token in tokens])
    lens = [len(sequence.ids) for sequence, _ in tokens]
    ids = [token for _, token in tokens]
    return ForwardBatch.decode(ids, lens, [s.row for s, _ in tokens], slots, runner.device)


def _take_slots(runner: ModelRunner, pieces: Seq[tuple[Sequence, Seq[int]]]) -> torch.Tensor:
    slots = runner.allocator.alloc(sum(len(piece) for _, piece in pieces))
    assert slots is not None
    start = 0
    for sequence, piece in pieces:
        part = slots[start : start + len(piece)]
        runner.req_to_token_pool.write(sequence.row, len(sequence.ids), part)
        sequence.ids.extend(piece)
        start += len(piece)
    return slots
