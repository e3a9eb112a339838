"""Every use of `flashinfer.moe_ep` beyond its documented names: the other half of `flashinfer_api`.

Each function says what it leans on; `test/unit/test_megamoe_flashinfer.py` fails when FlashInfer changes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HopperBuffers:
    """Where one SM90 FP8 launch reads and writes: `C` rows, the capacity of the workspace."""

    payload: torch.Tensor
    """`[C, H]` FP8 e4m3."""
    scales: torch.Tensor
    """`[C, H / 128 rounded up to 4]` float32."""
    ids: torch.Tensor
    """`[C, K]` int64."""
    shares: torch.Tensor
    """`[C, K]` float32."""
    output: torch.Tensor
    """`[C, H]` BF16."""


def hopper_candidates(capacity: int, scale_mode: str) -> list[dict[str, Any]]:
    """All knob dicts that FlashInfer's own SM90 sweep tries at a capacity, its default first.

    Leans on the kernel package's `hopper_fp8_candidates`: no public name lists them.
    """
    return [
        dict(knobs)
        for knobs in _hopper().hopper_fp8_candidates(fp8_scale_mode=scale_mode, max_tokens=capacity)
    ]


def hopper_default(capacity: int, scale_mode: str) -> dict[str, Any]:
    """The SM90 knobs without a knob cache. Leans on the kernel package's `default_knobs`."""
    return dict(_hopper().default_knobs(capacity, fp8_scale_mode=scale_mode))


def hopper_is_valid(knobs: dict[str, Any]) -> bool:
    """Whether the SM90 kernel can be compiled with these knobs. Leans on the kernel package's `is_valid`."""
    return bool(_hopper().is_valid(knobs))


def hopper_record(knobs: dict[str, Any], **entry: Any) -> None:
    """Write a knob-cache entry in the installed version's format (0.7.4 has more key fields).

    Leans on the kernel package's `record_knobs`; arguments that this version does not know are left out.
    """
    record = _hopper().record_knobs
    known = inspect.signature(record).parameters
    record(knobs, **{name: value for name, value in entry.items() if name in known})


def hopper_lookup(**entry: Any) -> dict[str, Any] | None:
    """What an SM90 workspace with ``knobs=None`` takes from the knob cache; None when nothing matches.

    Leans on the kernel package's `lookup_knobs`.
    """
    lookup_knobs = _hopper().lookup_knobs
    known = inspect.signature(lookup_knobs).parameters
    found = lookup_knobs(**{name: value for name, value in entry.items() if name in known})
    return None if found is None else dict(found)


def hopper_buffers(workspace: Any) -> HopperBuffers:
    """The buffers behind a public workspace handle of the blockwise SM90 FP8 kernel.

    Leans on the handle's backend workspace, `MegaMoEHopperFp8SymmBuffer`: the public `forward` fills them by fourteen
    torch operations.

    Raises:
        AttributeError: this version names them otherwise.
    """
    inner = workspace._backend_workspace
    return HopperBuffers(inner.x, inner.x_sf, inner.topk_idx, inner.topk_weights, inner.output_activation)


def hopper_launch(transformed: Any, workspace: Any) -> Callable[[], None]:
    """What launches a layer with prepared weights on a workspace, on the stream that is current now.

    Leans on the kernel package's `hopper_fp8_mega_launch_thunk`: the public `forward` remembers the arguments of one
    layer, so that layers which share a workspace build them anew in every launch.
    """
    launch: Callable[[], None] = _hopper().hopper_fp8_mega_launch_thunk(
        transformed[0], transformed[1], workspace._backend_workspace
    )
    return launch


def pool_references(workspace: Any) -> int:
    """Layers that share the buffers behind a public workspace handle.

    Leans on `flashinfer.moe_ep.core.kernel.workspace_pool` and the handle's backend workspace, for tests and reports
    only: nothing public tells whether layers share.
    """
    from flashinfer.moe_ep.core.kernel.workspace_pool import pooled_workspace_refcount

    return int(pooled_workspace_refcount(workspace._backend_workspace))


def _hopper() -> Any:
    from flashinfer.moe_ep.kernel_src.sm90 import pull_style_cutedsl_megakernel

    return pull_style_cutedsl_megakernel
