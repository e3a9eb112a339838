"""Whether the place where records lie may be used: what lies there chooses kernels, and is written over.

A root that the operator names is trusted, and so is another user's directory that a volume brought. Not trusted is what
another user can have put in the way: a link of theirs, a directory of theirs where anyone may create one (as in
``/tmp``), a link below the root that leads out of it, behind which any file of this user could stand.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust(root: Path, path: Path) -> str | None:
    """Why the records at ``path`` below ``root`` must be neither read nor written; None when they may."""
    try:
        link = os.lstat(root)
        if stat.S_ISLNK(link.st_mode) and _is_foreign(link):
            return f"{root} is a link that belongs to user {link.st_uid}"
        real = Path(os.path.realpath(root))
        if _is_foreign(real.stat()) and real.parent.stat().st_mode & stat.S_IWOTH:
            owner = real.stat().st_uid
            return f"{real} belongs to user {owner} and lies where anyone may put a directory"
        if not Path(os.path.realpath(path)).is_relative_to(real):
            return f"{path} leads out of {root}"
    except OSError:
        return None  # there is nothing yet, or nothing that can be used: the store will find out
    return None


def doubt(root: Path) -> str | None:
    """What to say of a root that is used and belongs to another user."""
    try:
        status = root.stat()
    except OSError:
        return None
    if not _is_foreign(status):
        return None
    return f"the records below {root} belong to user {status.st_uid}, who can choose this server's kernels"


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (0, os.geteuid())
