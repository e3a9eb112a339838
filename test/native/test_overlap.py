"""Overlap of scheduling and forwards on a GPU: nothing waits that need not, and nothing is overwritten too early."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BatchTokenOutput,
    FlushCache,
    MainMessage,
    Shutdown,
    TokenizedRequest,
    WorkerMessage,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.worker import create_scheduler
from sglang.srt.managers.worker_environment import prepare_environment
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.builtin import BUILTIN_MODEL_PATH
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.arithmetic import few_shot_prompt, held_out_questions
from support.sequences import Sequence, decode_batch, extend_batch, single_runner

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    prepare_environment()
    records: Path = tmp_path_factory.mktemp("records")
    with envs.SGLANG_CACHE_DIR.override(str(records)):
        yield single_runner(
            BUILTIN_MODEL_PATH,
            device="cuda",
            dtype="bfloat16",
            max_running_requests=16,
            chunked_prefill_size=256,
            max_total_tokens=8192,
        )


class Client:
    """Stands where the main process would: hands out its requests two at a time and keeps the answers."""

    def __init__(self, requests: list[TokenizedRequest]) -> None:
        self.to_come = list(requests)
        self.tokens: dict[str, list[int]] = {request.rid: [] for request in requests}
        self.num_left = len(requests)

    def receive(self, may_wait: bool) -> list[MainMessage]:
        arrived, self.to_come = self.to_come[:2], self.to_come[2:]
        if not arrived and may_wait and self.num_left == 0:
            return [FlushCache(0), Shutdown()]
        return list(arrived)

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, BatchTokenOutput):
            for output in message.outputs:
                self.tokens[output.rid] += output.token_ids
                self.num_left -= output.finish_reason is not None


def scheduler_of(runner: ModelRunner, client: Client, *, overlap: bool) -> Scheduler:
    args = runner.server_args
    args.disable_overlap_schedule = not overlap
    try:
        return create_scheduler(runner, client)  # type: ignore[arg-type]
    finally:
        args.disable_overlap_schedule = False


def requests() -> list[TokenizedRequest]:
    rng, made = random.Random(1), []
    for i, (question, shots) in enumerate(held_out_questions(40, 6, seed=2)):
        ids = list(few_shot_prompt(question, shots[: rng.randrange(7)]).encode())
        sampled = {"temperature": 0.7, "seed": i} if i % 4 == 3 else {"temperature": 0.0}
        penalties = {"frequency_penalty": 0.1} if i % 5 == 4 else {}
        sampling = SamplingParams(max_new_tokens=3 + i % 9, stop_token_ids=[10], **sampled, **penalties)
        made.append(TokenizedRequest(f"r{i}", ids, sampling, incremental=True))
    return made


def test_answers_are_the_same_with_and_without_overlap(gpu: ModelRunner) -> None:
    answers = []
    for overlap in (False, True):
        client = Client(requests())
        scheduler_of(gpu, client, overlap=overlap).run()
        answers.append(client.tokens)
        assert gpu.allocator.available() == gpu.allocator.num_tokens
        assert gpu.req_to_token_pool.available() == gpu.req_to_token_pool.size
    # Batches differ by a forward here and there, and their products round differently.
    same = sum(answers[0][rid] == tokens for rid, tokens in answers[1].items())
    assert same >= 0.9 * len(answers[0])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation of torch that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_step_waits_for_the_device(gpu: ModelRunner, temperature: float) -> None:
    client = Client([])
    scheduler = scheduler_of(gpu, client, overlap=True)
    for i in range(6):
        sampling = SamplingParams(max_new_tokens=20 + i, temperature=temperature, seed=i, ignore_eos=True)
        ids = [(i * 31 + j) % 256 for j in range(40)]
        client.tokens[f"r{i}"] = []
        scheduler.handle([TokenizedRequest(f"r{i}", ids, sampling, incremental=True)])
        for _ in range(2):
            with no_waiting():
                scheduler.step()
    while not scheduler.is_idle:
        with no_waiting():
            scheduler.step()
    scheduler.handle([FlushCache(0)])
    assert [len(client.tokens[f"r{i}"]) for i in range(6)] == [20 + i for i in range(6)]


def test_forwards_that_are_queued_behind_each_other_keep_their_own_plans(gpu: ModelRunner) -> None:
    started = [Sequence.start(gpu) for _ in range(12)]
    for number, sequence in enumerate(started):
        gpu.forward(extend_batch(gpu, [(sequence, [(number + j) % 256 for j in range(5 + 20 * number)])]))
    batches = [decode_batch(gpu, [(s, 65) for s in started[first : first + 4]]) for first in (0, 4, 8)]
    wanted = []
    for batch in batches:
        wanted.append(gpu.forward(batch).clone())
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second, in which the host could run ahead
    queued = [gpu.forward(batch).clone() for batch in batches]
    for ours, theirs in zip(queued, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2)
    for sequence in started:
        sequence.end()
