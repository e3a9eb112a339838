"""The end of the stage: each rank tells what it did, rank 0 tells the operator."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang.srt.autotune.agreement import Agreement
from sglang.srt.autotune.identity import Topology
from sglang.srt.autotune.progress import print_table
from sglang.srt.autotune.report import StageReport

logger = logging.getLogger(__name__)


def close(report: StageReport, topology: Topology, agreement: Agreement, report_path: Path | None) -> None:
    """Gather what each rank did into ``report``; on rank 0 log the end and save the document."""
    mine = {
        "rank": topology.rank,
        "tp_rank": topology.tp_rank,
        "pp_rank": topology.pp_rank,
        "dp_rank": topology.dp_rank,
        "status": report.status,
        "seconds": round(report.seconds, 3),
        "profiles_tuned": report.profiles_tuned,
        "fallbacks": report.fallbacks,
        "disagreements": len(report.disagreements),
        "cache_path": report.cache_path,
    }
    report.ranks = list(agreement.gather("report", mine).values())
    if topology.rank != 0:
        return
    if report.status == "completed":
        _log_completed(report)
    report.save(report_path)


def _log_completed(report: StageReport) -> None:
    if report.profiles_tuned and report.steps:
        print_table(report)
    if report.fallbacks:
        first = report.fallback_details[0]
        logger.warning(
            "FlashInfer autotune: %d lookups still fall back to the default, the first at step %s: %s %s",
            report.fallbacks,
            first.step,
            first.op,
            first.shapes,
        )
    for op in report.skipped_ops["never_asked"]:
        logger.warning(
            "FlashInfer autotune: no forward asked for the skipped op %s: is it spelled right?", op
        )
    logger.info(
        "FlashInfer autotune completed in %.2f s: %s, %d fallbacks, records %s",
        report.seconds,
        report.reason,
        report.fallbacks,
        "in memory only" if report.cache_path is None else f"at {report.cache_path}",
    )
