"""FlashInfer's paged attention in plain torch, where its GPU kernels would stand.

Every call is checked against the signatures of the installed FlashInfer.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import flashinfer as real
import torch


def attend_pages(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: list[int],
    scale: float,
    window_left: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of `q` `[n, Hq, D]`, the last n of the tokens in `slots`; gives it and its log2-sum-exp2."""
    k, v = (part[slots, 0].float() for part in cache)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    keys = torch.arange(len(slots))
    queries = torch.arange(len(slots) - q.shape[0], len(slots))[:, None]
    visible = keys <= queries
    if window_left >= 0:
        visible &= keys >= queries - window_left
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - total[..., None]), v)
    return out, (lse / math.log(2)).t()


class _Wrapper:
    real_class: type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(self.real_class.__init__).bind(self, *args, **kwargs).arguments
        self.made_with = bound
        self.planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = dict(inspect.signature(self.real_class.plan).bind(self, *args, **kwargs).arguments)
        for (
            name,
            buffer,
        ) in self._buffers().items():  # as in a graph: the kernel reads what the plan left there
            values = self.planned[name]
            buffer[: values.shape[0]].copy_(values)
            self.planned[name] = buffer[: values.shape[0]]

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {}

    def _run(
        self,
        q: torch.Tensor,
        cache: Any,
        qo: list[int],
        kv: list[int],
        indices: list[int],
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scale, window = (
            self.planned.get("sm_scale") or q.shape[-1] ** -0.5,
            self.planned.get("window_left", -1),
        )
        lses = torch.empty(q.shape[:2])
        for seq in range(len(kv) - 1):
            rows, slots = slice(qo[seq], qo[seq + 1]), indices[kv[seq] : kv[seq + 1]]
            out[rows], lses[rows] = attend_pages(q[rows], cache, slots, scale, window, sinks)
        return lses


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    real_class = real.BatchDecodeWithPagedKVCacheWrapper

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        kv, indices = self.planned["indptr"].tolist(), self.planned["indices"].tolist()
        lse = self._run(q, cache, list(range(len(kv))), kv, indices, out)
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    real_class = real.BatchPrefillWithPagedKVCacheWrapper

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        lse = self._prefill(q, cache, out)
        return (out, lse) if return_lse else out

    def _prefill(
        self, q: torch.Tensor, cache: Any, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        planned = [
            self.planned[name].tolist() for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices")
        ]
        return self._run(q, cache, *planned, out, sinks)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    real_class = real.BatchAttentionWithAttentionSinkWrapper

    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        cache: Any,
        sinks: torch.Tensor,
        scale: float,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks.dtype is torch.float32 and scale == q.shape[-1] ** -0.5
        compiled, planned = self.made_with.get("window_left", -1), self.planned.get("window_left", -1)
        assert (compiled >= 0) == (planned >= 0), "compiled with a window or without"
        out = torch.empty_like(q) if out is None else out
        self._prefill(q, cache, out, sinks)
        return out

    def _buffers(self) -> dict[str, torch.Tensor]:
        names = {
            "qo_indptr": "qo_indptr_buf",
            "paged_kv_indptr": "paged_kv_indptr_buf",
            "paged_kv_indices": "paged_kv_indices_buf",
        }
        return {name: self.made_with[buf] for name, buf in names.items() if buf in self.made_with}


def append_paged_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Any,
    positions: Any,
    pages: Any,
    slots: torch.Tensor,
    *rest: Any,
) -> None:
    pages[0][slots.long(), 0], pages[1][slots.long(), 0] = k, v
