"""Environment variables for the length of a block, put back afterwards whatever happens.

FlashInfer finds its knob cache through a variable. While profiles are staged the variable names a scratch file
that holds exactly what this start decided, so that neither a user's own file nor another engine's decides anything,
and a start leaves nothing behind in either.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

KNOB_CACHE_VARIABLE = "FLASHINFER_MOE_EP_KNOB_CACHE"


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set the variables (None unsets one) and restore them at the end, also on error."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _put(name, value)
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


@contextlib.contextmanager
def scratch_knob_cache(required: Mapping[str, str]) -> Iterator[Path]:
    """A knob cache of its own, with the `required` variables of the kernel beside it; yields the file's path."""
    with tempfile.TemporaryDirectory(prefix="sglang-megamoe-") as directory:
        path = Path(directory, "knobs.json")
        with environment({**required, KNOB_CACHE_VARIABLE: str(path)}):
            yield path


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
