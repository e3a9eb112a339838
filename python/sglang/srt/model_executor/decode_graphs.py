"""Decode forwards recorded once per batch size and replayed, which spares the host hundreds of launches a token.

A batch is padded to the next captured size with sequences of one token that live in the padding row and slot. Under
attention DP all ranks replay the size that holds the largest of their batches, or none of them does; an idle rank's
batch is padding alone.

All inputs stand in buffers that never move; before each replay they are filled and the attention is planned.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.mem_cache.memory_pool import PADDING_ROW, PADDING_SLOT
from sglang.srt.model_executor.forward_batch import ForwardBatch, ForwardMode
from sglang.srt.utils.transfer import PlanFence

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 2
"""Forwards before a capture: the first ones allocate workspaces, which a capture must not."""

DecodeForward = Callable[[ForwardBatch, torch.Tensor], None]
"""Runs the model on a batch and writes the logits to a `[B, vocab_size]` float32 tensor."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches and gives a function that launches it again."""

Progressing = Callable[[dict[str, Any]], None]


def covering_size(sizes: Sequence[int], batch_size: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `batch_size` sequences; None when none does."""
    index = bisect_left(sizes, batch_size)
    return sizes[index] if index < len(sizes) else None


class StaticDecodeBatch:
    """The inputs of all graphs: one row for each of five int64 columns of a decode batch, `[5, largest]`."""

    def __init__(self, largest: int, device: torch.device) -> None:
        padding = torch.tensor([0, 0, PADDING_ROW, 1, PADDING_SLOT], dtype=torch.int64, device=device)
        self._padding = padding[:, None].expand(5, largest).contiguous()
        self._columns = self._padding.clone()

    def view(self, size: int, seq_lens_cpu: list[int]) -> ForwardBatch:
        """The first `size` sequences as a batch over the buffers."""
        input_ids, positions, rows, seq_lens, slots = (column[:size] for column in self._columns)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            seq_lens_cpu=seq_lens_cpu,
        )

    def fill(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """Copy `batch` into the buffers and pad it to `size` sequences; returns the padded batch."""
        num_seqs = batch.batch_size
        if num_seqs:
            assert batch.columns is not None, "a decode batch has its inputs in one tensor"
            self._columns[:, :num_seqs].copy_(batch.columns)
        if num_seqs < size:
            self._columns[:, num_seqs:size].copy_(self._padding[:, num_seqs:size])
        return self.view(size, [*batch.seq_lens_cpu, *([1] * (size - num_seqs))])


class CudaGraphCapture:
    """Captures into CUDA graphs that share one memory pool: only one of them runs at a time.

    Capture the largest first, so that the others find room in what it left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        torch.cuda.synchronize(self._device)
        return graph.replay


class DecodeGraphs:
    """The captured decode forwards of one rank."""

    def __init__(
        self,
        sizes: Sequence[int],
        attention: AttentionBackend,
        forward: DecodeForward,
        vocab_size: int,
        device: torch.device,
        capture: Capture,
        fence: PlanFence,
        *,
        num_replicas: int = 1,
        visible: bool = False,
        progress: Progressing | None = None,
    ) -> None:
        """Capture `forward` at each of `sizes`, with `attention` as the batches' attention backend, planned within
        `fence`. The `num_replicas` ranks of an attention-DP group capture together.

        `visible` shows a bar on a terminal; `progress` hears `{"done", "total"}` after each size.
        """
        self.sizes = tuple(sorted(sizes))
        self._attention, self._fence, self._num_replicas = attention, fence, num_replicas
        self._inputs = StaticDecodeBatch(self.sizes[-1], device)
        self._logits = torch.empty(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self.replays: dict[int, Callable[[], None]] = {}
        """What launches the captured forward of each size."""
        with _frozen_garbage():
            for size in _shown(list(reversed(self.sizes)), visible, progress):
                self.replays[size] = self._captured(size, forward, capture)

    def _captured(self, size: int, forward: DecodeForward, capture: Capture) -> Callable[[], None]:
        batch, logits = self._inputs.view(size, [1] * size), self._logits[:size]
        batch.attn_backend = self._attention
        if self._num_replicas > 1:
            batch.global_num_tokens = [size] * self._num_replicas
        self._attention.init_forward_metadata(batch)
        return capture(lambda: forward(batch, logits))

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is a decode or idle batch that fits a captured size, and the buffers of its attention."""
        return (
            batch.mode is not ForwardMode.EXTEND
            and batch.batch_size <= self.sizes[-1]
            and self._attention.can_plan(batch)
        )

    def covers(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is to be replayed; under attention DP all ranks give the same answer."""
        if batch.global_num_tokens is not None:
            return batch.all_may_replay
        return batch.mode is ForwardMode.DECODE and self.fits(batch)

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """`[B, vocab_size]` float32 logits of a covered batch, in a buffer that the next replay overwrites."""
        size = covering_size(self.sizes, max(batch.global_num_tokens or [batch.batch_size]))
        assert size is not None, "ask covers() first"
        padded = self._inputs.fill(batch, size)
        with self._fence.planning():
            self._attention.init_forward_metadata(padded)
        self.replays[size]()
        return self._logits[: batch.batch_size]


def check_capturable(runner: ModelRunner) -> None:
    """Raise `ValueError` with the remedy when graphs are wanted and a chosen backend cannot be captured."""
    args = runner.server_args
    if runner.device.type != "cuda" or args.disable_cuda_graph:
        return
    for flag, name, blocker in (
        ("--moe-runner-backend", runner.moe_runner.name, "reference"),
        ("--attention-backend", args.attention_backend_on("cuda"), "torch_native"),
    ):
        if name == blocker:
            raise ValueError(f"{flag} {name} cannot be captured in a CUDA graph: add --disable-cuda-graph")


def capture_decode_graphs(runner: ModelRunner, progress: Progressing | None = None) -> DecodeGraphs | None:
    """Capture the decode sizes of `runner`; None on the CPU and where graphs are off."""
    args, parallel = runner.server_args, runner.parallel
    if runner.device.type != "cuda":
        return None
    if args.disable_cuda_graph:
        logger.info("Decode runs eagerly (--disable-cuda-graph)")
        return None
    if parallel.pp.size > 1:
        logger.warning("Decode runs eagerly: graphs are not captured with pipeline stages")
        return None
    attention = runner.attn_backend.for_graphs(runner.limits.decode_batch_sizes)
    assert attention is not None, "check_capturable lets no other backend through"
    began, free_before = time.monotonic(), torch.cuda.mem_get_info(runner.device)[0]
    graphs = DecodeGraphs(
        runner.limits.decode_batch_sizes,
        attention,
        runner.forward_into,
        runner.model_config.vocab_size,
        runner.device,
        CudaGraphCapture(runner.device),
        runner.plan_fence,
        num_replicas=parallel.attn_dp.size,
        visible=parallel.world.is_first,
        progress=progress,
    )
    used = free_before - torch.cuda.mem_get_info(runner.device)[0]
    logger.info(
        "Decode graphs: %d sizes up to %d captured in %.1f s, %.2f GiB",
        len(graphs.sizes),
        graphs.sizes[-1],
        time.monotonic() - began,
        used / 2**30,
    )
    return graphs


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Every capture collects garbage; over all objects of the imports that takes longer than the capture."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _shown(sizes: list[int], visible: bool, progress: Progressing | None) -> Iterator[int]:
    """Yield `sizes`, telling how far the loop over them is."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("Decode graphs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("batch {task.fields[size]}"),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal))
    with bar:
        task = bar.add_task("sizes", total=len(sizes), size=sizes[0])
        for done, size in enumerate(sizes):
            bar.update(task, completed=done, size=size)
            if progress is not None:
                progress({"done": done, "total": len(sizes)})
            yield size
    if progress is not None:
        progress({"done": len(sizes), "total": len(sizes)})
