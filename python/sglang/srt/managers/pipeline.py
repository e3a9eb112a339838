"""What pipeline stages hand to each other for every batch: hidden states to the next stage, tokens back to all.

Ranks of all stages launch the same batches in the same order, so no message needs a name or a length. Nothing here
waits for the receiver: a stage goes on with its next batch while the one before is on its way. Hidden states travel
downstream only and tokens upstream only, from the same tensor-parallel rank of one stage to that of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sglang.srt.distributed.parallel_state import Group


class PipelineLinks:
    """One rank's links to the same rank of the other stages (the `pp` group)."""

    def __init__(self, pp: Group) -> None:
        self._pp = pp
        self._sent: deque[tuple[list[dist.Work], torch.Tensor]] = deque()

    @property
    def is_last_stage(self) -> bool:
        return self._pp.is_last

    def receive_hidden(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """`[T, H]` hidden states of the stage before; None on the first stage. Waits for them (on CUDA, the stream
        does). An idle batch has none to send.
        """
        if self._pp.is_first:
            return None
        hidden_states = torch.empty(shape, dtype=dtype, device=device)
        if hidden_states.numel():
            self._pp.irecv(hidden_states, self._pp.rank - 1).wait()
        return hidden_states

    def send_hidden(self, hidden_states: torch.Tensor) -> None:
        """Send `[T, H]` to the next stage."""
        if hidden_states.numel():
            self._send(hidden_states.contiguous(), [self._pp.rank + 1])

    def receive_tokens(self, num_tokens: int) -> Callable[[], list[int]]:
        """A function that waits for the `num_tokens` tokens that the last stage will choose for this batch."""
        if num_tokens == 0:
            return list
        tokens = torch.empty(num_tokens, dtype=torch.int64)
        work = self._pp.irecv(tokens, self._pp.size - 1)

        def wait() -> list[int]:
            work.wait()
            chosen: list[int] = tokens.tolist()
            return chosen

        return wait

    def send_tokens(self, tokens: Sequence[int]) -> None:
        """Send the chosen tokens to all other stages. Last stage only."""
        if tokens:
            self._send(torch.tensor(tokens, dtype=torch.int64), range(self._pp.size - 1))

    def _send(self, tensor: torch.Tensor, stages: Sequence[int]) -> None:
        self._sent.append(([self._pp.isend(tensor, stage) for stage in stages], tensor))
        # A batch as many turns ago as there are stages has been through all of them, so this does not wait.
        while len(self._sent) > self._pp.size:
            for work in self._sent.popleft()[0]:
                work.wait()
