"""Our Qwen3-MoE against transformers' in float32, however the tokens are cut into forwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from support.sequences import Sequence, decode_batch, extend_batch, single_runner

VOCAB_SIZE = 96
TOLERANCE = 1e-4

# Each geometry switches on something that the others leave off.
GEOMETRIES = {
    "plain": dict(norm_topk_prob=True),
    "dense layers, bias, tied head": dict(
        mlp_only_layers=[0],
        attention_bias=True,
        tie_word_embeddings=True,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    "sparse every second layer, yarn": dict(
        decoder_sparse_step=2,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.fixture(scope="module", params=GEOMETRIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose weights are large enough for errors to show, in several files."""
    torch.manual_seed(0)
    base = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**base, **GEOMETRIES[request.param]}))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path, max_shard_size="100KB")
    assert (path / "model.safetensors.index.json").exists()
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    yield single_runner(str(checkpoint), context_length=256)


@pytest.fixture(autouse=True)
def every_slot_comes_back(runner: ModelRunner) -> Iterator[None]:
    yield
    assert runner.allocator.available() == runner.max_total_num_tokens


def random_ids(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def expected(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[len(ids), vocab]`."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float()


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max().item() < TOLERANCE


def test_prefill_in_one_piece_matches(runner: ModelRunner, reference: PreTrainedModel) -> None:
    sequence, ids = Sequence.start(runner), random_ids(150)
    logits = runner.forward(extend_batch(runner, [(sequence, ids)]))
    assert_close(logits, expected(reference, ids)[-1:])
    sequence.end()


def test_prefill_in_chunks_matches_at_every_chunk_end(
    runner: ModelRunner, reference: PreTrainedModel
) -> None:
    sequence, ids = Sequence.start(runner), random_ids(150)
    wanted, start = expected(reference, ids), 0
    for length in (1, 64, 3, 81, 1):
        logits = runner.forward(extend_batch(runner, [(sequence, ids[start : start + length])]))
        start += length
        assert_close(logits, wanted[start - 1 : start])
    assert start == len(ids)
    sequence.end()


def test_token_by_token_matches_at_every_token(runner: ModelRunner, reference: PreTrainedModel) -> None:
    sequence, ids = Sequence.start(runner), random_ids(40)
    rows = [runner.forward(extend_batch(runner, [(sequence, ids[:1])]))]
    rows += [runner.forward(decode_batch(runner, [(sequence, token)])) for token in ids[1:]]
    assert_close(torch.cat(rows), expected(reference, ids))
    sequence.end()


def test_mixed_batches_match_for_every_sequence(runner: ModelRunner, reference: PreTrainedModel) -> None:
    texts = [random_ids(length, seed) for seed, length in enumerate((5, 130, 1, 77))]
    sequences = [Sequence.start(runner) for _ in texts]
    # The second is in its second chunk while the others begin.
    runner.forward(extend_batch(runner, [(sequences[1], texts[1][:100])]))
    pieces = [texts[0], texts[1][100:], texts[2], texts[3]]
    logits = runner.forward(extend_batch(runner, list(zip(sequences, pieces, strict=True))))
    assert_close(logits, torch.cat([expected(reference, text)[-1:] for text in texts]))
    for step in range(3):
        tokens = random_ids(len(texts), seed=100 + step)
        logits = runner.forward(decode_batch(runner, list(zip(sequences, tokens, strict=True))))
        wanted = [expected(reference, sequence.ids)[-1:] for sequence in sequences]
        assert_close(logits, torch.cat(wanted))
    for sequence in sequences:
        sequence.end()


def test_slots_of_a_finished_sequence_can_be_reused(runner: ModelRunner, reference: PreTrainedModel) -> None:
    first, second = Sequence.start(runner), Sequence.start(runner)
    runner.forward(extend_batch(runner, [(first, random_ids(60, 2)), (second, random_ids(20, 3))]))
    first.end()
    third, ids = Sequence.start(runner), random_ids(90, 4)
    runner.forward(extend_batch(runner, [(third, ids)]))
    logits = runner.forward(decode_batch(runner, [(second, 7), (third, 8)]))
    wanted = [expected(reference, random_ids(20, 3) + [7])[-1:], expected(reference, ids + [8])[-1:]]
    assert_close(logits, torch.cat(wanted))
    second.end()
    third.end()


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_dummy_forward_leaves_running_sequences_alone(
    runner: ModelRunner, reference: PreTrainedModel, mode: ForwardMode
) -> None:
    sequence, ids = Sequence.start(runner), random_ids(30)
    runner.forward(extend_batch(runner, [(sequence, ids[:-1])]))
    lengths = [1] * 9 if mode is ForwardMode.DECODE else [4, 4, 1]
    dummy = ForwardBatch.dummy(mode, lengths, torch.randint(0, VOCAB_SIZE, (9,)))
    assert runner.forward_hidden(dummy).isfinite().all()
    logits = runner.forward(decode_batch(runner, [(sequence, ids[-1])]))
    assert_close(logits, expected(reference, ids)[-1:])
    sequence.end()


def test_an_idle_batch_gives_no_rows(runner: ModelRunner) -> None:
    logits = runner.forward(ForwardBatch.idle("cpu"))
    assert logits.shape == (0, VOCAB_SIZE)
