"""Who this rank is: where it stands among the others, and what its records depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Topology:
    """Where this rank stands, and whom it must agree with.

    Ranks are global. ``coupled`` are the ranks whose forwards wait for each other (all that must take the same
    branch); ``alike`` the ranks that hold the same shapes and must choose the same tactics (a TP group).
    """

    rank: int = 0
    world_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    coupled: tuple[int, ...] = (0,)
    alike: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class EngineIdentity:
    """What makes a stored tactic mean the same thing, apart from the environment and the skip list.

    ``model``, ``backends`` and ``parallel`` are hashed into the path of the records (see
    `records.cache_key.CacheIdentity`); ``applies`` is what seeds are matched against (see `records.seeds`).
    """

    model: dict[str, Any]
    applies: dict[str, Any]
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    backends: dict[str, str] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)
    draft: bool = False
    gpu_uuid: str | None = None
