"""Our gpt-oss against transformers' in float32, however the tokens are cut into forwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GptOssForCausalLM

from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from support.gpt_oss import SMALL, VOCAB_SIZE, as_mxfp4, logits_of, save_small_gpt_oss
from support.sequences import Sequence, decode_batch, extend_batch, single_runner

TOLERANCE = 1e-4
WINDOW = SMALL["sliding_window"]

# Each switches on something that the others leave off.
VARIANTS = {
    "plain": {},
    "window of every layer, tied head, no attention bias": dict(
        layer_types=["sliding_attention"] * 4, tie_word_embeddings=True, attention_bias=False
    ),
    "no window, truncated yarn": dict(
        layer_types=["full_attention"] * 4,
        rope_parameters={**SMALL["rope_parameters"], "truncate": True},
        swiglu_limit=1.0,
    ),
    "mxfp4": {},
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, GptOssForCausalLM]:
    path = tmp_path_factory.mktemp("checkpoint")
    model = save_small_gpt_oss(path, **VARIANTS[request.param])
    if request.param == "mxfp4":
        path, source = tmp_path_factory.mktemp("mxfp4"), path
        model = as_mxfp4(source, path)
    return path, model


@pytest.fixture(scope="module")
def reference(checkpoint: tuple[Path, GptOssForCausalLM]) -> GptOssForCausalLM:
    return checkpoint[1]


@pytest.fixture(scope="module")
def runner(checkpoint: tuple[Path, GptOssForCausalLM]) -> Iterator[ModelRunner]:
    yield single_runner(str(checkpoint[0]), context_length=256)


@pytest.fixture(autouse=True)
def every_slot_comes_back(runner: ModelRunner) -> Iterator[None]:
    yield
    assert runner.allocator.available() == runner.max_total_num_tokens


def random_ids(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 150])
def test_prefill_in_one_piece_matches(runner: ModelRunner, reference: GptOssForCausalLM, length: int) -> None:
    sequence, ids = Sequence.start(runner), random_ids(length)
    logits = runner.forward(extend_batch(runner, [(sequence, ids)]))
    assert_close(logits, logits_of(reference, ids)[-1:])
    sequence.end()


def test_prefill_in_chunks_matches_at_every_chunk_end(
    runner: ModelRunner, reference: GptOssForCausalLM
) -> None:
    sequence, ids = Sequence.start(runner), random_ids(170)
    wanted, start = logits_of(reference, ids), 0
    for length in (1, WINDOW - 2, 2, WINDOW, 64, 3, 61, 1):
        logits = runner.forward(extend_batch(runner, [(sequence, ids[start : start + length])]))
        start += length
        assert_close(logits, wanted[start - 1 : start])
    sequence.end()


def test_token_by_token_matches_at_every_token(runner: ModelRunner, reference: GptOssForCausalLM) -> None:
    sequence, ids = Sequence.start(runner), random_ids(2 * WINDOW + 5)
    rows = [runner.forward(extend_batch(runner, [(sequence, ids[:1])]))]
    rows += [runner.forward(decode_batch(runner, [(sequence, token)])) for token in ids[1:]]
    assert_close(torch.cat(rows), logits_of(reference, ids))
    sequence.end()


def test_mixed_batches_match_for_every_sequence(runner: ModelRunner, reference: GptOssForCausalLM) -> None:
    texts = [random_ids(length, seed) for seed, length in enumerate((5, 130, 1, WINDOW))]
    sequences = [Sequence.start(runner) for _ in texts]
    # The second is in its second chunk while the others begin.
    runner.forward(extend_batch(runner, [(sequences[1], texts[1][:100])]))
    pieces = [texts[0], texts[1][100:], texts[2], texts[3]]
    logits = runner.forward(extend_batch(runner, list(zip(sequences, pieces, strict=True))))
    assert_close(logits, torch.cat([logits_of(reference, text)[-1:] for text in texts]))
    for step in range(3):
        tokens = random_ids(len(texts), seed=100 + step)
        logits = runner.forward(decode_batch(runner, list(zip(sequences, tokens, strict=True))))
        wanted = [logits_of(reference, sequence.ids)[-1:] for sequence in sequences]
        assert_close(logits, torch.cat(wanted))
    for sequence in sequences:
        sequence.end()


@pytest.mark.parametrize(
    "mode, lengths",
    [(ForwardMode.DECODE, [1]), (ForwardMode.DECODE, [1] * 9), (ForwardMode.EXTEND, [60, 4, 1])],
)
def test_a_dummy_forward_leaves_running_sequences_alone(
    runner: ModelRunner, reference: GptOssForCausalLM, mode: ForwardMode, lengths: list[int]
) -> None:
    sequence, ids = Sequence.start(runner), random_ids(30)
    runner.forward(extend_batch(runner, [(sequence, ids[:-1])]))
    dummy = ForwardBatch.dummy(mode, lengths, torch.randint(0, VOCAB_SIZE, (sum(lengths),)))
    assert runner.forward_hidden(dummy).isfinite().all()
    logits = runner.forward(decode_batch(runner, [(sequence, ids[-1])]))
    assert_close(logits, logits_of(reference, ids)[-1:])
    sequence.end()


def test_an_idle_batch_gives_no_rows(runner: ModelRunner) -> None:
    logits = runner.forward(ForwardBatch.idle("cpu"))
    assert logits.shape == (0, VOCAB_SIZE)
