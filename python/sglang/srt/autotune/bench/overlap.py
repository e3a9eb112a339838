"""Piece `overlap`: what a decode step takes on the device, how long the device waits between two, and what is served.

Throughput is that of two servers under load, one that schedules while a forward runs and one that does not. The gap is
measured in this process with the server's own scheduler, between events around the graphs' replays: it holds all that a
step is beside the captured forward, on the device (sampling, inputs, plans) and on the host.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang.srt.autotune.bench.bounds import measure_bounds
from sglang.srt.autotune.bench.drive import build_runner
from sglang.srt.autotune.bench.engine import EngineLoad, Forwards
from sglang.srt.autotune.bench.geometry import write_config, write_tokenizer
from sglang.srt.autotune.bench.serving import Traffic, measure_arm
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BatchTokenOutput,
    FlushCache,
    MainMessage,
    Shutdown,
    TokenizedRequest,
    WorkerMessage,
)
from sglang.srt.managers.worker import create_scheduler
from sglang.srt.model_executor.decode_graphs import covering_size
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, prepare_server_args

ARMS: dict[str, list[str]] = {"overlap": [], "in turn": ["--disable-overlap-schedule"]}
NUM_STEPS = 48
"""Decode steps that are timed at each batch size."""
NUM_SKIPPED = 8
"""Steps before those, while the last prompts come in."""


def measure_overlap(
    config: dict[str, Any],
    batch_sizes: Sequence[int],
    traffic: Traffic,
    flags: Sequence[str] = (),
    log_folder: Path | None = None,
) -> dict[str, Any]:
    """Serve with both arms at concurrencies `batch_sizes`, then time decode steps of these sizes in this process.

    All starts share their records, so that only the first one tunes.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as folder:
        model = write_config(Path(folder, "model"), config)
        write_tokenizer(model, config["vocab_size"])
        cache = str(Path(folder, "cache"))
        command = ["--model-path", str(model), "--load-format", "dummy", *flags]
        command += ["--context-length", str(max(1024, traffic.input_len + traffic.output_len))]
        arms = {}
        for arm, arm_flags in ARMS.items():
            log_path = (log_folder or Path(folder)) / f"server-{arm.replace(' ', '-')}.log"
            environment = {"SGLANG_CACHE_DIR": cache}
            arms[arm] = measure_arm(
                arm, [*command, *arm_flags], batch_sizes, traffic, config["vocab_size"], log_path, environment
            )
        with envs.SGLANG_CACHE_DIR.override(cache):
            steps = measure_steps(prepare_server_args(command), batch_sizes, traffic.input_len)
    return {**traffic.to_json(), "arms": arms, **steps}


def measure_steps(args: ServerArgs, batch_sizes: Sequence[int], input_len: int) -> dict[str, Any]:
    """Decode steps of `batch_sizes` sequences after prompts of `input_len` tokens, by both arms, beside their bound."""
    runner = build_runner(args)
    bounds = measure_bounds(runner.device)
    seq_len = input_len + NUM_SKIPPED + NUM_STEPS // 2
    forwards = Forwards(runner, EngineLoad(batch_sizes, (), seq_len))
    bound_ms = {row["tokens"]: row["bound_ms"] for row in forwards.bound_rows(bounds)}
    forwards.release()
    rows = []
    for arm in ARMS:
        runner.server_args = replace(args, disable_overlap_schedule=arm != "overlap")
        for batch_size in batch_sizes:
            times = step_times(runner, batch_size, input_len)
            rows.append({"arm": arm, "batch_size": batch_size, "bound_ms": bound_ms[batch_size], **times})
    return {"bounds": bounds.to_json(), "seq_len": seq_len, "steps": rows}


def step_times(runner: ModelRunner, batch_size: int, input_len: int) -> dict[str, float]:
    """Medians over decode steps of `batch_size` sequences, in ms: from one to the next, the forward itself, and the
    gap between two of them.
    """
    client = Client(runner.model_config.vocab_size, batch_size, input_len, NUM_SKIPPED + NUM_STEPS)
    with timed_replays(runner, batch_size) as marks:
        create_scheduler(runner, client).run()  # type: ignore[arg-type]
    times = marks.ms()[NUM_SKIPPED:]
    if len(times) < NUM_STEPS // 2:
        raise RuntimeError(f"only {len(times)} decode steps of {batch_size} sequences were seen")
    periods = [later.start - earlier.start for earlier, later in zip(times, times[1:], strict=False)]
    gaps = [later.start - earlier.end for earlier, later in zip(times, times[1:], strict=False)]
    return {
        "step_ms": statistics.median(periods),
        "forward_ms": statistics.median(time.end - time.start for time in times),
        "gap_ms": statistics.median(gaps),
        "gap_share": statistics.median(gaps) / statistics.median(periods),
    }


@dataclass
class Client:
    """Stands where the main process would: sends its requests at once and leaves when all have been answered."""

    vocab_size: int
    num_requests: int
    input_len: int
    output_len: int
    num_left: int = field(init=False)
    is_started: bool = False

    def __post_init__(self) -> None:
        self.num_left = self.num_requests

    def receive(self, may_wait: bool) -> list[MainMessage]:
        if not self.is_started:
            self.is_started = True
            return [self._request(number) for number in range(self.num_requests)]
        return [FlushCache(0), Shutdown()] if self.num_left == 0 and may_wait else []

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, BatchTokenOutput):
            self.num_left -= sum(output.finish_reason is not None for output in message.outputs)

    def _request(self, number: int) -> TokenizedRequest:
        rng = random.Random(number)
        ids = [rng.randrange(self.vocab_size) for _ in range(self.input_len)]
        sampling = SamplingParams(max_new_tokens=self.output_len, temperature=0.0, ignore_eos=True)
        return TokenizedRequest(f"{number}", ids, sampling, incremental=True)


@dataclass(frozen=True)
class Interval:
    """Milliseconds after some moment."""

    start: float
    end: float


class Marks:
    """When each replay began and ended on the device; by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def around(self, replay: Callable[[], None]) -> Callable[[], None]:
        def marked() -> None:
            start = self._mark()
            replay()
            self._marks.append((start, self._mark()))

        return marked

    def _mark(self) -> Any:
        if not self._is_cuda:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self) -> list[Interval]:
        """All replays, counted from some moment."""
        if not self._is_cuda or not self._marks:
            return [Interval(start, end) for start, end in self._marks]
        torch.cuda.synchronize()
        first = self._marks[0][0]
        return [Interval(first.elapsed_time(start), first.elapsed_time(end)) for start, end in self._marks]


@contextmanager
def timed_replays(runner: ModelRunner, batch_size: int) -> Iterator[Marks]:
    """Mark every replay of the graph that takes `batch_size` sequences inside the block."""
    graphs = runner.decode_graphs
    assert graphs is not None, "a decode step is measured through its graph"
    size = covering_size(graphs.sizes, batch_size)
    assert size is not None, f"no graph takes {batch_size} sequences"
    marks, replay = Marks(runner.device), graphs.replays[size]
    graphs.replays[size] = marks.around(replay)
    try:
        yield marks
    finally:
        graphs.replays[size] = replay
