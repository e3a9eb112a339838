"""Whether the stage runs, and why not when it does not.

The order of the rules is the order in which an operator would look: an explicit switch, a mode that
forbids tuning, the hardware, the kernels. Pure: the plan command prints it without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Decision:
    """``run`` or the reason for skipping, in words that name the flag."""

    run: bool
    reason: str


def decide(
    *,
    disabled: bool,
    deterministic: bool,
    device: str,
    capability: tuple[int, int] | None,
    tunable_ops: tuple[str, ...],
    skip_ops: tuple[str, ...],
    moe_backend: str,
) -> Decision:
    """Decide for one rank.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        capability: compute capability of the GPU; None on CPU.
        tunable_ops: names under which the selected backends ask the AutoTuner.
    """
    if disabled:
        return Decision(False, "--disable-flashinfer-autotune was given")
    if deterministic:
        return Decision(
            False,
            "--enable-deterministic-inference was given: a fresh measurement may choose differently at each start",
        )
    if device == "cuda" and capability is not None and capability < MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        return Decision(False, f"compute capability {have} is below 9.0, the first that FlashInfer tunes for")
    if not tunable_ops:
        return Decision(
            False, f"the selected backends have no tunable kernel (--moe-runner-backend {moe_backend})"
        )
    if set(tunable_ops) <= set(skip_ops):
        return Decision(
            False, f"--flashinfer-autotune-skip-ops names every tunable op: {', '.join(tunable_ops)}"
        )
    return Decision(True, "tuning is on by default")
