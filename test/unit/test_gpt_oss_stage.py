"""A start of a small gpt-oss: tuned cold, answered from records warm, the same tokens whatever choices are in force."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sglang.srt.autotune import flashinfer_api
from sglang.srt.model_executor.model_runner import ModelRunner
from support.gpt_oss import VOCAB_SIZE, as_mxfp4, logits_of, save_small_gpt_oss
from support.sequences import Sequence, decode_batch, extend_batch, single_runner

FLAGS = {
    "max_running_requests": 4,
    "chunked_prefill_size": 48,
    "context_length": 128,
    "max_total_tokens": 400,
}


@pytest.fixture(autouse=True)
def fresh_tuner():
    flashinfer_api.forget_everything()
    yield
    flashinfer_api.forget_everything()


def greedy(runner: ModelRunner, num_tokens: int = 12) -> tuple[list[int], torch.Tensor]:
    """Tokens after one prompt that is longer than the window, and the logits of each step."""
    sequence, ids = Sequence.start(runner), random.Random(2).choices(range(VOCAB_SIZE), k=40)
    logits = [runner.forward(extend_batch(runner, [(sequence, ids)]))]
    tokens = [int(logits[-1].argmax())]
    for _ in range(num_tokens - 1):
        logits.append(runner.forward(decode_batch(runner, [(sequence, tokens[-1])])))
        tokens.append(int(logits[-1].argmax()))
    sequence.end()
    return tokens, torch.cat(logits)


def test_tuned_loaded_and_disabled_starts_say_the_same(tmp_path: Path) -> None:
    model = save_small_gpt_oss(tmp_path)
    said = {}
    for start in ("disabled", "cold", "warm"):
        flashinfer_api.forget_everything()
        runner = single_runner(str(tmp_path), disable_flashinfer_autotune=start == "disabled", **FLAGS)
        report = runner.autotune_report
        assert report.status == ("skipped" if start == "disabled" else "completed")
        assert (report.profiles_tuned > 0) == (start == "cold")
        assert report.fallbacks == 0
        said[start] = greedy(runner)
    tokens, logits = said["disabled"]
    for other, others in said.values():
        assert other == tokens
        torch.testing.assert_close(others, logits, atol=1e-4, rtol=1e-4)
    prompt = random.Random(2).choices(range(VOCAB_SIZE), k=40)
    expected = logits_of(model, prompt + tokens[:-1])[39:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_dequantising_says_what_it_costs_and_a_plain_checkpoint_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_small_gpt_oss(tmp_path / "plain")
    as_mxfp4(tmp_path / "plain", tmp_path / "mxfp4")
    with caplog.at_level("WARNING"):
        single_runner(str(tmp_path / "plain"), **FLAGS)
        assert not [record for record in caplog.records if "MXFP4" in record.getMessage()]
        single_runner(str(tmp_path / "mxfp4"), **FLAGS)
    (message,) = [text for text in caplog.messages if "MXFP4" in text]
    assert "dequantised to float32" in message and "GiB on each rank instead of" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 is not supported for GptOssForCausalLM: mxfp4 is"),
        ({"quantization": "mxfp4"}, "--quantization mxfp4: .* describes plain weights; leave the flag out"),
    ],
)
def test_quantising_here_is_refused(tmp_path: Path, flags: dict[str, str], words: str) -> None:
    save_small_gpt_oss(tmp_path)
    with pytest.raises(ValueError, match=words):
        single_runner(str(tmp_path), load_format="dummy", **FLAGS, **flags)
