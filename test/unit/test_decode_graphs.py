"""Padding of decode batches to captured sizes.

On the CPU there are no graphs: a "capture" here keeps the function and a "replay" calls it again, over the same
buffers and the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.memory_pool import PADDING_ROW, PADDING_SLOT
from sglang.srt.model_executor.decode_graphs import (
    DecodeGraphs,
    StaticDecodeBatch,
    check_capturable,
    covering_size,
)
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.builtin import BUILTIN_MODEL_PATH
from sglang.srt.server_args import ServerArgs
from support.sequences import Sequence, decode_batch, extend_batch, single_runner

SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return single_runner(BUILTIN_MODEL_PATH, context_length=128, max_total_tokens=1024)


class Captures:
    """Stands where CUDA's graphs would; keeps the order of the captures and of the replays."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        number = self.num_captured
        self.num_captured += 1
        run()

        def replay() -> None:
            self.replayed.append(number)
            run()

        return replay


def graphs_of(runner: ModelRunner, captures: Captures, **options: object) -> DecodeGraphs:
    return DecodeGraphs(
        SIZES,
        TorchNativeAttention(runner.req_to_token_pool, runner.kv_pool),
        runner.forward_into,
        runner.model_config.vocab_size,
        runner.device,
        captures,
        runner.plan_fence,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture
def sequences(runner: ModelRunner) -> Iterator[list[Sequence]]:
    """Eight sequences of different lengths whose prompts have been run."""
    started = [Sequence.start(runner) for _ in range(8)]
    for number, sequence in enumerate(started):
        runner.forward(extend_batch(runner, [(sequence, list(range(40, 45 + 3 * number)))]))
    yield started
    for sequence in started:
        sequence.end()


def test_a_batch_takes_the_next_captured_size() -> None:
    assert [covering_size(SIZES, n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]


@pytest.mark.parametrize("num_seqs", range(1, 9))
def test_a_replay_gives_the_logits_of_the_eager_forward(
    runner: ModelRunner, sequences: list[Sequence], num_seqs: int
) -> None:
    captures = Captures()
    graphs = graphs_of(runner, captures)
    batch = decode_batch(runner, [(sequence, 50 + i) for i, sequence in enumerate(sequences[:num_seqs])])
    assert graphs.covers(batch)
    replayed = graphs.replay(batch).clone()
    torch.testing.assert_close(replayed, runner.forward(batch), atol=1e-4, rtol=1e-4)
    size = covering_size(SIZES, num_seqs)
    assert captures.replayed == [SIZES[::-1].index(size)], "the largest is captured first"


def test_a_smaller_batch_after_a_larger_one_finds_nothing_of_it(
    runner: ModelRunner, sequences: list[Sequence]
) -> None:
    inputs = StaticDecodeBatch(8, runner.device)
    inputs.fill(decode_batch(runner, [(sequence, 60) for sequence in sequences[:4]]), 4)
    padded = inputs.fill(decode_batch(runner, [(sequences[0], 61)]), 4)
    assert padded.mode is ForwardMode.DECODE and padded.batch_size == 4
    assert padded.req_pool_indices.tolist() == [sequences[0].row] + [PADDING_ROW] * 3
    assert padded.out_cache_loc.tolist()[1:] == [PADDING_SLOT] * 3
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu == [len(sequences[0].ids), 1, 1, 1]
    assert padded.positions.tolist() == [len(sequences[0].ids) - 1, 0, 0, 0]


def test_replays_write_no_slot_but_those_of_their_tokens(
    runner: ModelRunner, sequences: list[Sequence]
) -> None:
    graphs = graphs_of(runner, Captures())
    batch = decode_batch(runner, [(sequence, 70) for sequence in sequences[:3]])
    before = runner.kv_pool.k(0).clone()
    graphs.replay(batch)
    changed = (runner.kv_pool.k(0) != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) - {PADDING_SLOT} == set(batch.out_cache_loc.tolist())


def test_only_decode_batches_up_to_the_largest_size_are_covered(runner: ModelRunner) -> None:
    graphs = graphs_of(runner, Captures())
    ids = torch.zeros(9, dtype=torch.int64)
    assert graphs.covers(ForwardBatch.dummy(ForwardMode.DECODE, [1] * 8, ids[:8]))
    assert not graphs.covers(ForwardBatch.dummy(ForwardMode.DECODE, [1] * 9, ids))
    assert not graphs.covers(ForwardBatch.dummy(ForwardMode.EXTEND, [1] * 2, ids[:2]))
    gathered = ForwardBatch.dummy(ForwardMode.DECODE, [1], ids[:1])
    gathered.global_num_tokens = [1, 3]
    assert graphs.fits(gathered) and not graphs.covers(gathered), "another rank of its group runs eagerly"
    gathered.all_may_replay = True
    assert graphs.covers(gathered)


def test_replicas_replay_the_size_of_the_largest_batch_and_an_idle_one_pads_all_of_it(
    runner: ModelRunner, sequences: list[Sequence]
) -> None:
    captures = Captures()
    graphs = graphs_of(runner, captures)
    mine = decode_batch(runner, [(sequences[0], 50)])
    expected = runner.forward(mine).clone()
    idle = ForwardBatch.idle(runner.device)
    for batch in (mine, idle):
        batch.global_num_tokens, batch.all_may_replay = [1, 3, 0], True
        assert graphs.covers(batch)
        logits = graphs.replay(batch)
        assert logits.shape[0] == batch.batch_size
        torch.testing.assert_close(logits, expected[: batch.batch_size], atol=1e-4, rtol=1e-4)
    assert captures.replayed == [SIZES[::-1].index(4)] * 2


def test_progress_counts_the_sizes(runner: ModelRunner) -> None:
    heard: list[dict[str, int]] = []
    graphs_of(runner, Captures(), progress=heard.append)
    assert [entry["done"] for entry in heard] == [0, 1, 2, 3, 4]
    assert {entry["total"] for entry in heard} == {4}


def test_backends_that_cannot_be_captured_are_refused_with_the_remedy() -> None:
    class Gpu:  # stands for a runner on a GPU, of which only these are asked
        device = torch.device("cuda", 0)

        def __init__(self, **flags: object) -> None:
            self.server_args = ServerArgs(**flags)  # type: ignore[arg-type]
            self.moe_runner = type("Runner", (), {"name": self.server_args.moe_runner_backend_on("cuda")})

    for flag in ("moe_runner_backend", "attention_backend"):
        name = {"moe_runner_backend": "reference", "attention_backend": "torch_native"}[flag]
        with pytest.raises(ValueError, match=f"{name} cannot be captured.*--disable-cuda-graph"):
            check_capturable(Gpu(**{flag: name}))  # type: ignore[arg-type]
        check_capturable(Gpu(**{flag: name, "disable_cuda_graph": True}))  # type: ignore[arg-type]
    check_capturable(Gpu())  # type: ignore[arg-type]
