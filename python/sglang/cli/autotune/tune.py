"""`sglang autotune tune`: the start of a server up to the end of the autotune stage, for image builds and init
containers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from sglang.cli.autotune.arguments import own_parser, split_arguments
from sglang.cli.autotune.tune_rank import run_rank
from sglang.cli.errors import INTERRUPTED, START_ERROR
from sglang.srt.autotune.report import capacities_at_default
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.flags import FlagParser
from sglang.srt.launch_checks import check_launch, warn_of_unknown_ops
from sglang.srt.managers.launch_plan import plan_launch
from sglang.srt.managers.launcher import WorkerGroup
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logs import setup_logging

INCOMPLETE = 3
"""Exit code when records were kept but some step or lookup has none."""

#: How long the other ranks may go on after one has failed: they name what they wait for, within this.
FAILURE_GRACE_S = 5.0


def parser() -> FlagParser:
    """The flags of this sub-command alone: none yet beyond the server's."""
    return own_parser(
        "sglang autotune tune",
        "Tune as a start with these flags would, keep the records, and exit: 0 when every step has a record, "
        "3 when some are left, 1 when tuning failed or nothing could be kept.",
    )


def main(argv: Sequence[str]) -> int:
    """Tune and return the exit code; raises `ValueError` for a wrong flag."""
    setup_logging()
    _, args = split_arguments(parser(), argv)
    if args.disable_flashinfer_autotune:
        raise ValueError("--disable-flashinfer-autotune leaves nothing to do here: leave it out")
    check_launch(args, read_model_config(args))
    setup_logging(args.log_level)
    warn_of_unknown_ops(args, args.moe_runner_backends)
    try:
        # Graphs do not change what is tuned, and nobody will replay them.
        reports = run_ranks(dataclasses.replace(args, disable_cuda_graph=True))
    except KeyboardInterrupt:
        print("\nsglang autotune tune: interrupted; what was tuned is kept", file=sys.stderr, flush=True)
        return INTERRUPTED
    code, words = outcome(reports)
    print(f"sglang autotune tune: {words}", file=sys.stderr if code else sys.stdout, flush=True)
    return code


def run_ranks(args: ServerArgs) -> dict[int, dict[str, Any]]:
    """Run the ranks of this launch; each one's report, or `{"error": words}`."""
    plan = plan_launch(args)
    pipes = {rank: multiprocessing.Pipe(duplex=False) for rank in plan.ranks}
    workers, reports = WorkerGroup(), {}
    try:
        workers.start(args, {rank: sender for rank, (_, sender) in pipes.items()}, run_rank, plan)
        for _, sender in pipes.values():
            sender.close()
        waiting = {receiver: rank for rank, (receiver, _) in pipes.items()}
        timeout_s: float | None = None
        while waiting:
            ready = wait(list(waiting), timeout_s)
            for receiver in ready:
                assert isinstance(receiver, Connection)
                rank = waiting.pop(receiver)
                reports[rank] = _received(receiver, workers, rank)
                if "error" in reports[rank]:
                    timeout_s = FAILURE_GRACE_S
            if not ready:
                break
        for rank in waiting.values():
            reports[rank] = {"error": "stopped, since another rank had failed"}
    except KeyboardInterrupt:
        # The rest takes a moment; a second one has nothing to add.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
    finally:
        workers.stop(FAILURE_GRACE_S)
    return reports


def _received(receiver: Connection, workers: WorkerGroup, rank: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = receiver.recv()
    except EOFError:  # the process ended without a word
        process = workers.processes[rank]
        process.join()
        return {"error": f"the process ended with exit code {process.exitcode}"}
    return answer


def outcome(reports: dict[int, dict[str, Any]]) -> tuple[int, str]:
    """The exit code and one line of words for the reports of this machine's ranks."""
    failed = {rank: report["error"] for rank, report in reports.items() if "error" in report}
    if failed:
        rank = min(failed, key=lambda r: (failed[r].startswith("stopped"), r))
        where = f"rank {rank}: " if len(reports) > 1 else ""
        return START_ERROR, f"failed: {where}{' '.join(failed[rank].split())}"
    report = reports[min(reports)]
    if report["status"] == "failed":
        return START_ERROR, f"failed: {report['reason']}"
    if report["status"] == "skipped":
        return INCOMPLETE, f"nothing was tuned: {report['reason']}"
    unkept = [rank for rank, answer in reports.items() if answer["cache_path"] is None]
    if unkept:
        why = next(iter(reports[unkept[0]]["warnings"]), "the records could not be written")
        return START_ERROR, f"failed: {why}; set SGLANG_CACHE_DIR to a writable directory"
    steps = report["steps"]
    missing = [f"{s['phase']} {s['num_tokens']}" for s in steps if s["source"] in ("left out", "over budget")]
    fallbacks = sum(rank["fallbacks"] for rank in report["ranks"])
    defaults = capacities_at_default(report.get("megamoe"))
    if missing or fallbacks or defaults:
        parts = [f"{len(missing)} of {len(steps)} steps left out ({', '.join(missing)})"] * bool(missing)
        parts += [f"{fallbacks} lookups still fall back to the default"] * bool(fallbacks)
        capacities = " ".join(map(str, defaults))
        parts += [f"MegaMoE runs the kernel's default at capacities {capacities}"] * bool(defaults)
        return INCOMPLETE, f"incomplete: {'; '.join(parts)}; records at {report['cache_path']}"
    return 0, f"done in {report['seconds']:.1f} s: {report['reason']}; records at {report['cache_path']}"
