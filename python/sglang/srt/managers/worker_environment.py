"""What a worker's environment holds before it imports anything that reads it.

Torch-free: tqdm, which torch imports, reads its switch when it is imported, and FlashInfer's modules read
theirs in the same way.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import MutableMapping
from pathlib import Path

from sglang.srt.autotune.records.trust import distrust, doubt
from sglang.srt.environ import envs


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep libraries' bars and chatter off the console, and FlashInfer's norm off its in-process compiler.

    What the user has set stays.
    """
    environ.setdefault("TQDM_DISABLE", "1")
    environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    if _has_prebuilt_norm():
        # With its Python compiler installed FlashInfer compiles its norms at start, for each width of the model.
        environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    if "TRITON_CACHE_DIR" not in environ and (place := _kernel_cache()):
        environ["TRITON_CACHE_DIR"] = place


def _kernel_cache() -> str | None:
    """Where Triton keeps what it compiles: beside the records, so that a volume with these has their kernels too.

    None where it cannot be written, or another user could have put files that would be run: Triton's own place serves.
    """
    root = Path(envs.SGLANG_CACHE_DIR.get())
    path = root / "triton"
    if doubt(root) or doubt(path) or distrust(root, path):
        return None
    try:  # nothing but trying tells of names too long and of odd file systems
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(path) if os.access(path, os.W_OK | os.X_OK) else None


def keep_bars_in_this_process() -> None:
    """Give tqdm a lock of threads. Its own is a semaphore between processes, which a worker that ends leaves behind.

    Call it after `prepare_environment`, since it imports tqdm.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def share_cores(num_ranks: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this worker its share of the cores that this machine's `num_ranks` ranks run on."""
    # More threads than cores are slower by far: ranks wait for each other in every layer.
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_prebuilt_norm() -> bool:
    """Whether FlashInfer's norm module lies compiled beside FlashInfer or in its flashinfer-jit-cache wheel."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "data" / "aot" / "norm" / "norm.so").is_file()
