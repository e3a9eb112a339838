"""What several ranks tell each other between two forwards, so that their schedulers stay in lock-step.

Only the first rank talks with the main process. At every step it passes on what has arrived (requests, aborts,
questions, the shutdown) to all ranks, which therefore handle every message at the same step. Ranks of one
attention-DP replica then hold the same requests and need no more words; replicas hold different ones and tell each
other how many tokens they bring into the forward. With that the leaders of the replicas hand their outputs to the
first rank.

All of it goes over the CPU groups. A rank that has nothing to do waits in the first rank's broadcast, without
polling; the first rank waits on its socket for up to `IDLE_WAIT_S` at a time.
"""

from __future__ import annotations

import msgspec
import torch

from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.managers.io_struct import (
    CacheFlushed,
    InternalState,
    MainMessage,
    TokenizedRequest,
    WorkerMessage,
)
from sglang.srt.managers.ipc import WorkerChannel
from sglang.srt.managers.scheduler import Load


class RankSync:
    """One rank's end. Every rank of the world calls `receive` once for each step, then `share_load` if it
    `shares_load`, and nothing in between that could make them differ.
    """

    def __init__(self, parallel: ParallelState, channel: WorkerChannel) -> None:
        self._world, self._replicas = parallel.world, parallel.attn_dp
        self._channel = channel
        self._speaks = parallel.pp.is_first and parallel.attn_tp.is_first
        self._outbox: list[WorkerMessage] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._messages_decoder = msgspec.msgpack.Decoder(list[MainMessage])
        self._raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])

    @property
    def shares_load(self) -> bool:
        """Whether there is more than one attention-DP replica."""
        return self._replicas.size > 1

    def receive(self, may_wait: bool) -> list[MainMessage]:
        """The messages of this step for this rank's replica; collective over the world.

        `may_wait` counts on the first rank only: whether no rank has anything to do before a message comes.
        """
        if self._world.size == 1:
            return self._channel.receive(may_wait)
        payload = self._channel.receive_raw(may_wait) if self._world.is_first else []
        messages = self._broadcast(payload)
        return [
            m for m in messages if not isinstance(m, TokenizedRequest) or m.replica == self._replicas.rank
        ]

    def send(self, message: WorkerMessage) -> None:
        """Send to the main process, once for the ranks of a replica; other replicas' words go with `share_load`."""
        if not self._speaks:
            return
        if isinstance(message, InternalState | CacheFlushed):
            message.replica = self._replicas.rank
        if self._world.is_first:
            self._channel.send(message)
        else:
            self._outbox.append(message)

    def share_load(self, num_tokens: int, is_busy: bool, may_replay: bool) -> Load:
        """What all replicas bring into this step's forward; collective over the replicas."""
        replicas = self._replicas
        words = torch.frombuffer(bytearray(self._encoder.encode(self._outbox)), dtype=torch.uint8)
        num_bytes = words.numel() if self._outbox else 0
        self._outbox.clear()
        mine = torch.tensor([num_tokens, is_busy, may_replay, num_bytes], dtype=torch.int64)
        counts, busy, may, lengths = replicas.all_gather(mine).view(replicas.size, 4).T.tolist()
        if any(lengths):
            self._pass_on(words, lengths)
        return Load(counts, any(busy), all(may))

    def _broadcast(self, messages: list[msgspec.Raw]) -> list[MainMessage]:
        """Decode the first rank's `messages` on every rank."""
        words = torch.frombuffer(bytearray(self._encoder.encode(messages)), dtype=torch.uint8)
        # Most steps bring no message, and then one broadcast is all.
        num_bytes = int(self._world.broadcast(torch.tensor([words.numel() if messages else 0])))
        if num_bytes == 0:
            return []
        if not self._world.is_first:
            words = torch.empty(num_bytes, dtype=torch.uint8)
        self._world.broadcast(words)
        return self._messages_decoder.decode(words.numpy().tobytes())

    def _pass_on(self, words: torch.Tensor, lengths: list[int]) -> None:
        """Bring the words of the other replicas' leaders to the first rank, which sends them to the main process."""
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: lengths[self._replicas.rank]] = words[: lengths[self._replicas.rank]]
        gathered = self._replicas.all_gather(padded).view(self._replicas.size, -1)
        if self._world.is_first:
            for row, length in zip(gathered, lengths, strict=True):
                for message in self._raw_decoder.decode(row[:length].numpy()) if length else ():
                    self._channel.send_raw(message)
