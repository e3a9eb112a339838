"""Which ranks this process starts, and where all ranks meet.

Without torchrun every machine starts its share of the ranks (`--nnodes`, `--node-rank`). Under torchrun, which has
started one process for each rank already, each of these starts the one worker of its rank and watches it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import free_port


@dataclass(frozen=True)
class LaunchPlan:
    """`ranks` are global; the first of them is on GPU `first_gpu` of this machine, the next on the next.

    `ranks_on_machine` also counts those that other processes of this machine start. `init_method` is a
    torch.distributed rendezvous.
    """

    ranks: range
    first_gpu: int
    ranks_on_machine: int
    init_method: str

    @property
    def serves_http(self) -> bool:
        """Whether this process has the first rank, and with it the HTTP server."""
        return 0 in self.ranks


def plan_launch(server_args: ServerArgs, environ: Mapping[str, str] = os.environ) -> LaunchPlan:
    """The plan of this process; raises `ValueError` when torchrun and the flags disagree."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _under_torchrun(server_args, environ)
    num_ranks = server_args.world_size // server_args.nnodes
    first = server_args.node_rank * num_ranks
    address = server_args.dist_init_addr or f"127.0.0.1:{free_port()}"
    return LaunchPlan(range(first, first + num_ranks), 0, num_ranks, f"tcp://{address}")


def _under_torchrun(server_args: ServerArgs, environ: Mapping[str, str]) -> LaunchPlan:
    started, wanted = int(environ["WORLD_SIZE"]), server_args.world_size
    if started != wanted:
        raise ValueError(
            f"torchrun starts {started} processes, and --tp-size x --pp-size asks for {wanted}: make them equal"
        )
    if server_args.nnodes > 1 or server_args.dist_init_addr is not None:
        raise ValueError("--nnodes and --dist-init-addr are torchrun's under torchrun: leave them out")
    rank = int(environ["RANK"])
    # The rendezvous of the environment is torchrun's own, which is there before any rank.
    return LaunchPlan(
        range(rank, rank + 1), int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"]), "env://"
    )
