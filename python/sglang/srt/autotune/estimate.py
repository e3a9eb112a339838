"""How long a start's tuning will take: from an earlier start here where there was one, else from a measured rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.autotune.records.document import read_json_object

#: One H200, BF16, Qwen3-30B-A3B geometry, all runners of the portfolio: 21 buckets to 8192 tokens took 36 to 40 s, and
#: with FlashInfer's op alone 21 to 26 (docs/performance.md).
GPU_STEP_S = 1.85
#: One core of a server CPU, the built-in model: its largest steps (2048 tokens) take most of it.
CPU_STEP_S = 0.35
#: The reference MegaMoE kernel, one core, the built-in model.
CPU_CAPACITY_S = 0.3
#: One H200, FP8: workers that compile the 38 candidates of every capacity, and the compilation of each winner.
MEGAMOE_START_S, MEGAMOE_CAPACITY_S, MEGAMOE_WARM_CAPACITY_S = 14.0, 12.0, 2.5
#: Loading records and the check that they cover every step.
WARM_S = 1.0


def estimate(
    *,
    num_steps: int,
    seconds_per_step: float | None,
    num_capacities: int,
    num_untuned_capacities: int,
    device: str,
    gpu: str | None,
    will_run: bool,
) -> dict[str, Any]:
    """``seconds`` and, in words, what the number stands on.

    ``num_steps`` counts the steps that will be tuned, at ``seconds_per_step`` if an earlier start took that here;
    ``num_capacities`` the MegaMoE capacities (0 without MegaMoE), of which some will be tuned.
    """
    if not will_run:
        return {"seconds": 0.0, "basis": "the stage is skipped"}
    seconds, words = WARM_S, []
    if num_steps:
        pace = seconds_per_step or (CPU_STEP_S if device == "cpu" else GPU_STEP_S)
        seconds += pace * num_steps
        words.append(f"{num_steps} steps at {pace:.2g} s, {_source(seconds_per_step, device, gpu)}")
    if num_capacities and device == "cpu":
        seconds += CPU_CAPACITY_S * num_untuned_capacities
        words.append(f"{num_untuned_capacities} MegaMoE capacities of the reference kernel")
        num_capacities = num_untuned_capacities = 0
    if num_untuned_capacities:
        seconds += MEGAMOE_START_S + MEGAMOE_CAPACITY_S * num_untuned_capacities
        words.append(
            f"{num_untuned_capacities} MegaMoE capacities at {MEGAMOE_CAPACITY_S:g} s, as measured on an H200"
        )
    if num_capacities > num_untuned_capacities:
        warm = num_capacities - num_untuned_capacities
        seconds += MEGAMOE_WARM_CAPACITY_S * warm
        words.append(f"{warm} MegaMoE capacities to compile from records")
    basis = "; ".join(words) or "every step is covered by records; they are loaded and checked"
    return {"seconds": round(seconds, 1), "basis": basis}


def _source(seconds_per_step: float | None, device: str, gpu: str | None) -> str:
    if seconds_per_step is not None:
        return "the pace of the last start here"
    if device == "cpu":
        return "as measured with the built-in model; a larger model takes longer"
    if gpu is not None and "H200" in gpu:
        return "as measured with Qwen3-30B-A3B"
    return "as measured on an H200 with Qwen3-30B-A3B; not measured on this GPU"


def measured_pace(directory: Path | None) -> float | None:
    """Seconds per step of the last start whose report lies in ``directory``; None when there is none to read."""
    if directory is None:
        return None
    try:
        steps = read_json_object(directory / "report.json")["steps"]
        seconds = [float(step["seconds"]) for step in steps if step["source"] == "tuned"]
    except (ValueError, KeyError, TypeError):
        return None
    pace = sum(seconds) / len(seconds) if seconds else 0.0
    return pace if 0 < pace < float("inf") else None
