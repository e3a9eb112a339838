"""How many tokens the KV pool gets."""

from __future__ import annotations

import logging
import os

import torch

from sglang.srt.distributed.parallel_state import Group

logger = logging.getLogger(__name__)

CPU_TOKENS = 65536
"""Pool size on the CPU without --max-total-tokens: serving there is for small models."""
CPU_MEMORY_SHARE = 0.5
"""Share of the available main memory that the pool may take."""


def free_bytes_for_kv(device: torch.device, mem_fraction_static: float, reserved_bytes: int) -> int:
    """Bytes that the pool may take on `device` once the weights are loaded, with `reserved_bytes` kept back.

    On CUDA `mem_fraction_static` of the device holds weights, reserve and pool together.
    """
    if device.type == "cpu":
        return int(available_main_memory() * CPU_MEMORY_SHARE) - reserved_bytes
    free, total = torch.cuda.mem_get_info(device)
    # What torch keeps for later allocations counts as free: the pool is such an allocation.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free - total * (1 - mem_fraction_static)) - reserved_bytes


def max_total_num_tokens(
    requested: int | None,
    context_length: int,
    bytes_per_token: int,
    free_bytes: int,
    world: Group,
    device: torch.device,
) -> int:
    """Tokens of the KV pool, the same on every rank of `world` (collective over it).

    `requested` is --max-total-tokens; `free_bytes` is what this rank can spare. Raises `ValueError` that
    names the flag when the pool does not fit, or when what fits cannot hold one request of the context
    length.
    """
    fits = min(world.all_gather_object(max(0, free_bytes) // bytes_per_token))
    if requested is not None:
        _check_requested(requested, fits, bytes_per_token, context_length)
        return requested
    if fits < context_length:
        raise ValueError(
            f"too little memory: {_gib(fits * bytes_per_token)} are left for the KV pool, which is {fits} tokens, "
            f"and one request may have {context_length}; lower --context-length, or raise --mem-fraction-static"
        )
    return fits if device.type == "cuda" else min(fits, max(CPU_TOKENS, context_length))


def _check_requested(requested: int, fits: int, bytes_per_token: int, context_length: int) -> None:
    if requested > fits:
        raise ValueError(
            f"--max-total-tokens {requested} needs {_gib(requested * bytes_per_token)} on each rank and "
            f"{_gib(fits * bytes_per_token)} are free for it: lower it to {fits} or less"
        )
    if requested < context_length:
        logger.warning(
            "--max-total-tokens %d is less than the context length %d: longer requests are refused",
            requested,
            context_length,
        )


def available_main_memory() -> int:
    """Bytes that the kernel can give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        logger.debug("no /proc/meminfo here; counting free pages instead")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
