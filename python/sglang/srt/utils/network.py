"""Addresses and ports: checks with a clear message, and free ports for the ranks to meet at."""

from __future__ import annotations

import errno
import socket

_BACKLOG = 2048


def split_host_port(address: str, *, flag: str) -> tuple[str, int]:
    """`"host:port"` (an IPv6 host in brackets) as its parts; raises `ValueError` that names `flag`."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"{flag} must be HOST:PORT, an IPv6 host in brackets (got {address!r})")
    return host, int(port)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at this moment. It may be taken before the caller binds it."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def bind_http_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket, so that an occupied port is found before anything else starts.

    Raises `ValueError` that names `--port` or `--host`.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(f"--host {host} cannot be resolved: {error.strerror}") from None
    family, kind, protocol, _, address = info[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Two sockets with SO_REUSEADDR may bind one port; only one of them may listen.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--port {port} is in use on {host}: stop what listens there or pick another port"
            ) from None
        if error.errno == errno.EACCES:
            raise ValueError(
                f"--port {port} needs more rights than this user has: pick one above 1023"
            ) from None
        raise ValueError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
