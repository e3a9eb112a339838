"""Penalties and log-probabilities of a request are the same whatever becomes of it on the way to its last token.

Real pools and scheduler, and a model of random weights, on the CPU; `Client` stands where the main process would.
"""

from __future__ import annotations

import pytest
from flashinfer.autotuner import AutoTuner

from sglang.srt.configs.model_config import BUILTIN_MODEL_PATH
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BatchTokenOutput,
    GetInternalState,
    InternalState,
    LogprobParams,
    Shutdown,
    TokenizedRequest,
    TokenLogprobs,
)
from sglang.srt.managers.worker import create_scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from support.sequences import single_runner

PENALTIES = (
    {"frequency_penalty": 0.7},
    {},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.6, "temperature": 0.8, "seed": 5},
    {"frequency_penalty": 0.4, "logit_bias": {65: 4.0, 10: -3.0}},
)
NUM_NEW = 40


def requests() -> list[TokenizedRequest]:
    made = []
    for i, params in enumerate(PENALTIES):
        prompt = list("".join(f"{k}+{i}={k + i}\n" for k in range(2 + i)).encode())
        sampling = SamplingParams(
            **{"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True, **params}
        )
        logprobs = LogprobParams(num_top=i % 3, prompt_start=(0, 3, None)[i % 3])
        made.append(TokenizedRequest(f"r{i}", prompt, sampling, i % 2 == 0, logprobs=logprobs))
    return made


class Client:
    """Hands out all requests at once and keeps what comes back."""

    def __init__(self) -> None:
        self.to_come: list = requests()
        self.tokens = {request.rid: [] for request in self.to_come}
        self.logprobs = {request.rid: TokenLogprobs() for request in self.to_come}
        self.prompt_logprobs: dict[str, TokenLogprobs] = {}
        self.num_left = len(self.to_come)
        self.num_retractions = None

    def receive(self, may_wait: bool) -> list:
        arrived, self.to_come = self.to_come, []
        if not arrived and may_wait and self.num_left == 0:
            return [GetInternalState(1)] if self.num_retractions is None else [Shutdown()]
        return arrived

    def send(self, message) -> None:
        if isinstance(message, InternalState):
            self.num_retractions = message.num_retractions
            return
        assert isinstance(message, BatchTokenOutput)
        for output in message.outputs:
            self.tokens[output.rid] += output.token_ids
            self.logprobs[output.rid].extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.rid not in self.prompt_logprobs, "they come once"
                self.prompt_logprobs[output.rid] = output.prompt_logprobs
            self.num_left -= output.finish_reason is not None


def serve(overlap: bool = False, **flags) -> Client:
    # Random weights are sure of nothing, so that every penalty counts.
    flags = {"load_format": "dummy", "context_length": 200, "disable_radix_cache": True, **flags}
    runner = single_runner(BUILTIN_MODEL_PATH, **flags)
    client = Client()
    with envs.SGLANG_OVERLAP_SCHEDULE_ON_CPU.override(overlap):
        scheduler = create_scheduler(runner, client)
    with pytest.MonkeyPatch.context() as patch:
        # What was chosen by now serves: FlashInfer's lookup would take a lock in every layer.
        patch.setattr(AutoTuner, "get", lambda *args: pytest.fail("serving asked the tuner"))
        scheduler.run()
    return client


@pytest.fixture(scope="module")
def undisturbed() -> Client:
    client = serve(max_total_tokens=4096)
    assert client.num_retractions == 0
    return client


def assert_close(some: TokenLogprobs, others: TokenLogprobs) -> None:
    assert [value is None for value in some.values] == [value is None for value in others.values]
    assert [v for v in some.values if v is not None] == pytest.approx(
        [v for v in others.values if v is not None], abs=1e-3
    )
    assert [len(top) for top in some.top] == [len(top) for top in others.top]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_chunks_and_retractions_change_neither_tokens_nor_log_probabilities(undisturbed, overlap):
    disturbed = serve(overlap, max_total_tokens=270, chunked_prefill_size=7, max_running_requests=5)
    assert disturbed.num_retractions > 0
    assert disturbed.tokens == undisturbed.tokens
    for rid, logprobs in undisturbed.logprobs.items():
        assert len(logprobs.values) == NUM_NEW
        assert_close(disturbed.logprobs[rid], logprobs)
    assert disturbed.prompt_logprobs.keys() == undisturbed.prompt_logprobs.keys()
    for rid, logprobs in undisturbed.prompt_logprobs.items():
        assert_close(disturbed.prompt_logprobs[rid], logprobs)


def test_prompts_are_scored_from_where_each_request_wants_it(undisturbed):
    for request in requests():
        start = request.logprobs.prompt_start
        if start is None:
            assert request.rid not in undisturbed.prompt_logprobs
        else:
            values = undisturbed.prompt_logprobs[request.rid].values
            assert len(values) == len(request.input_ids) - start
