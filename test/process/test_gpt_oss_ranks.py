"""gpt-oss over several ranks gives the logits of one rank, and its start is tuned by all of them alike."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState, initialize
from sglang.srt.layers.logits_processor import last_token_rows
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from support.gpt_oss import VOCAB_SIZE, as_mxfp4, save_small_gpt_oss
from support.ranks import free_port, results_of, run_ranks
from support.sequences import Sequence, decode_batch, extend_batch

LAYOUTS = {
    "TP2": dict(tp_size=2),
    "PP2": dict(pp_size=2),
    "EP2": dict(tp_size=2, ep_size=2),
    "DP2xEP2": dict(tp_size=2, attn_dp_size=2, ep_size=2),
}
CHUNKS = [17, 30, 6]
NUM_DECODED = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # An expert of 96 columns, cut in two, ends inside a block of MXFP4.
    source, path = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("mxfp4")
    save_small_gpt_oss(source, intermediate_size=96)
    as_mxfp4(source, path)
    return path


def make_runner(rank: int, port: int, sizes: dict[str, int], path: str, **flags: object) -> ModelRunner:
    torch.set_num_threads(1)
    args = ServerArgs(
        model_path=path,
        device="cpu",
        max_total_tokens=600,
        context_length=128,
        dist_timeout=30,
        **{"disable_flashinfer_autotune": True, **sizes, **flags},  # type: ignore[arg-type]
    )
    config = ModelConfig.from_path(path, dtype=args.dtype_on("cpu"), context_length=args.context_length)
    parallel = initialize(args, rank, f"tcp://127.0.0.1:{port}", torch.device("cpu"))
    return ModelRunner(args, config, parallel)


def run_sequences(rank: int, port: int, sizes: dict[str, int], path: str) -> torch.Tensor | None:
    """A sequence in chunks, then token by token; with attention DP the second replica is idle every other time.

    Returns `[forwards, vocab]` logits of the last stage; None on the others.
    """
    runner = make_runner(rank, port, sizes, path)
    parallel, logits = runner.parallel, []
    sequence, ids = (
        Sequence.start(runner),
        random.Random(1).choices(range(VOCAB_SIZE), k=sum(CHUNKS) + NUM_DECODED),
    )
    pieces, start = [], 0
    for length in (*CHUNKS, *[1] * NUM_DECODED):
        pieces.append(ids[start : start + length])
        start += length
    for step, piece in enumerate(pieces):
        is_second = parallel.attn_dp.rank == 1
        if is_second and step % 2:
            batch = ForwardBatch.idle("cpu")
        elif step < len(CHUNKS):
            batch = extend_batch(runner, [(sequence, piece[:-1] if is_second else piece)])
        else:
            batch = decode_batch(runner, [(sequence, piece[0])])
        if parallel.attn_dp.size > 1:
            batch.global_num_tokens = parallel.attn_dp.all_gather_object(batch.num_tokens)
        logits.append(run_stages(runner, parallel, batch))
    parallel.world.barrier(20)
    return torch.cat(logits) if logits[0] is not None else None  # type: ignore[arg-type]


def run_stages(runner: ModelRunner, parallel: ParallelState, batch: ForwardBatch) -> torch.Tensor | None:
    """One forward, its hidden states handed from stage to stage."""
    received = None
    if not parallel.pp.is_first:
        received = torch.empty(batch.num_tokens, runner.model_config.hidden_size)
        parallel.pp.irecv(received, parallel.pp.rank - 1).wait()
    hidden = runner.forward_hidden(batch, received)
    if not parallel.pp.is_last:
        parallel.pp.isend(hidden, parallel.pp.rank + 1).wait()
        return None
    return runner.compute_logits(last_token_rows(hidden, batch))


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> torch.Tensor:
    (logits,) = results_of(run_ranks(1, run_sequences, free_port(), {}, str(checkpoint)))
    return logits


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_logits_of_one_rank(name: str, checkpoint: Path, one_rank: torch.Tensor) -> None:
    results = results_of(run_ranks(2, run_sequences, free_port(), LAYOUTS[name], str(checkpoint)))
    if name == "DP2xEP2":
        results = results[:1]  # the second replica has a sequence of its own
    found = [logits for logits in results if logits is not None]
    assert found
    for logits in found:
        torch.testing.assert_close(logits, one_rank, atol=1e-4, rtol=1e-4)


def start_tuned(rank: int, port: int, sizes: dict[str, int], path: str, cache: str) -> tuple[str, int, int]:
    """Status of the stage, what it profiled, and the fallbacks that it counted."""
    os.environ["SGLANG_CACHE_DIR"] = cache
    runner = make_runner(
        rank,
        port,
        sizes,
        path,
        load_format="dummy",
        disable_flashinfer_autotune=False,
        max_running_requests=4,
        chunked_prefill_size=32,
    )
    report = runner.autotune_report
    runner.parallel.world.barrier(20)
    return report.status, report.profiles_tuned, report.fallbacks


@pytest.mark.parametrize("name", ["TP2", "DP2xEP2"])
def test_a_start_over_ranks_is_tuned_once(name: str, checkpoint: Path, tmp_path: Path) -> None:
    for is_warm in (False, True):
        outcomes = run_ranks(
            2, start_tuned, free_port(), LAYOUTS[name], str(checkpoint), str(tmp_path), timeout_s=150
        )
        for status, profiles, fallbacks in results_of(outcomes):
            assert status == "completed"
            assert (profiles == 0) == is_warm
            assert not fallbacks
