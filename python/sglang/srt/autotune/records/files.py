"""Replacing a file so that no reader ever sees half of it, and taking turns with other writers.

The lock is ``flock`` on a file beside the data: the kernel drops it when its holder dies, so no stale lock
has to be broken. Some network file systems grant it to everyone; writers therefore check what they replaced
and what they left (see ``store.py``), and the lock only makes that check succeed at the first try.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

STALE_TEMPORARY_S = 3600.0
_POLL_S = 0.02

Signature: TypeAlias = tuple[int, int, int] | None


def signature(path: Path) -> Signature:
    """What tells one version of a file from another: inode, mtime, size; None when it does not exist."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` to a temporary file in the same directory, flush it to the device and rename it over
    ``path``.

    The mode is the process's usual one (the umask applies), so that a shared root is readable by others.
    Raises OSError, after removing the temporary file, when any part fails; ``path`` is then untouched.
    """
    prepared = prepare_file(path, data, durable=durable)
    try:
        publish_file(prepared, path, durable=durable)
    except BaseException:
        discard(prepared)
        raise


def prepare_file(path: Path, data: bytes, *, durable: bool = True) -> Path:
    """Write ``data`` beside ``path`` under a temporary name, which is returned."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
    except BaseException:
        discard(temporary)
        raise
    return temporary


def publish_file(temporary: Path, path: Path, *, durable: bool = True) -> None:
    os.replace(temporary, path)
    if durable:
        sync_directory(path.parent)


def discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` survive a power cut; file systems that cannot are left to themselves."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def remove_stale_temporaries(path: Path) -> None:
    """Remove what writers of ``path`` left behind when they were killed, once it is an hour old."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            ours = entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp")
            if ours and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_TEMPORARY_S:
                discard(Path(entry.path))


def free_name(path: Path, label: str) -> Path:
    """The first of ``<path>.<label>-1``, ``-2``, ... that does not exist; OSError when there are too many."""
    for number in range(1, 1000):
        candidate = path.with_name(f"{path.name}.{label}-{number}")
        if not os.path.lexists(candidate):
            return candidate
    raise OSError(errno.EEXIST, "too many files were set aside; remove some", str(path))


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock file ``path`` for the block; yields whether it was granted.

    False when the directory is not writable, the file system has no locks, or the holder kept it beyond
    ``timeout_s``: the block runs all the same and must verify its work. The lock file is never removed, or
    two writers could hold locks on two files of one name.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield False
        return
    try:
        yield _wait_for_lock(descriptor, time.monotonic() + timeout_s)
    finally:
        os.close(descriptor)  # closing drops the lock


def _wait_for_lock(descriptor: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
