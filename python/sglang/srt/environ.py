"""Every `SGLANG_*` environment variable, typed and documented in one place.

A variable is read when it is asked for, never at import, so a test or an embedding program can set it late.
`envs.NAME.get()` gives the typed value; a value that cannot be read raises `ValueError` with the variable's name.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRUE_WORDS = ("1", "true", "yes", "on")
_FALSE_WORDS = ("0", "false", "no", "off")


class EnvField(Generic[T]):
    """One environment variable. `default` is a value, or a function called when the variable is unset or empty."""

    accepts = "a value"

    def __init__(self, default: T | Callable[[], T], doc: str) -> None:
        self._default = default
        self.doc = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def parse(self, text: str) -> T:
        """The value that `text` stands for; raises `ValueError` when it stands for none."""
        raise NotImplementedError

    def default(self) -> T:
        return self._default() if callable(self._default) else self._default

    def fixed_default(self) -> T | None:
        """The default, or None when it is worked out on the machine."""
        return None if callable(self._default) else self._default

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name, "").strip())

    def get(self) -> T:
        """The variable's value, or the default when it is unset or empty. Raises `ValueError` for a bad value."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r} is not valid: it accepts {self.accepts}") from None

    @contextmanager
    def override(self, value: T | str | None) -> Iterator[None]:
        """Set the variable (`None` unsets it) for the length of a `with` block; child processes inherit it."""
        previous = os.environ.get(self.name)
        self._put(None if value is None else self._format(value))
        try:
            yield
        finally:
            self._put(previous)

    def _put(self, text: str | None) -> None:
        if text is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = text

    @staticmethod
    def _format(value: Any) -> str:
        return str(int(value)) if isinstance(value, bool) else str(value)


class EnvStr(EnvField[str]):
    accepts = "a string"

    def parse(self, text: str) -> str:
        return text


class EnvPath(EnvField[str]):
    """A file system path; a leading `~` means the home directory."""

    accepts = "a path of printable characters"

    def parse(self, text: str) -> str:
        if not text.isprintable():  # it is written to logs and into JSON
            raise ValueError(text)
        if text.startswith("~"):
            return os.path.join(home_dir(), text[1:].lstrip("/")) if text[1:2] in ("", "/") else text
        return os.path.abspath(text)


class EnvBool(EnvField[bool]):
    accepts = "1, true, yes, on or 0, false, no, off"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word in _TRUE_WORDS:
            return True
        if word in _FALSE_WORDS:
            return False
        raise ValueError(text)


class _EnvNumber(EnvField[T]):
    """A number with an optional lowest allowed value."""

    kind: type = float
    noun = "a number"

    def __init__(self, default: T | Callable[[], T], doc: str, *, minimum: float | None = None) -> None:
        super().__init__(default, doc)
        self.minimum = minimum
        self.accepts = self.noun if minimum is None else f"{self.noun} of at least {minimum:g}"

    def parse(self, text: str) -> T:
        value = self.kind(text)
        if not math.isfinite(value) or (self.minimum is not None and value < self.minimum):
            raise ValueError(text)
        return value


class EnvInt(_EnvNumber[int]):
    kind = int
    noun = "an integer"


class EnvFloat(_EnvNumber[float]):
    kind = float
    noun = "a number"


def home_dir() -> str:
    """The user's home, also when `HOME` is unset; as a last resort a directory of this user under the temp dir."""
    home = os.path.expanduser("~")  # HOME first, then the password database
    if home != "~" and os.path.isabs(home):
        return home
    return os.path.join(tempfile.gettempdir(), f"sglang-{os.getuid()}")


class Envs:
    """The variables. Help texts here are what `docs/cli.md` prints."""

    SGLANG_CACHE_DIR = EnvPath(
        lambda: os.path.join(home_dir(), ".cache", "sglang"),
        "Root of everything that is kept between starts; autotune records lie under `flashinfer/autotune/` in it. "
        "Default: `~/.cache/sglang`.",
    )
    SGLANG_MAX_REQUEST_MIB = EnvInt(
        8,
        "Largest body of an HTTP request in MiB; a larger one is answered with 413. 8 MiB hold a million token ids.",
        minimum=1,
    )
    SGLANG_FLASHINFER_AUTOTUNE_CACHE = EnvBool(
        True,
        "Load seeded and user records at start. `0` loads neither and tunes everything afresh; the result is "
        "written to a file of its own under `runs/`, and the user's records stay as they are.",
    )
    SGLANG_FLASHINFER_AUTOTUNE_EXTEND = EnvBool(
        True,
        "Tune the prefill shapes too. `0` tunes the decode shapes only, and prefill runs FlashInfer's defaults.",
    )
    SGLANG_AUTOTUNE_TIMEOUT = EnvFloat(
        600.0,
        "Seconds that a rank waits for the others at any one point of the autotune stage before it gives up and "
        "names who is missing.",
        minimum=0.001,
    )

    SGLANG_OVERLAP_SCHEDULE_ON_CPU = EnvBool(
        False, "Overlap scheduling and forwards on the CPU too, where it gains nothing: for tests."
    )
    SGLANG_FLASHINFER_MEGAMOE_MAX_TOKENS_PER_RANK = EnvInt(
        0,
        "Most tokens of a rank in one MegaMoE launch of an engine without tuned profiles. `0` takes the largest "
        "forward that the flags allow. Tuned profiles have capacities of their own.",
        minimum=0,
    )
    SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE = EnvBool(
        False,
        "Sum the results of a token's experts inside the MegaMoE kernel: faster by a few percent, in no fixed order. "
        "Only for one rank or ranks that are never idle.",
    )
    SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE = EnvStr(
        "bf16",
        "How NVFP4 MegaMoE sends expert results back: `bf16`, `mxfp8` (half the bytes) or `nvfp4` (a quarter), at the "
        "price of accuracy.",
    )

    @classmethod
    def fields(cls) -> dict[str, EnvField[Any]]:
        """Name to variable, in declaration order."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, EnvField)}


envs = Envs()


def unknown_megamoe_variables() -> list[str]:
    """Set `SGLANG_*MEGAMOE*` variables that mean nothing here: misspelt, or of another version."""
    known = Envs.fields()
    return sorted(
        name for name in os.environ if name.startswith("SGLANG_") and "MEGAMOE" in name and name not in known
    )


def warn_of_unknown_megamoe_variables() -> None:
    """One log line for each of them, once in the life of the process."""
    for name in unknown_megamoe_variables():
        if name not in _warned:
            _warned.add(name)
            logger.warning("%s is set, and this version knows no such variable: it has no effect", name)


_warned: set[str] = set()
