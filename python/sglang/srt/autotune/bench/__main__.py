"""`python -m sglang.srt.autotune.bench --out DIR`: run the pieces that DIR lacks, and print all tables."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.srt.autotune.bench.geometry import GEOMETRIES, WIDE_SHARE, write_config
from sglang.srt.autotune.bench.results import ResultFolder
from sglang.srt.autotune.bench.tables import TABLES, document_tables
from sglang.srt.managers.worker_environment import prepare_environment
from sglang.srt.utils.logs import setup_logging

PROG = "python -m sglang.srt.autotune.bench"
MODULE = "sglang.srt.autotune.bench"
MIN_CAPABILITY = (9, 0)
STOP_WITHIN_S = 60.0
POLL_S = 0.5

MAX_NUM_TOKENS = 8192
BATCH_SIZES = [1, 8, 64, 256]
#: Those of the first published comparison of a tuned start with an untuned one, which was on gpt-oss.
CONCURRENCIES = {"gpt-oss-20b": [64, 256, 512]}
EDGES = [1, 8, 64, 1023, 1024, 1025, 2001]

logger = logging.getLogger("bench")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=PROG,
        description="Measure on one GPU what startup tuning is worth. Each piece is a process of its own and takes one "
        "to five minutes; its JSON file in DIR marks it as done.",
    )
    result.add_argument("--out", type=Path, required=True, metavar="DIR", help="Where the results are kept.")
    result.add_argument(
        "--pieces",
        nargs="+",
        choices=list(TABLES),
        default=list(TABLES),
        metavar="PIECE",
        help=f"Which to run, in this order: {' '.join(TABLES)}. Default: all.",
    )
    result.add_argument("--again", action="store_true", help="Run pieces that are done already, too.")
    result.add_argument("--show", action="store_true", help="Print the tables of DIR and run nothing.")
    result.add_argument(
        "--geometry",
        choices=list(GEOMETRIES),
        default=next(iter(GEOMETRIES)),
        help="The model of every piece but moe-wide. Default: %(default)s.",
    )
    result.add_argument(
        "--layers", type=int, help="Layers of the engine's model. Default: those of the geometry."
    )
    result.add_argument(
        "--requests-per-client",
        type=int,
        default=2,
        help="Requests of the serving piece for each concurrent client. Default: 2.",
    )
    result.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when all asked pieces are done, 1 when a piece or the machine failed, 128 + n after signal n."""
    args = parser().parse_args(argv)
    setup_logging()
    folder = ResultFolder(results_of(args))
    if not args.show:
        problem = missing_gpu()
        if problem:
            print(f"{PROG}: error: {problem}", file=sys.stderr)
            return 1
        if args.in_process:
            for piece in args.pieces:
                run_piece(piece, args, folder)
            return 0
        failed = run_pieces(args, folder)
    else:
        failed = []
    for piece in TABLES:
        document = folder.read(piece)
        if document is not None:
            print(document_tables(document), flush=True)
    return 1 if failed else 0


def results_of(args: argparse.Namespace) -> Path:
    """DIR for the default geometry, a folder in it for another: a piece that is done for one is not for the other."""
    return args.out if args.geometry == next(iter(GEOMETRIES)) else args.out / args.geometry


def missing_gpu() -> str | None:
    """Why nothing can be measured here; None when it can."""
    import torch

    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none here"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        have = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"it needs compute capability 9.0 or later, and this GPU has {have}"
    return None


def run_pieces(args: argparse.Namespace, folder: ResultFolder) -> list[str]:
    """Each piece in a process of its own, so that a fault of one costs no other; gives those that failed."""
    failed = []
    for piece in args.pieces:
        if not args.again and folder.read(piece) is not None:
            logger.info("%s is done already (--again repeats it)", piece)
            continue
        command = [sys.executable, "-m", MODULE, "--in-process", "--out", str(args.out), "--pieces", piece]
        command += ["--geometry", args.geometry, "--requests-per-client", str(args.requests_per_client)]
        if args.layers is not None:
            command += ["--layers", str(args.layers)]
        environment = dict(os.environ)
        prepare_environment(environment)
        code = _run_child(command, environment)
        if code:
            logger.error("piece %s ended with %d", piece, code)
            failed.append(piece)
    return failed


def _run_child(command: list[str], environment: dict[str, str]) -> int:
    """Wait for a child; a SIGTERM or SIGINT to us ends it first, and then us."""
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        # Acted upon below: a handler that waits for the child would wait for the lock of the wait that it broke into.
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while not signals:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_S)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_WITHIN_S)
        raise SystemExit(128 + signals[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def run_piece(piece: str, args: argparse.Namespace, folder: ResultFolder) -> None:
    """Measure in this process and write the result. A SIGTERM unwinds what runs and writes nothing."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    logger.info("piece %s", piece)
    began = time.monotonic()
    result = PIECES[piece](args)
    path = folder.write(piece, result, time.monotonic() - began)
    logger.info("piece %s took %.0f s: %s", piece, time.monotonic() - began, path)


def _device() -> Any:
    import torch

    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _model(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen geometry, cut to the layers that were asked for."""
    config = GEOMETRIES[args.geometry]
    return config if args.layers is None else {**config, "num_hidden_layers": args.layers}


def _bounds(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.bounds import measure_bounds

    return {"bounds": measure_bounds(_device()).to_json()}


def _moe(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.moe import measure_moe

    return measure_moe(_model(args), MAX_NUM_TOKENS, _device())


def _moe_wide(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.moe import measure_moe

    return measure_moe(WIDE_SHARE, MAX_NUM_TOKENS, _device())


def _dense(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.dense import measure_dense

    return measure_dense(_model(args), BATCH_SIZES, _device())


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    from sglang.srt.autotune.bench.engine import EngineLoad, measure_engine
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as scratch:
        model = write_config(Path(scratch, "model"), _model(args))
        server_args = ServerArgs(
            model_path=str(model),
            load_format="dummy",
            device="cuda",
            moe_runner_backend="flashinfer_cutlass",
            max_running_requests=max(BATCH_SIZES),
            chunked_prefill_size=MAX_NUM_TOKENS,
            cuda_graph_bs_decode=BATCH_SIZES,
        )
        result = measure_engine(server_args, EngineLoad(decode_batch_sizes=BATCH_SIZES), Path(scratch))
    return {**result, "layers": _model(args)["num_hidden_layers"]}


def _serving(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.serving import measure_serving

    concurrencies = CONCURRENCIES.get(args.geometry, [1, 16, 64, 256])
    return measure_serving(
        _model(args),
        concurrencies,
        flags=["--max-running-requests", str(max(concurrencies))],
        requests_per_client=args.requests_per_client,
        log_folder=results_of(args),
    )


def _overlap(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.overlap import measure_overlap
    from sglang.srt.autotune.bench.serving import Traffic

    sizes = CONCURRENCIES.get(args.geometry, [1, 16, 64, 256])
    return measure_overlap(
        _model(args),
        sizes,
        Traffic(args.requests_per_client),
        flags=["--max-running-requests", str(max(sizes))],
        log_folder=results_of(args),
    )


def _outputs(args: argparse.Namespace) -> dict[str, Any]:
    from sglang.srt.autotune.bench.outputs import measure_outputs

    config = _model(args)
    return measure_outputs(
        config,
        MAX_NUM_TOKENS,
        EDGES,
        [1023, 1024, 1025],
        _device(),
        "flashinfer_cutlass",
        {
            "moe_runner_backend": "flashinfer_cutlass",
            "max_running_requests": 16,
            "chunked_prefill_size": MAX_NUM_TOKENS,
            "max_total_tokens": 16384,
        },
        num_layers=min(4, config["num_hidden_layers"]),
    )


PIECES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "bounds": _bounds,
    "moe": _moe,
    "moe-wide": _moe_wide,
    "engine": _engine,
    "serving": _serving,
    "overlap": _overlap,
    "outputs": _outputs,
    "dense": _dense,
}

if __name__ == "__main__":
    sys.exit(main())
