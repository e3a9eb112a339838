"""The sockets between the HTTP process and the workers, in a directory that only this user can enter.

The main process binds both ends: workers push to `to_main`, and the first rank pulls from `to_worker` and passes on
what it gets to the others (see `rank_sync`). Messages are msgpack (see `io_struct`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from sglang.srt.managers.io_struct import MainMessage, WorkerMessage

_MAX_SOCKET_PATH = 100
"""A little under the 108 bytes of a unix socket address."""

IDLE_WAIT_S = 1.0
"""How long an idle worker waits for a message at a time."""


@dataclass(frozen=True)
class Endpoints:
    """Addresses of the two sockets of one server."""

    to_worker: str
    to_main: str


@contextmanager
def private_endpoints() -> Iterator[Endpoints]:
    """Fresh addresses, in a directory of mode 0700 that is removed at the end."""
    directory = tempfile.mkdtemp(prefix="sglang-")
    if len(directory) + len("/to_worker") > _MAX_SOCKET_PATH:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="sglang-", dir="/tmp")
    try:
        yield Endpoints(f"ipc://{directory}/to_worker", f"ipc://{directory}/to_main")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


Socket = TypeVar("Socket", bound=zmq.Socket)


def without_limits(socket: Socket) -> Socket:
    """`socket` without a high-water mark, and such that unsent messages never hold up the end of its process."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


class WorkerChannel:
    """A worker's end. `receives` is for the first rank only, since each message is received once."""

    def __init__(self, endpoints: Endpoints, receives: bool) -> None:
        self._context = zmq.Context()
        self._push = without_limits(self._context.socket(zmq.PUSH))
        self._push.connect(endpoints.to_main)
        self._pull = without_limits(self._context.socket(zmq.PULL))
        if receives:
            self._pull.connect(endpoints.to_worker)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(MainMessage)

    def send(self, message: WorkerMessage) -> None:
        self.send_raw(self._encoder.encode(message))

    def send_raw(self, message: bytes | msgspec.Raw) -> None:
        """Send a `WorkerMessage` that is encoded already."""
        self._push.send(message)

    def receive(self, may_wait: bool) -> list[MainMessage]:
        """All messages that have arrived; with `may_wait`, the first is waited for up to `IDLE_WAIT_S`."""
        return [self._decoder.decode(message) for message in self.receive_raw(may_wait)]

    def receive_raw(self, may_wait: bool) -> list[msgspec.Raw]:
        """`receive` without decoding."""
        messages = []
        if self._pull.poll(int(IDLE_WAIT_S * 1000) if may_wait else 0):
            try:
                while True:
                    messages.append(msgspec.Raw(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages
        return messages

    def close(self, linger_s: float = 2.0) -> None:
        """Wait up to `linger_s` until the last messages are out."""
        self._push.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self._push.close()
        self._pull.close()
        self._context.term()
