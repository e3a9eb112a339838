"""GPU models by the names that people use, for plans that are made on a machine without one.

Only what a plan needs: the compute capability (which decides whether tuning runs and in which directory the
records lie), the name that the driver reports (seeds and records name it), and the memory. Public data sheets.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DRIVER_FILES = "/proc/driver/nvidia/gpus"


@dataclass(frozen=True)
class GpuModel:
    """``pattern`` matches the driver's name of every variant; ``device_name`` is the name of the usual one."""

    name: str
    device_name: str
    pattern: str
    capability: tuple[int, int]
    memory_gib: int

    @property
    def sm(self) -> str:
        return f"sm{self.capability[0]}{self.capability[1]}"


_GPUS = (
    GpuModel("A100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100*", (8, 0), 80),
    GpuModel("A10", "NVIDIA A10", "NVIDIA A10", (8, 6), 24),
    GpuModel("L4", "NVIDIA L4", "NVIDIA L4", (8, 9), 24),
    GpuModel("L40S", "NVIDIA L40S", "NVIDIA L40S", (8, 9), 48),
    GpuModel("RTX 4090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090*", (8, 9), 24),
    GpuModel("H100", "NVIDIA H100 80GB HBM3", "NVIDIA H100*", (9, 0), 80),
    GpuModel("H200", "NVIDIA H200", "NVIDIA H200*", (9, 0), 141),
    GpuModel("H20", "NVIDIA H20", "NVIDIA H20*", (9, 0), 96),
    GpuModel("H800", "NVIDIA H800", "NVIDIA H800*", (9, 0), 80),
    GpuModel("GH200", "NVIDIA GH200 480GB", "NVIDIA GH200*", (9, 0), 96),
    GpuModel("B200", "NVIDIA B200", "NVIDIA B200*", (10, 0), 180),
    GpuModel("GB200", "NVIDIA GB200", "NVIDIA GB200*", (10, 0), 186),
    GpuModel("B300", "NVIDIA B300 SXM6 AC", "NVIDIA B300*", (10, 3), 268),
    GpuModel("GB300", "NVIDIA GB300", "NVIDIA GB300*", (10, 3), 278),
    GpuModel(
        "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell*",
        (12, 0),
        96,
    ),
    GpuModel("RTX 5090", "NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090*", (12, 0), 32),
    GpuModel("GB10", "NVIDIA GB10", "NVIDIA GB10*", (12, 1), 128),
)


def gpu_names() -> list[str]:
    return [gpu.name for gpu in _GPUS]


def gpu_named(name: str) -> GpuModel:
    """The model that ``name`` means: a short name in any case and spacing, or the driver's own name.

    Raises:
        ValueError: none is known by that name; it names ``--gpu`` and the nearest.
    """
    for gpu in _GPUS:
        if _squeezed(name) == _squeezed(gpu.name):
            return gpu
    named = _by_device_name(name)
    if named is not None:
        return named
    near = difflib.get_close_matches(name.upper(), gpu_names(), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--gpu {name}: no such GPU model is known here{hint} (known: {', '.join(gpu_names())})")


def gpu_here() -> GpuModel | None:
    """The first GPU that the driver shows, found without CUDA; None when it shows none.

    Raises:
        ValueError: its model is not known here; it names ``--gpu``.
    """
    name = _driver_name()
    if name is None:
        return None
    gpu = _by_device_name(name)
    if gpu is None:
        raise ValueError(
            f"the GPU of this machine, {name}, is not known here: name the nearest model with --gpu"
        )
    return gpu


def _driver_name() -> str | None:
    for information in sorted(Path(_DRIVER_FILES).glob("*/information")):
        for line in information.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model" and value.strip():
                return value.strip()
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    # Some containers hide the driver's files.
    query = [tool, "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _by_device_name(device_name: str) -> GpuModel | None:
    """The longest pattern that fits, so that an H200 is not taken for an H20."""
    fitting = [gpu for gpu in _GPUS if fnmatch.fnmatchcase(device_name, gpu.pattern)]
    if not fitting:
        return None
    best = max(fitting, key=lambda gpu: len(gpu.pattern))
    return GpuModel(best.name, device_name, device_name, best.capability, best.memory_gib)


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper().removeprefix("NVIDIA").removeprefix("GEFORCE")
