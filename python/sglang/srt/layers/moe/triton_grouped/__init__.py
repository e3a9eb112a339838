"""The MoE by Triton kernels, BF16 on Hopper: meant for up to some hundred tokens, where reading weights is the work."""

from sglang.srt.layers.moe.triton_grouped.runner import TritonGroupedMoE, check_supported
from sglang.srt.layers.moe.triton_grouped.tactics import Space

__all__ = ["Space", "TritonGroupedMoE", "check_supported"]
