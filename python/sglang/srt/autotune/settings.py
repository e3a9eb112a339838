"""What the user asked of the stage, gathered once so that nothing later reads a flag or a variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageSettings:
    """See the flags and variables of the same names in `docs/autotune.md`."""

    disabled: bool = False
    deterministic: bool = False
    skip_ops: tuple[str, ...] = ()
    given_records: tuple[Path, ...] = ()
    report_path: Path | None = None
    use_cache: bool = True
    include_prefill: bool = True
    cache_root: Path = Path("~/.cache/sglang")
    #: Seeds to choose from instead of the built-in ones.
    seed_folder: Path | None = None
    timeout_s: float = 600.0
    #: off, finite or full.
    verify: str = "finite"
    #: Seconds of tuning after which no further step begins; 0 is no limit.
    budget_s: float = 0.0
    #: Names the private record file of a start that reuses nothing; the same on all ranks.
    run_id: str = ""
