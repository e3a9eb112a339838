"""Which attention-DP replica serves a request."""

from __future__ import annotations


class Dispatcher:
    """Gives each request to the replica with the least to do, counted in tokens that its requests may still hold."""

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        self._requests: dict[str, tuple[int, int]] = {}

    def assign(self, rid: str, num_tokens: int) -> int:
        """The replica of a request of `num_tokens` tokens, prompt and output together."""
        replica = self._loads.index(min(self._loads))
        self._loads[replica] += num_tokens
        self._requests[rid] = replica, num_tokens
        return replica

    def release(self, rid: str) -> None:
        """The request has ended in whatever way."""
        replica, num_tokens = self._requests.pop(rid)
        self._loads[replica] -= num_tokens
