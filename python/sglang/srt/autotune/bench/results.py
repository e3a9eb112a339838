"""One JSON file per piece, with everything that is needed to tell where its numbers come from."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang.srt.autotune.records.files import replace_file

SCHEMA = 1
_PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)


@dataclass(frozen=True)
class ResultFolder:
    """`piece.json` for each finished piece; a file that cannot be read counts as not finished."""

    path: Path

    def read(self, piece: str) -> dict[str, Any] | None:
        try:
            document = json.loads(self._file(piece).read_text())
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None

    def write(self, piece: str, result: Mapping[str, Any], seconds: float) -> Path:
        """Write atomically: an interrupted run leaves the former file or none."""
        self.path.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": SCHEMA,
            "piece": piece,
            "seconds": round(seconds, 1),
            "provenance": provenance(),
            "result": dict(result),
        }
        file = self._file(piece)
        replace_file(file, (json.dumps(document, indent=1) + "\n").encode(), durable=False)
        return file

    def _file(self, piece: str) -> Path:
        return self.path / f"{piece}.json"


def provenance() -> dict[str, Any]:
    """Date, command, machine and versions of this process."""
    import torch

    from sglang.version import __version__

    has_gpu = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", "-m", "sglang.srt.autotune.bench", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _driver_version() if has_gpu else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "sglang": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    if package == "torch":
        import torch

        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _imported_version(package)


def _imported_version(package: str) -> str | None:
    """Where a package was unpacked without its metadata, what it says itself."""
    module = sys.modules.get(package.removesuffix("-python"))
    return getattr(module, "__version__", None)


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0] or None
    except (OSError, subprocess.SubprocessError):
        return None
