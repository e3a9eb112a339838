"""Which requests the next forward takes: first come, first served, prompts before decoding.

Only counts decide, never clocks or free memory of a device, so that ranks which hold the same requests pick the
same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang.srt.managers.schedule_batch import Req

MAX_RESERVED_NEW_TOKENS = 4096
"""A request counts for this many future tokens at most when room is set aside for it."""


@dataclass(frozen=True)
class PrefillLimits:
    """Of one prefill forward on this rank.

    A forward takes at most `max_tokens` tokens. With `chunked`, a prompt is cut to fill a forward; without, only a
    prompt that no forward could take whole is cut.
    """

    max_tokens: int
    max_running_requests: int
    chunked: bool = True


class NewTokenRatio:
    """The share of their possible output that running requests are expected to need.

    Too low, and requests are started that must be put back; too high, and memory lies idle. It decays with every
    decode step and jumps up when a request had to be put back.
    """

    INITIAL, LOWEST, DECAY = 0.7, 0.1, 0.001

    def __init__(self) -> None:
        self.value = self.INITIAL

    def after_decode(self) -> None:
        self.value = max(self.LOWEST, self.value - self.DECAY)

    def after_retraction(self) -> None:
        self.value = min(1.0, self.value + 0.2)

    def reserved_tokens(self, reqs: Sequence[Req]) -> int:
        """Tokens set aside for the future output of `reqs`, at least one each."""
        return sum(
            max(1, int(min(req.max_new_tokens_left, MAX_RESERVED_NEW_TOKENS) * self.value)) for req in reqs
        )


class Prefixes(Protocol):
    """Where requests find the beginnings of their prompts computed already."""

    def claim(self, req: Req) -> int:
        """Take what there is for `req`, so that less of it must be computed. Gives how many slots become unavailable
        thereby.
        """
        ...

    def unclaim(self, req: Req) -> None: ...


def pick_prefill(
    unfinished: Req | None,
    waiting: Sequence[Req],
    running: Sequence[Req],
    num_available_tokens: int,
    limits: PrefillLimits,
    ratio: NewTokenRatio,
    prefixes: Prefixes,
    elsewhere: Sequence[Req] = (),
) -> list[tuple[Req, int]]:
    """The next prefill forward, as requests with the number of their tokens it takes; empty when none fits.

    `unfinished` is the request whose prompt an earlier forward began. It goes first, and room for all of its prompt
    was set aside when it was started. Requests of `waiting` are taken in order, up to the first that does not fit;
    those taken keep what `prefixes` has for them. `elsewhere` holds the requests of other micro-batches, which share
    the memory but not the forward.
    """
    picked: list[tuple[Req, int]] = []
    if unfinished is None and not waiting:
        return picked
    budget = limits.max_tokens
    room = num_available_tokens - ratio.reserved_tokens(running)
    room -= ratio.reserved_tokens(elsewhere) + sum(req.num_to_extend for req in elsewhere)
    if unfinished is not None:
        # What was set aside for it may be gone when other micro-batches grew more than was expected of them.
        num_new = min(unfinished.num_to_extend, budget, num_available_tokens)
        if num_new == 0:
            return picked
        picked.append((unfinished, num_new))
        budget -= num_new
        room -= unfinished.num_to_extend + ratio.reserved_tokens([unfinished])
        if num_new < unfinished.num_to_extend:
            return picked
    for req in waiting:
        is_alone = not running and not picked and not elsewhere
        if len(running) + len(picked) >= limits.max_running_requests or budget == 0:
            break
        room -= prefixes.claim(req)
        num_new = req.num_to_extend
        # A request that is alone always fits: it was refused on arrival if the pool cannot hold it.
        fits = is_alone or num_new + ratio.reserved_tokens([req]) <= room
        if not fits or (num_new > budget and picked and not limits.chunked):
            prefixes.unclaim(req)
            break
        picked.append((req, min(num_new, budget)))
        budget -= picked[-1][1]
        room -= num_new + ratio.reserved_tokens([req])
    return picked


def fair_share(num_places: int, num_requests: int, limits: PrefillLimits) -> PrefillLimits:
    """The limits of one of `num_places` micro-batches that share `num_requests` requests evenly."""
    share = -(-num_requests // num_places)
    most = max(1, min(share, limits.max_running_requests // num_places))
    return replace(limits, max_running_requests=most)
