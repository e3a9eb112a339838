"""What a user may set about MegaMoE kernels, apart from flags; the defaults are SGLang's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMBINE_DTYPES = ("bf16", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class MegaMoEOptions:
    """`in_kernel_fc2_reduce` sums expert results inside the kernel, in no fixed order; `combine_dtype` is what they
    travel as between ranks."""

    in_kernel_fc2_reduce: bool = False
    combine_dtype: Literal["bf16", "mxfp8", "nvfp4"] = "bf16"

    def __post_init__(self) -> None:
        if self.combine_dtype not in COMBINE_DTYPES:
            raise ValueError(
                f"SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE={self.combine_dtype!r} is not valid: it accepts "
                f"{', '.join(COMBINE_DTYPES)}"
            )
        if self.combine_dtype != "bf16" and self.in_kernel_fc2_reduce:
            raise ValueError(
                f"SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE={self.combine_dtype} needs "
                "SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE=0: sums inside the kernel travel as bf16"
            )
