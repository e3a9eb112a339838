"""Every layout of ranks says what one rank says: tensor, pipeline and expert parallelism, attention DP, and mixtures.

The ranks are real processes with the built-in model, the real scheduler and real gloo groups. `Client` stands where
the main process and its sockets would: it hands requests to the first rank and keeps what comes back.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import initialize
from sglang.srt.environ import envs
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.managers.io_struct import (
    AbortRequest,
    BatchTokenOutput,
    CacheFlushed,
    FlushCache,
    GetInternalState,
    InternalState,
    LogprobParams,
    Shutdown,
    TokenizedRequest,
    WorkerMessage,
)
from sglang.srt.managers.worker import create_scheduler
from sglang.srt.model_executor.decode_graphs import DecodeGraphs
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.arithmetic import few_shot_prompt, held_out_questions
from support.ranks import free_port, results_of, run_ranks

LAYOUTS = {
    "TP2": {"tp_size": 2},
    "TP4": {"tp_size": 4},
    "PP2": {"pp_size": 2},
    "PP4": {"pp_size": 4},
    "TP2xPP2": {"tp_size": 2, "pp_size": 2},
    "EP2": {"tp_size": 2, "ep_size": 2},
    "DP2": {"tp_size": 2, "attn_dp_size": 2},
    "DP4xEP4": {"tp_size": 4, "attn_dp_size": 4, "ep_size": 4},
    "TP4xDP2xEP2": {"tp_size": 4, "attn_dp_size": 2, "ep_size": 2},
    "DP2xPP2": {"tp_size": 2, "attn_dp_size": 2, "pp_size": 2},
}

ABORTED = "aborted"
NUM_TOKENS_IF_NOT_ABORTED = 60


class Client:
    """Sends each request at a step of its own, aborts one, and shuts down when the others have finished."""

    def __init__(self, requests: list[TokenizedRequest]) -> None:
        self.to_come = list(requests)
        self.unfinished = {request.rid for request in requests} - {ABORTED}
        self.tokens: dict[str, list[int]] = {request.rid: [] for request in requests}
        self.scores: dict[str, list[float | None]] = {request.rid: [] for request in requests}
        self.states: list[InternalState] = []
        self.num_steps = 0
        self.asked = False

    def receive(self, may_wait: bool) -> list:
        self.num_steps += 1
        if self.to_come:
            arrived, self.to_come = self.to_come[:2], self.to_come[2:]
            return arrived
        if self.num_steps == 10:
            return [AbortRequest(ABORTED), AbortRequest("unknown")]
        if self.unfinished or not may_wait:
            return []
        if not self.asked:
            self.asked = True
            return [GetInternalState(1)]
        return [Shutdown()]

    def receive_raw(self, may_wait: bool) -> list[msgspec.Raw]:
        return [msgspec.Raw(msgspec.msgpack.encode(message)) for message in self.receive(may_wait)]

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, InternalState):
            self.states.append(message)
        elif not isinstance(message, CacheFlushed):
            assert isinstance(message, BatchTokenOutput)
            for output in message.outputs:
                self.tokens[output.rid] += output.token_ids
                for logprobs in (output.prompt_logprobs, output.logprobs):
                    self.scores[output.rid] += logprobs.values if logprobs is not None else []
                if output.finish_reason is not None:
                    self.unfinished.discard(output.rid)

    def send_raw(self, message) -> None:
        self.send(msgspec.msgpack.decode(message, type=WorkerMessage))


REPLAYED_SIZES = (1, 2, 4)


def replay_decodes(runner: ModelRunner) -> None:
    """Give `runner` decode graphs whose capture keeps the function and whose replay calls it, as there is no GPU."""
    replayed = []

    def capture(run):
        return lambda: (replayed.append(run), run())

    runner.decode_graphs = DecodeGraphs(
        REPLAYED_SIZES,
        TorchNativeAttention(runner.req_to_token_pool, runner.kv_pool),
        runner.forward_into,
        runner.model_config.vocab_size,
        runner.device,
        capture,
        runner.plan_fence,
        num_replicas=runner.parallel.attn_dp.size,
    )
    runner.replayed = replayed


def serve(rank: int, port: int, sizes: dict, requests: list[TokenizedRequest], variant: str = ""):
    """Serve `requests` on one rank; gives tokens, scores and states that the client got, what is still held, and how
    many forwards were replays."""
    torch.set_num_threads(1)
    args = ServerArgs(
        device="cpu",
        disable_flashinfer_autotune=True,
        max_total_tokens=600,
        context_length=200,
        max_running_requests=8,
        chunked_prefill_size=48 * sizes.get("attn_dp_size", 1),
        dist_timeout=30,
        **sizes,
    )
    config = ModelConfig.from_path(args.model_path, dtype="float32", context_length=args.context_length)
    parallel = initialize(args, rank, f"tcp://127.0.0.1:{port}", torch.device("cpu"))
    runner = ModelRunner(args, config, parallel)
    client = Client(requests)
    if variant == "replays":
        replay_decodes(runner)
    with envs.SGLANG_OVERLAP_SCHEDULE_ON_CPU.override(variant == "overlap"):
        scheduler = create_scheduler(runner, client)
    scheduler.run()
    parallel.world.barrier(20)
    scheduler.handle([FlushCache(1)])
    held = runner.allocator.num_tokens - runner.allocator.available()
    states = [msgspec.structs.asdict(state) for state in client.states]
    return client.tokens, client.scores, states, held, len(getattr(runner, "replayed", ()))


def make_requests(num_replicas: int) -> list[TokenizedRequest]:
    tokenizer = Tokenizer.from_file(os.path.join(ServerArgs().model_path, "tokenizer.json"))
    rng = random.Random(3)
    requests = []
    for i, (question, shots) in enumerate(held_out_questions(12, 8, seed=5)):
        prompt = tokenizer.encode(few_shot_prompt(question, shots[: rng.randrange(9)])).ids
        sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 7} if i % 4 == 3 else {"temperature": 0.0}
        penalties = {"frequency_penalty": 1.0, "repetition_penalty": 1.5} if i % 3 == 1 else {}
        sampling = SamplingParams(max_new_tokens=4 + 3 * (i % 5), ignore_eos=True, **sampled, **penalties)
        logprobs = LogprobParams(num_top=i % 2, prompt_start=i % 4) if i % 3 == 2 else None
        requests.append(TokenizedRequest(f"r{i}", prompt, sampling, i % 2 == 0, i % num_replicas, logprobs))
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS_IF_NOT_ABORTED, temperature=0.0, ignore_eos=True)
    requests.insert(1, TokenizedRequest(ABORTED, requests[0].input_ids, sampling, True, num_replicas - 1))
    return requests


@pytest.fixture(scope="module")
def one_rank() -> tuple[dict[str, list[int]], dict[str, list[float | None]]]:
    ((tokens, scores, *_),) = results_of(run_ranks(1, serve, free_port(), {}, make_requests(1)))
    return tokens, scores


@pytest.mark.parametrize(
    "name",
    [
        *LAYOUTS,
        "one rank, overlap",
        "TP2, overlap",
        "DP2, replays",
        "DP4xEP4, replays",
        "TP4xDP2xEP2, replays",
    ],
)
def test_a_layout_says_what_one_rank_says(name, one_rank):
    layout, _, variant = name.partition(", ")
    sizes = LAYOUTS.get(layout, {})
    num_ranks = sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    num_replicas = sizes.get("attn_dp_size", 1)
    requests = make_requests(num_replicas)
    outcomes = run_ranks(num_ranks, serve, free_port(), sizes, requests, variant)
    results = results_of(outcomes)
    tokens, scores, states, *_ = results[0]
    expected_tokens, expected_scores = one_rank
    for rid, expected in expected_tokens.items():
        if rid == ABORTED:
            both = list(zip(expected, tokens[rid], strict=False))
            assert both and len(tokens[rid]) < NUM_TOKENS_IF_NOT_ABORTED
            assert all(one == other for one, other in both)
        else:
            assert tokens[rid] == expected, rid
            assert scores[rid] == pytest.approx(expected_scores[rid], abs=1e-3), rid
    assert sorted(state["replica"] for state in states) == list(range(num_replicas))
    assert [held for _, _, _, held, _ in results] == [0] * num_ranks
    num_replays = [replays for *_, replays in results]
    assert num_replays == [num_replays[0]] * num_ranks, "all ranks replay, or none does"
    assert (num_replays[0] > 10) == (variant == "replays")
