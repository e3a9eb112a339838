"""Attention sinks through FlashInfer, in one of two ways.

FlashInfer has a wrapper whose kernels put the sink into the softmax. No wheel carries its modules, so they are
compiled at the first start, unless they were prebuilt or compiling is switched off. The other way is exact too and
needs the ordinary kernels only: attention without the sink, scaled afterwards by the share of the softmax that the
sink leaves, which follows from the log-sum-exp.
"""

from __future__ import annotations

import logging
import math
from types import ModuleType
from typing import Any

import torch

from sglang.srt.utils.errors import first_line

logger = logging.getLogger(__name__)

WRAPPER = "BatchAttentionWithAttentionSinkWrapper"
LAYOUT = "NHD"
_LN_2 = math.log(2)


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention `out` `[T, H, D]` as if the softmax had one more key of logit `sinks` `[H]` and value zero, in place.

    `lse` `[T, H]` float32 is the log-sum-exp of the other keys' logits in base 2, as FlashInfer gives it.
    """
    kept = torch.sub(lse * _LN_2, sinks).sigmoid_()
    return out.mul_(kept.unsqueeze(-1))


class SinkWrappers:
    """Makes FlashInfer's wrappers with sinks; `sliding` ones apply a window, which their kernels are compiled for."""

    def __init__(
        self,
        flashinfer: ModuleType,
        workspace: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._wrapper, self._workspace = getattr(flashinfer, WRAPPER), workspace
        self._sizes, self._head_dim, self._dtype = (num_heads, num_kv_heads, head_dim), head_dim, dtype

    @classmethod
    def load(
        cls,
        flashinfer: ModuleType,
        workspace: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        windows: set[bool],
    ) -> SinkWrappers | None:
        """Load or compile the kernels, without a window and with one as `windows` asks, and try each on a token.

        None, with one line in the log, where they cannot be had.
        """
        try:
            wrappers = cls(flashinfer, workspace, num_heads, num_kv_heads, head_dim, dtype)
            logger.info(
                "Loading FlashInfer's attention with sinks (where no prebuilt module exists it is compiled now, in a "
                "minute or two for each of %d)",
                len(windows),
            )
            for sliding in sorted(windows):
                wrappers._try(sliding)
        except torch.cuda.OutOfMemoryError:
            raise
        except (
            Exception
        ) as error:  # an older release, no compiler, a compiler's error: all mean the other way
            reason = first_line(error)
            logger.warning(
                "Attention sinks are applied after FlashInfer's ordinary kernels: its own with sinks fail (%s)",
                reason,
            )
            return None
        return wrappers

    def make(self, *, sliding: bool = False, **graph_buffers: Any) -> Any:
        """A wrapper; `run` takes the sinks and the softmax scale after queries and cache."""
        return self._wrapper(
            self._workspace,
            LAYOUT,
            backend="fa2",
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            head_dim_qk=self._head_dim,
            head_dim_vo=self._head_dim,
            window_left=0 if sliding else -1,
            **graph_buffers,
        )

    def _try(self, sliding: bool) -> None:
        """One key of logit 0 beside a sink of logit 0: half of its value must come out."""
        num_heads, num_kv_heads, head_dim = self._sizes
        device, dtype = self._workspace.device, self._dtype
        ones = torch.ones(1, dtype=torch.int32)
        indptr = torch.tensor([0, 1], dtype=torch.int32)
        wrapper = self.make(sliding=sliding)
        wrapper.plan(
            indptr,
            indptr,
            torch.zeros(1, dtype=torch.int32, device=device),
            ones,
            num_heads,
            num_kv_heads,
            head_dim,
            1,
            causal=True,
            window_left=0 if sliding else -1,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        q = torch.zeros(1, num_heads, head_dim, dtype=dtype, device=device)
        k = torch.zeros(1, 1, num_kv_heads, head_dim, dtype=dtype, device=device)
        out = wrapper.run(q, (k, k + 1), torch.zeros(num_heads, device=device), head_dim**-0.5)
        off = float((out.float() - 0.5).abs().max())
        if not off < 1e-2:
            raise RuntimeError(f"a token that should lose half of its weight to the sink is off by {off:g}")
