"""Which MoE runners exist and which one ``auto`` means."""

from __future__ import annotations

from sglang.srt.layers.moe.base import MoERunner, MoEShape


def create_moe_runner(backend: str, shape: MoEShape, *, deterministic: bool = False) -> MoERunner:
    """Build the runner that ``--moe-runner-backend`` names (already resolved from ``auto``).

    Raises:
        ValueError: no such backend, or it cannot run here.
    """
    if backend == "reference":
        from sglang.srt.layers.moe.reference import ReferenceMoERunner

        return ReferenceMoERunner(shape)
    raise ValueError(f"--moe-runner-backend {backend}: no such MoE runner; this build has: reference")
