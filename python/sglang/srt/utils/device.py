"""Which device `--device auto` means here."""

from __future__ import annotations

import os
import shutil


def has_nvidia_driver() -> bool:
    """Whether a GPU can be here at all, told without loading torch or CUDA."""
    return os.path.isdir("/proc/driver/nvidia/gpus") or shutil.which("nvidia-smi") is not None


def resolved_device(device: str) -> str:
    """`"cuda"` or `"cpu"` for a `--device` value; imports torch only when the answer depends on the machine.

    Raises `ValueError` when CUDA is asked for and there is no GPU that torch can use.
    """
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise ValueError(
            "--device cuda: torch finds no usable GPU here; use --device cpu or leave --device out"
        )
    return "cpu"
