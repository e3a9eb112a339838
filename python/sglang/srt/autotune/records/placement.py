"""From an engine's identity to its record files, for the start that uses them and the plan that only names them."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.autotune.identity import EngineIdentity
from sglang.srt.autotune.records.cache_key import CacheIdentity, CachePath
from sglang.srt.autotune.records.environment import cpu_model_name
from sglang.srt.autotune.settings import StageSettings


def sm_name(capability: tuple[int, int] | None) -> str:
    """``sm90``, or ``cpu`` where there is no capability."""
    return "cpu" if capability is None else f"sm{capability[0]}{capability[1]}"


def cache_path_of(
    identity: EngineIdentity, settings: StageSettings, environment: Mapping[str, str], sm: str
) -> CachePath:
    """Where the records of ``identity`` lie, measured under FlashInfer's stamp ``environment``."""
    stamp = dict(environment)
    if sm == "cpu":
        # FlashInfer's stamp says "unknown" on every CPU; times of one CPU mean nothing on another.
        stamp["cpu"] = cpu_model_name()
    return CachePath(
        settings.cache_root,
        CacheIdentity(
            model=identity.model,
            dtype=identity.dtype,
            environment=stamp,
            quantization=identity.quantization,
            kv_cache_dtype=identity.kv_cache_dtype,
            backends=identity.backends,
            parallel=identity.parallel,
            skip_ops=settings.skip_ops,
            draft=identity.draft,
        ),
        sm,
    )
