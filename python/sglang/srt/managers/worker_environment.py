"""What a worker's environment holds before it imports anything that reads it.

Torch-free: tqdm, which torch imports, reads its switch when it is imported, and FlashInfer's modules read
theirs in the same way.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep libraries' bars and chatter off the console, and FlashInfer's norm off its in-process compiler.

    What the user has set stays.
    """
    environ.setdefault("TQDM_DISABLE", "1")
    environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    if _has_prebuilt_norm():
        # With its Python compiler installed FlashInfer compiles its norms at start, for each width of the model.
        environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")


def _has_prebuilt_norm() -> bool:
    """Whether FlashInfer's norm module lies compiled beside FlashInfer or in its flashinfer-jit-cache wheel."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "data" / "aot" / "norm" / "norm.so").is_file()
