"""MegaMoE launches on one Hopper GPU: host and GPU time by FlashInfer's `forward` and directly, and that both agree.

    python test/native/megamoe_launches.py [--geometry H,I,E,K] [--capacities 8 1024] [--layers 6]

Several layers share the workspaces, as in a model, and are launched one after the other. Host time is that of
launching without waiting, GPU time that of a captured graph with a cold L2 before it, both for each layer. Exit status
1 when a result differs or a workspace is not launched directly.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

from sglang.srt.autotune.megamoe.bench import ReplayTimer
from sglang.srt.autotune.megamoe.env_guard import environment
from sglang.srt.autotune.megamoe.inputs import routed_inputs
from sglang.srt.autotune.megamoe.kernels.base import Geometry
from sglang.srt.autotune.megamoe.kernels.flashinfer import FlashInferOwner, HopperFp8MegaMoE
from sglang.srt.autotune.megamoe.kernels.fp8_bench import random_weights
from sglang.srt.autotune.megamoe.kernels.options import MegaMoEOptions

QWEN3_30B_A3B = "2048,768,128,8"
ROUNDS, REPLAYS = 30, 20

Way = Callable[[int], torch.Tensor]
"""One way to launch: from the number of a layer to its result, a view or not."""


def host_us(way: Way, layers: int) -> float:
    """Microseconds that the host takes for one launch, the GPU being idle before each round of all layers."""
    way(0)
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for layer in range(layers):
            way(layer)
        rounds.append(1e6 * (time.perf_counter() - began) / layers)
    return statistics.median(rounds)


def gpu_us(way: Way, layers: int, timer: ReplayTimer) -> float:
    """Microseconds of one layer in a graph of all."""
    replay = timer.capture(lambda: [way(layer) for layer in range(layers)])
    return statistics.median(timer.times_us(replay, REPLAYS)) / layers


@torch.inference_mode()
def measure(kernel: HopperFp8MegaMoE, capacities: list[int], layers: int) -> bool:
    """Print the table; whether every launch was direct and gave FlashInfer's result."""
    timer, good = ReplayTimer(kernel.device), True
    weights = [random_weights(kernel.geometry, kernel.device, layer) for layer in range(layers)]
    print("capacity  tokens   host us: forward  direct   GPU us: forward  direct   same")
    with environment(kernel.required_environment()):
        owners = [kernel.create_owner(prepared, min(capacities)) for prepared in weights]
        for capacity in capacities:
            spaces = [owner.create_workspace(capacity) for owner in owners]
            full = routed_inputs(capacity, kernel.geometry, torch.bfloat16, kernel.device)
            for owner, space in zip(owners, spaces, strict=True):
                owner.warmup(full, workspace=space)
                good &= owner.launches_directly(space)
            for num_tokens in (capacity, capacity // 2, 1):
                inputs = routed_inputs(num_tokens, kernel.geometry, torch.bfloat16, kernel.device, 1)

                def public(layer: int, inputs=inputs, spaces=spaces) -> torch.Tensor:
                    return FlashInferOwner.forward(owners[layer], inputs, workspace=spaces[layer])

                def direct(layer: int, inputs=inputs, spaces=spaces) -> torch.Tensor:
                    return owners[layer].forward(inputs, workspace=spaces[layer])

                same = all(
                    torch.equal(public(layer).clone(), direct(layer).clone()) for layer in range(layers)
                )
                hosts = [host_us(way, layers) for way in (public, direct)]
                gpus = [gpu_us(way, layers, timer) for way in (public, direct)]
                print(
                    f"{capacity:8} {num_tokens:7}   {hosts[0]:16.0f} {hosts[1]:7.0f}   {gpus[0]:15.1f} "
                    f"{gpus[1]:7.1f}   {'yes' if same else 'NO'}",
                    flush=True,
                )
                good &= same
        for owner in reversed(owners):
            owner.destroy()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default=QWEN3_30B_A3B, help="hidden, expert width, experts, top-k")
    parser.add_argument("--capacities", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    geometry = Geometry(*map(int, args.geometry.split(",")))
    kernel = HopperFp8MegaMoE(geometry, device, MegaMoEOptions())
    kernel.check()
    return 0 if measure(kernel, args.capacities, args.layers) else 1


if __name__ == "__main__":
    sys.exit(main())
