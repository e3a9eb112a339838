"""HTTP POST over plain sockets, with the answer handed on as it arrives.

At hundreds of streams a client library's work for each event would be measured instead of the server's, and the
time of an event would be that of its turn in a queue. Here bytes go from the event loop to a callback at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

OnData = Callable[[bytes], None]


class TransportError(RuntimeError):
    """The connection failed or ended before the answer did; the message is for the user."""


@dataclass(frozen=True)
class Address:
    """Where a server listens. `prefix` is the path that its routes stand below, without a slash at its end."""

    host: str
    port: int
    prefix: str = ""
    is_tls: bool = False

    @classmethod
    def parse(cls, url: str, flag: str = "--base-url") -> Address:
        """Raises `ValueError` that names `flag` unless `url` is an HTTP address."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{flag} {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{flag} {url}: it must look like http://HOST:PORT")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


@dataclass
class Response:
    """`status` is 0 until the head has arrived. `body` holds what no callback took."""

    status: int = 0
    reason: str = ""
    body: bytearray = field(default_factory=bytearray)


async def post(
    address: Address, path: str, body: bytes, headers: Mapping[str, str], on_data: OnData | None = None
) -> Response:
    """Send `body` (JSON) and wait for the end of the answer.

    `on_data` gets the pieces of an answer of status 200 as they arrive; all others are collected. Raises
    `TransportError`. Cancelling it closes the connection.
    """
    loop = asyncio.get_running_loop()
    exchange = _Exchange(loop.create_future(), on_data)
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    context = ssl.create_default_context() if address.is_tls else None
    try:
        transport, _ = await loop.create_connection(lambda: exchange, address.host, address.port, ssl=context)
    except OSError as error:
        raise TransportError(f"no server answers at {address.url}: {error}") from None
    try:
        transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        await exchange.done
    finally:
        transport.close()
    return exchange.response


class _Exchange(asyncio.Protocol):
    """Reads one answer: the head, then a body that is chunked, has a length, or lasts until the connection ends."""

    def __init__(self, done: asyncio.Future[None], on_data: OnData | None) -> None:
        self.done = done
        self.response = Response()
        self._on_data = on_data
        self._buffer = bytearray()
        self._is_chunked = False
        self._num_left: int | None = None  # of the body, or of the chunk; None: not known

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        self._buffer += data
        try:
            if self.response.status == 0 and not self._read_head():
                return
            self._read_body()
        except Exception as error:  # of the callback or of malformed bytes; the waiting task raises it
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None and self.response.status and not self._is_chunked and self._num_left is None:
            self.done.set_result(None)
            return
        words = f": {error}" if error else ""
        self._fail(TransportError(f"the server closed the connection before its answer ended{words}"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _read_head(self) -> bool:
        """Whether the head is complete now; its bytes leave the buffer."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = status.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
            raise TransportError(f"this is no HTTP answer: {status[:100]!r}")
        self.response.status, self.response.reason = int(words[1]), (words[2] if len(words) > 2 else "")
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == "transfer-encoding" and "chunked" in value.lower():
                self._is_chunked, self._num_left = True, None
            elif name.lower() == "content-length" and not self._is_chunked:
                self._num_left = int(value)
        return True

    def _read_body(self) -> None:
        if self._is_chunked:
            while self._read_chunk():
                pass
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        self._take(data)
        if self._num_left is not None:
            self._num_left -= len(data)
            if self._num_left <= 0:
                self.done.set_result(None)

    def _read_chunk(self) -> bool:
        """Take one whole chunk; whether another may follow at once."""
        buffer = self._buffer
        line_end = buffer.find(b"\r\n")
        if line_end < 0:
            return False
        size = int(buffer[:line_end].split(b";")[0], 16)
        end = line_end + 2 + size
        if len(buffer) < end + 2:
            return False
        data = bytes(buffer[line_end + 2 : end])
        del buffer[: end + 2]
        if size == 0:
            self.done.set_result(None)
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        if self.response.status == 200 and self._on_data is not None:
            self._on_data(data)
        else:
            self.response.body += data
