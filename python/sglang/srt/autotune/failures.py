"""What a failed step is called, and whose failure it was."""

from __future__ import annotations

import torch


class StepFailed(RuntimeError):
    """A step failed in a forward that other ranks take part in; the start ends, the next leaves it out."""


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def is_peer_failure(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone: that says nothing against the step here."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed")
    )
