"""The training loop of the built-in model, and its accuracy on held-out questions."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.model_loader.train_builtin.corpus import IGNORED, draw_batch
from sglang.srt.model_loader.train_builtin.model import TinyMoE
from sglang.srt.model_loader.train_builtin.tokenizer import END_OF_TEXT
from sglang.test.arithmetic import few_shot_prompt, held_out_questions

ROW_LENGTHS, ROW_LENGTH_SHARES = (64, 128, 256), (0.5, 0.35, 0.15)
"""Training rows come in three lengths: short ones for speed, long ones for prompts with many shots."""

MAX_ANSWER_TOKENS = 5
"""A sign, three digits and the newline."""


@dataclass(frozen=True)
class TrainOptions:
    seed: int = 0
    num_steps: int = 5000
    tokens_per_step: int = 4096
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    decay_share: float = 0.5
    """The share of the steps, at the end, in which the learning rate falls to zero."""
    balance_weight: float = 0.01
    device: str = "cpu"

    def learning_rate_at(self, step: int) -> float:
        rising = (step + 1) / self.warmup_steps
        falling = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return self.learning_rate * min(1.0, rising, falling)


def train(options: TrainOptions, log: Callable[[str], None]) -> TinyMoE:
    """Train a model from random weights; the same options, device and thread count give the same weights."""
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    model = TinyMoE().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    start = time.perf_counter()
    for step in range(options.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate_at(step)
        length = rng.choices(ROW_LENGTHS, ROW_LENGTH_SHARES)[0]
        batch = draw_batch(rng, options.tokens_per_step // length, length)
        inputs, targets = torch.tensor(batch).to(options.device)
        logits, balance = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        (loss + options.balance_weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 250 == 0:
            score = accuracy(model, num_questions=200, seed=1)
            seconds = time.perf_counter() - start
            log(f"step {step + 1}: loss {loss.item():.4f}, held out {score:.3f}, {seconds:.0f} s")
    return model


@torch.no_grad()
def accuracy(model: TinyMoE, num_questions: int, num_shots: int = 3, seed: int = 0) -> float:
    """The share of held-out few-shot questions that ``model`` answers rightly, greedily."""
    device = model.lm_head.weight.device
    by_length = defaultdict(list)
    for question, shots in held_out_questions(num_questions, num_shots, seed):
        prompt = few_shot_prompt(question, shots).encode()
        by_length[len(prompt)].append((list(prompt), f"{question.answer}\n".encode()))
    num_right = 0
    for length, items in by_length.items():
        ids = torch.tensor([prompt for prompt, _ in items], device=device)
        for _ in range(MAX_ANSWER_TOKENS):
            logits = model(ids)[0][:, -1, :END_OF_TEXT]
            ids = torch.cat((ids, logits.argmax(dim=-1, keepdim=True)), dim=1)
        for row, (_, answer) in zip(ids[:, length:].tolist(), items, strict=True):
            num_right += bytes(row).startswith(answer)
    return num_right / num_questions
