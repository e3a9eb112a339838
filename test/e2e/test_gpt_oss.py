"""A small gpt-oss over HTTP, as it is published: MXFP4 experts, an o200k-style tokenizer, a chat template in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GptOssForCausalLM

from support.gpt_oss import as_mxfp4, save_small_gpt_oss

# How o200k splits text before byte pairs are merged.
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
TEMPLATE = """{%- set today = strftime_now("%Y-%m-%d") -%}
<|start|>system<|message|>Current date: {{ today }}. Reasoning: {{ reasoning_effort or "medium" }}<|end|>
{%- for message in messages -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
VOCAB_SIZE = 264


def write_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    ends = [256 + SPECIAL.index(name) for name in ("<|return|>", "<|end|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOssForCausalLM]:
    source, path = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("mxfp4")
    save_small_gpt_oss(source, vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    model = as_mxfp4(source, path)
    write_tokenizer(path)
    return path, model


@torch.no_grad()
def greedy(model: GptOssForCausalLM, ids: list[int], num_tokens: int) -> list[int]:
    for _ in range(num_tokens):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-num_tokens:]


def test_it_is_tuned_completes_like_transformers_and_chats(start_server, checkpoint) -> None:
    path, model = checkpoint
    flags = ["--max-running-requests", "2", "--chunked-prefill-size", "32", "--context-length", "256"]
    server = start_server("--model-path", str(path), *flags, tiny=False).wait_ready()
    report = server.info()["autotune"]
    assert report["status"] == "completed" and report["profiles_tuned"] > 0 and not report["fallbacks"]
    assert "MXFP4 experts are dequantised to float32" in server.log

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = "It's 3.14159, isn't it?\n\n  Prüfe: 12345"
    ids = tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}}
    answer = server.post("/generate", json=body).json()
    assert answer["output_ids"] == greedy(model, ids, 30)
    assert server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)

    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, reasoning_effort="high"
    )
    assert rendered.startswith("<|start|>system") and "Reasoning: high" in rendered
    chat = server.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": 4, "reasoning_effort": "high"},
    )
    assert chat.status_code == 200, chat.text
    assert chat.json()["usage"]["prompt_tokens"] == len(tokenizer(rendered)["input_ids"])
