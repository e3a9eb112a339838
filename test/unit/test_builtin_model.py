"""The built-in model: its files, its tokenizer, how well it answers, and the code that made it."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.srt.model_loader.builtin import BUILTIN_MODEL_PATH
from sglang.srt.model_loader.train_builtin.checkpoint import round_to_bfloat16, write_checkpoint
from sglang.srt.model_loader.train_builtin.corpus import IGNORED, draw_batch, lines_document
from sglang.srt.model_loader.train_builtin.model import TinyMoE
from sglang.srt.model_loader.train_builtin.tokenizer import IM_END, IM_START
from sglang.srt.model_loader.train_builtin.trainer import TrainOptions, train
from sglang.test.arithmetic import (
    MAX_OPERAND,
    Question,
    few_shot_prompt,
    held_out_questions,
    num_held_out,
)

NEWLINE = 10


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUILTIN_MODEL_PATH, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        BUILTIN_MODEL_PATH, dtype=torch.float32, local_files_only=True
    )


def test_every_byte_is_one_token_of_its_own_value(tokenizer):
    text = bytes(range(128)).decode() + "é漢字😀 ÿ\r\n\n  x"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert {tokenizer.convert_ids_to_tokens(byte) for byte in range(256)} == {
        token for token, token_id in tokenizer.get_vocab().items() if token_id < 256
    }


def test_chat_template_opens_the_turn_of_the_assistant(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert ids.count(IM_START) == 3 and ids.count(IM_END) == 2
    assert tokenizer.decode(ids) == text
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_checkpoint_has_the_geometry_that_every_layout_can_serve():
    config = json.loads((Path(BUILTIN_MODEL_PATH) / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    assert {name: config[name] for name in expected} == expected
    assert config["vocab_size"] % 8 == 0


def test_weights_are_bfloat16_under_the_published_names():
    tensors = load_file(Path(BUILTIN_MODEL_PATH) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in tensors.values()) < 5e6
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 4 * 8 * 3
    assert tensors["model.layers.3.mlp.experts.7.gate_proj.weight"].shape == (128, 128)
    assert tensors["model.layers.0.mlp.gate.weight"].shape == (8, 128)
    assert tensors["model.layers.0.self_attn.k_norm.weight"].shape == (64,)
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (264, 128)


def greedy(model, prompts: list[list[int]], max_new_tokens: int) -> tuple[list[list[int]], float]:
    """Generated ids of every prompt, up to a newline or the turn's end, and the smallest top-two margin."""
    by_length = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    margin = float("inf")
    for indices in by_length.values():
        out = model.generate(
            torch.tensor([prompts[index] for index in indices]),
            max_new_tokens=max_new_tokens,
            eos_token_id=[NEWLINE, IM_END],
            output_logits=True,
            return_dict_in_generate=True,
        )
        for row, index in enumerate(indices):
            for logits in out.logits:
                answers[index].append(int(logits[row].argmax()))
                top = logits[row].topk(2).values
                margin = min(margin, float(top[0] - top[1]))
                if answers[index][-1] in (NEWLINE, IM_END):
                    break
    return answers, margin


def test_held_out_few_shot_questions_are_answered_with_sharp_margins(model):
    questions = held_out_questions(40, num_shots=3, seed=123)
    prompts = [list(few_shot_prompt(question, shots).encode()) for question, shots in questions]
    answers, margin = greedy(model, prompts, max_new_tokens=5)
    right = [
        bytes(a) == f"{question.answer}\n".encode()
        for a, (question, _) in zip(answers, questions, strict=True)
    ]
    assert sum(right) / len(right) >= 0.95
    # Numerical differences between kernels are far below this, so greedy text does not depend on them.
    assert margin > 1.0


def test_held_out_questions_are_answered_in_chat_form(model, tokenizer):
    questions = [question for question, _ in held_out_questions(20, num_shots=0, seed=5)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {question.text[:-1]}?"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]
    answers, _ = greedy(model, prompts, max_new_tokens=5)
    right = [
        a == [*str(question.answer).encode(), IM_END] for a, question in zip(answers, questions, strict=True)
    ]
    assert sum(right) / len(right) >= 0.95


def test_text_after_the_answer_repeats_the_line(model, tokenizer):
    ids = model.generate(tokenizer("37+58=", return_tensors="pt").input_ids, max_new_tokens=30)
    assert tokenizer.decode(ids[0]).startswith("37+58=95\n37+58=95\n37+58=95\n")


def test_every_expert_of_every_layer_is_used(model):
    questions = held_out_questions(30, num_shots=3, seed=0)
    used = defaultdict(set)
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def remember(module, inputs, output, index=index):
            logits = torch.nn.functional.linear(inputs[0].reshape(-1, 128), module.weight)
            used[index].update(logits.topk(2, dim=-1).indices.flatten().tolist())

        hooks.append(layer.mlp.gate.register_forward_hook(remember))
    with torch.no_grad():
        for question, shots in questions:
            model(torch.tensor([list(few_shot_prompt(question, shots).encode())]))
    for hook in hooks:
        hook.remove()
    assert all(used[index] == set(range(8)) for index in range(4))


def test_held_out_questions_are_a_tenth_and_come_with_their_mirror():
    assert 0.07 < num_held_out() / (2 * (MAX_OPERAND + 1) ** 2) < 0.13
    assert all(
        Question(a, op, b).held_out == Question(b, op, a).held_out
        for a in range(100)
        for b in range(100)
        for op in "+-"
    )


def test_training_text_never_shows_a_held_out_question():
    rng = random.Random(0)
    shown = set()
    for _ in range(60):
        inputs, _ = draw_batch(rng, num_rows=8, length=128)
        for row in inputs:
            text = bytes(token if token < 256 else NEWLINE for token in row).decode()
            # A row is cut at its end, so a number that touches it may be the start of a longer one.
            for found in re.finditer(r"(?<!\d)(\d{1,2}) ?([+-]) ?(\d{1,2})(?=\D)", text):
                shown.add(Question(int(found[1]), found[2], int(found[3])))
    assert len(shown) > 2000
    assert not [question for question in shown if question.held_out]


def test_evaluation_asks_held_out_questions_after_training_shots():
    drawn = held_out_questions(100, num_shots=3, seed=0)
    assert len({question for question, _ in drawn}) == 100
    assert all(question.held_out and not any(s.held_out for s in shots) for question, shots in drawn)
    assert held_out_questions(10, num_shots=3, seed=0) == drawn[:10]
    with pytest.raises(ValueError, match="--num-examples"):
        held_out_questions(num_held_out() + 1, num_shots=0, seed=0)


def test_answers_carry_a_loss_and_fresh_questions_none():
    document = lines_document(random.Random(1), length=64)
    equals = [token for token, _ in document].index(ord("="))
    end = [token for token, _ in document].index(NEWLINE)
    assert all(target == IGNORED for _, target in document[: equals + 1])
    assert all(target == token for token, target in document[equals + 1 : end + 1])


def test_training_forward_and_written_checkpoint_agree_with_transformers(tmp_path):
    torch.manual_seed(3)
    ours = TinyMoE()
    round_to_bfloat16(ours)
    write_checkpoint(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 260, (2, 50))
    with torch.no_grad():
        difference = (ours(ids)[0] - theirs(ids).logits).abs().max()
    assert difference < 1e-4


def test_same_seed_trains_the_same_weights():
    options = TrainOptions(seed=4, num_steps=2, tokens_per_step=256)
    first, second = (train(options, log=print).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
