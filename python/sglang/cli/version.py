"""`sglang version`: what is installed, read from package metadata so that nothing heavy is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from sglang.version import __version__

PACKAGES = ("torch", "flashinfer-python", "transformers")


def main(argv: Sequence[str]) -> int:
    """Print one line per component."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: sglang version\n\nPrint the versions of sglang and what it runs on.")
        return 0
    if argv:
        print(f"sglang version: error: unexpected argument {argv[0]!r}", file=sys.stderr)
        return 2
    print(f"sglang {__version__}")
    print(f"python {platform.python_version()}")
    for name in PACKAGES:
        print(f"{name} {_installed_version(name)}")
    return 0


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"
