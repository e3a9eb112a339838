"""Which slots hold the keys and values of which prefixes, so that a prompt that begins like another one is not computed
again.

A tree of token runs: the path from the root to a node spells a prefix, and each node knows the slots of its own run.
A request locks the path that it reads; what nobody locks may be evicted, the least recently used leaf first. Time is a
count of look-ups, not a clock, so that ranks which do the same keep the same tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from sglang.srt.mem_cache.memory_pool import PADDING_SLOT


class Node:
    """A run of `tokens` with their `slots` (int64), below the run of `parent`. `num_users` requests lock it."""

    __slots__ = ("children", "last_use", "num_users", "parent", "serial", "slots", "tokens")

    def __init__(self, parent: Node | None, tokens: list[int], slots: np.ndarray, serial: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.serial = serial
        self.children: dict[int, Node] = {}
        self.num_users = 0
        self.last_use = 0

    @property
    def is_free_leaf(self) -> bool:
        """Whether it can be evicted now; the root and evicted nodes cannot."""
        return self.parent is not None and self.num_users == 0 and not self.children


class RadixCache:
    """The tree. It owns the slots that were inserted, until `evict` gives them back."""

    def __init__(self) -> None:
        self.root = Node(None, [], _no_slots(), 0)
        self.num_tokens = 0
        """Tokens in the tree."""
        self.num_evictable = 0
        """Those of them that no request locks."""
        self._num_nodes = 0
        self._num_uses = 0
        self._num_made = 0
        # (last use, serial, node) of free leaves. An entry whose node has changed meanwhile is passed over.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, tokens: list[int]) -> tuple[Node, np.ndarray]:
        """The longest prefix of `tokens` in the tree: its last node (the root for none), and its slots in order.

        It stays only if the node is locked before anything else is done.
        """
        node, _ = self._walk(tokens)
        return node, self.slots_of(node)

    def slots_of(self, node: Node) -> np.ndarray:
        """The slots of the prefix that ends with `node`, in order."""
        runs = []
        while node.parent is not None:
            runs.append(node.slots)
            node = node.parent
        return np.concatenate([_no_slots(), *reversed(runs)])

    def insert(self, tokens: list[int], slots: np.ndarray) -> tuple[Node, int]:
        """Take over `slots` `[n]` int64 of the n `tokens`, except for the prefix that the tree has already.

        Gives the node at the end of `tokens` and the length of that prefix, whose slots stay the caller's.
        """
        assert len(tokens) == len(slots) and PADDING_SLOT not in slots
        node, num_present = self._walk(tokens)
        if num_present < len(tokens):
            node = self._add(node, tokens[num_present:], slots[num_present:].copy())
        return node, num_present

    def lock(self, node: Node) -> None:
        """Keep the path to `node`."""
        while node.parent is not None:
            if node.num_users == 0:
                self.num_evictable -= len(node.tokens)
            node.num_users += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        while node.parent is not None:
            assert node.num_users > 0, "a prefix was unlocked twice"
            node.num_users -= 1
            if node.num_users == 0:
                self.num_evictable += len(node.tokens)
                self._offer(node)
            node = node.parent

    def evict(self, num_tokens: int) -> np.ndarray:
        """Forget exactly `num_tokens` tokens, from the ends of the least recently used leaves; gives their slots."""
        assert num_tokens <= self.num_evictable, "more must be evicted than nobody uses"
        slots = [_no_slots()]
        left = num_tokens
        while left > 0:
            last_use, _, node = heapq.heappop(self._leaves)
            if not node.is_free_leaf or node.last_use != last_use:
                continue
            count = min(left, len(node.tokens))
            slots.append(node.slots[len(node.tokens) - count :])
            left -= count
            if count < len(node.tokens):
                node.tokens, node.slots = node.tokens[:-count], node.slots[:-count].copy()
                self._offer(node)
            else:
                self._remove(node)
        self.num_tokens -= num_tokens
        self.num_evictable -= num_tokens
        return np.concatenate(slots)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root."""
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def _walk(self, tokens: list[int]) -> tuple[Node, int]:
        """The node where the longest known prefix of `tokens` ends, split off if need be, and its length."""
        self._num_uses += 1
        node, done = self.root, 0
        while done < len(tokens) and (child := node.children.get(tokens[done])) is not None:
            count = _num_common(child.tokens, tokens, done)
            if count < len(child.tokens):
                child = self._split(child, count)
            child.last_use = self._num_uses
            self._offer(child)
            node, done = child, done + count
        return node, done

    def _add(self, parent: Node, tokens: list[int], slots: np.ndarray) -> Node:
        self._num_made += 1
        self._num_nodes += 1
        node = Node(parent, tokens, slots, self._num_made)
        node.last_use = self._num_uses
        parent.children[tokens[0]] = node
        self.num_tokens += len(tokens)
        self.num_evictable += len(tokens)
        self._offer(node)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Put a new node of the first `length` tokens above `node`, which keeps the rest: who locks it locks both."""
        assert node.parent is not None
        self._num_made += 1
        self._num_nodes += 1
        upper = Node(node.parent, node.tokens[:length], node.slots[:length].copy(), self._num_made)
        upper.num_users, upper.last_use = node.num_users, node.last_use
        node.parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.slots = upper, node.tokens[length:], node.slots[length:].copy()
        upper.children[node.tokens[0]] = node
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Make `node` known as one that can be evicted, if it is."""
        if not node.is_free_leaf:
            return
        heapq.heappush(self._leaves, (node.last_use, node.serial, node))
        if len(self._leaves) > 64 + 4 * self._num_nodes:  # mostly entries that have become stale
            self._leaves = [(n.last_use, n.serial, n) for n in self.nodes() if n.is_free_leaf]
            heapq.heapify(self._leaves)


def _no_slots() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


def _num_common(run: list[int], tokens: list[int], start: int) -> int:
    """How many tokens of `run` stand in `tokens` from `start` on."""
    low, high = 0, min(len(run), len(tokens) - start)
    if run[:high] == tokens[start : start + high]:
        return high
    while high - low > 1:  # the first `low` agree, and the first `high` do not
        middle = (low + high) // 2
        if run[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
