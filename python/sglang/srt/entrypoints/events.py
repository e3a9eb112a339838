"""Server-sent events, as every streaming endpoint writes them."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
"""What ends a stream that did not fail."""


def event(content: Any) -> bytes:
    """One event with `content` (plain data or msgspec structs) as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
