"""Batches for a `ModelRunner` without a scheduler: whole sequences in, logits out."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from sglang.srt.configs.served_model import read_model_config
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.device import resolved_device


def build_runner(args: ServerArgs) -> ModelRunner:
    """The model runner of a process that is alone, as a server's worker would build it."""
    device = resolved_device(args.device)
    config = read_model_config(args, device)
    if device == "cuda":
        torch.cuda.set_device(0)
    return ModelRunner(args, config, ParallelState.single())


class Driver:
    """Owns the rows and slots of the sequences that it makes; `release` gives all of them back."""

    def __init__(self, runner: ModelRunner, seed: int = 3) -> None:
        self.runner, self.device = runner, runner.device
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: list[int] = []
        self._slots: list[torch.Tensor] = []

    def random_ids(self, num_tokens: int) -> list[int]:
        size = (num_tokens,)
        return torch.randint(0, self.runner.model_config.vocab_size, size, generator=self._generator).tolist()

    def fill_kv(self) -> None:
        """Random keys and values in the whole pool: zeros would make attention easier than it is."""
        pool, layers = self.runner.kv_pool, self.runner.model
        if pool.dtype.itemsize == 1:
            return
        for layer in range(layers.first_layer, layers.end_layer):
            pool.k(layer).normal_()
            pool.v(layer).normal_()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> ForwardBatch:
        """An EXTEND batch of whole prompts, one row each."""
        lengths = [len(prompt) for prompt in prompts]
        rows, slots = self._take(lengths)
        ids = [token for prompt in prompts for token in prompt]
        return ForwardBatch.extend(ids, lengths, [0] * len(prompts), rows, slots, self.device)

    def decode(self, num_sequences: int, seq_len: int) -> ForwardBatch:
        """A DECODE batch of sequences of `seq_len` tokens, the new one included, with whatever the pool holds."""
        rows, slots = self._take([seq_len] * num_sequences)
        last = slots.view(num_sequences, seq_len)[:, -1].contiguous()
        ids = self.random_ids(num_sequences)
        return ForwardBatch.decode(ids, [seq_len] * num_sequences, rows, last, self.device)

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The most likely continuation of each prompt, `num_tokens` long, prefilled in one batch."""
        capacity = [len(prompt) + num_tokens for prompt in prompts]
        rows, slots = self._take(capacity)
        own = slots.split(capacity)
        lengths = [len(prompt) for prompt in prompts]
        new_slots = torch.cat([mine[:length] for mine, length in zip(own, lengths, strict=True)])
        ids = [token for prompt in prompts for token in prompt]
        batch = ForwardBatch.extend(ids, lengths, [0] * len(prompts), rows, new_slots, self.device)
        tokens = self.runner.forward(batch).argmax(dim=-1).tolist()
        outputs = [[token] for token in tokens]
        for step in range(num_tokens - 1):
            places = torch.stack([mine[length + step] for mine, length in zip(own, lengths, strict=True)])
            seq_lens = [length + step + 1 for length in lengths]
            batch = ForwardBatch.decode(tokens, seq_lens, rows, places, self.device)
            tokens = self.runner.forward(batch).argmax(dim=-1).tolist()
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs

    def release(self) -> None:
        self.runner.req_to_token_pool.free(self._rows)
        for slots in self._slots:
            self.runner.allocator.free(slots)
        self._rows, self._slots = [], []

    def _take(self, lengths: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Rows, and the slots of all sequences one after another, entered into the rows."""
        rows = self.runner.req_to_token_pool.alloc(len(lengths))
        slots = self.runner.allocator.alloc(sum(lengths))
        if rows is None or slots is None:
            raise ValueError(
                f"{len(lengths)} sequences of {sum(lengths)} tokens in all do not fit: the pool has "
                f"{self.runner.max_total_num_tokens} tokens and {self.runner.max_running_requests} rows"
            )
        self._rows += rows
        self._slots.append(slots)
        for row, own in zip(rows, slots.split(list(lengths)), strict=True):
            self.runner.req_to_token_pool.write(row, 0, own.to(self.device))
        return rows, slots


def step_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds of one of `repeats` calls in a row, host work included, as the scheduler would see it.

    The median of three rounds: one stall of the host must not count.
    """
    run()
    rounds = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        rounds.append(1e3 * (time.perf_counter() - start) / repeats)
    return statistics.median(rounds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def recorded_routing(runner: ModelRunner) -> Iterator[list[int]]:
    """Numbers of experts that each MoE call inside touches, layer by layer. Eager forwards only: it waits for each."""
    touched: list[int] = []
    moe_runner = runner.moe_runner
    run = moe_runner.run

    def recording(hidden_states, topk_ids, *rest):  # type: ignore[no-untyped-def]
        touched.append(int(torch.unique(topk_ids).numel()))
        return run(hidden_states, topk_ids, *rest)

    moe_runner.run = recording  # type: ignore[method-assign]
    try:
        yield touched
    finally:
        del moe_runner.run  # the class's own shows again
