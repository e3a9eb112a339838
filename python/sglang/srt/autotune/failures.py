"""What a failure is called in a log or a report, and whose it was."""

from __future__ import annotations

import torch


class StepFailed(RuntimeError):
    """A step failed in a forward that other ranks take part in; the start ends, the next leaves it out."""


def describe(error: BaseException) -> str:
    """`error` as one line of at most 300 characters: its class, then the first line of what it says, if anything."""
    first_line = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first_line])[:300]


def is_peer_failure(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone: that says nothing against the step here."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed")
    )
