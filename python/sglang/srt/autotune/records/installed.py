"""FlashInfer's environment stamp as far as it can be told without importing FlashInfer or torch.

The stamp decides where records lie and which seeds apply. Package metadata gives most of it; what depends on
libraries that only a process with CUDA finds is left out, never guessed.
"""

from __future__ import annotations

import re
from importlib import metadata

from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS

_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)
_DSL_PREFIX, _CUBLAS_PREFIX, _CUDNN_PREFIX = "nvidia-cutlass-dsl", "nvidia-cublas", "nvidia-cudnn-cu"


def installed_stamp(gpu: str | None) -> dict[str, str]:
    """The fields of the stamp that are certain here, on a GPU that the driver calls ``gpu`` (None: on a CPU).

    A field that is missing cannot be known here: which cuBLAS and cuDNN are loaded depends on the library path
    too, and a torch without CUDA is not the one that will run on ``gpu``.
    """
    packages = _packages()
    stamp = {
        "flashinfer_version": packages.get("flashinfer-python", "unknown"),
        "cudnn_frontend_version": packages.get("nvidia-cudnn-frontend", "unknown"),
        "gpu": gpu or "unknown",
    }
    if _release(stamp["flashinfer_version"]) < (0, 7, 3):
        stamp["cutlass_dsl_version"] = _dsl_stack(packages)  # later releases put digests of files into it
    cuda = _torch_cuda_version()
    if cuda is not None:
        stamp["cuda_version"] = cuda
    elif gpu is None:
        stamp["cuda_version"] = "unknown"  # as FlashInfer writes it: torch has no CUDA
        if not any(name.startswith((_CUBLAS_PREFIX, _CUDNN_PREFIX)) for name in packages):
            stamp["cublas_version"] = stamp["cudnn_version"] = "unknown"
    return stamp


def unknown_fields(stamp: dict[str, str]) -> list[str]:
    """The stamp's fields that `installed_stamp` could not tell."""
    return [name for name in ENVIRONMENT_FIELDS if name not in stamp]


def _packages() -> dict[str, str]:
    """Installed distributions by lower-case name; the first on the path counts, as in an import."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower(), distribution.version)
    return found


def _release(version: str) -> tuple[int, ...]:
    """``0.7.2.post1`` -> ``(0, 7, 2)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("post")[0].split("+")[0])[:3])


def _dsl_stack(packages: dict[str, str]) -> str:
    """All parts of the CuTe DSL, as FlashInfer joins them."""
    parts = sorted(f"{name}=={version}" for name, version in packages.items() if name.startswith(_DSL_PREFIX))
    return ";".join(parts) or "unknown"


def _torch_cuda_version() -> str | None:
    """The CUDA that the installed torch was built for; None without CUDA or without torch.

    Read from the text of ``torch/version.py``: the version of the package names it only in some builds.
    """
    try:
        text = metadata.distribution("torch").locate_file("torch/version.py").read_text()
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = _CUDA_LINE.search(text)
    return match[1] if match else None
