"""Reading MXFP4 weights: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats, v1.0).

No runner here computes in MXFP4, so weights become the model's own type while they are loaded, piece by piece: what
waits for its other half is packed still.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.configs.model_support import MXFP4_BLOCK as BLOCK

BITS_PER_VALUE = 4 + 8 / BLOCK

# The values of E2M1, by their bits without the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`blocks` `[..., G, 16]` and `scales` `[..., G]`, both uint8 -> `[..., G * 32]`, exact in `dtype`.

    The low half of a byte is the value that comes first. A scale is an exponent with a bias of 127.
    """
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=blocks.device)
    bits = torch.arange(256, device=blocks.device)
    pairs = torch.stack([values[bits & 15], values[bits >> 4]], dim=-1)
    # An exponent in its place makes a float32 of that power of two.
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    unpacked = pairs[blocks.to(torch.int32)].flatten(-2)
    return (unpacked * powers.unsqueeze(-1)).to(dtype).flatten(-2)


class Mxfp4Weight:
    """One weight whose blocks and scales are two tensors of a checkpoint: `store` takes its values once both are there.

    `store` gets a tensor of `dtype` on `device`.
    """

    def __init__(
        self, store: Callable[[torch.Tensor], None], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._store, self._dtype, self._device = store, dtype, device
        self._blocks: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None

    def take_blocks(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._store_when_complete()

    def take_scales(self, scales: torch.Tensor) -> None:
        self._scales = scales
        self._store_when_complete()

    def _store_when_complete(self) -> None:
        if self._blocks is None or self._scales is None:
            return
        blocks, scales = self._blocks.to(self._device), self._scales.to(self._device)
        self._blocks = self._scales = None
        self._store(dequantize_mxfp4(blocks, scales, self._dtype))
