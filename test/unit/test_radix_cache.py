"""The tree of prefixes: what is found, shared, kept and evicted, against a model that keeps whole prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.radix_cache import Node, RadixCache


class Filled:
    """A cache whose slots are numbered in the order in which they were handed out."""

    def __init__(self, *prefixes: list[int]) -> None:
        self.cache = RadixCache()
        self.next_slot = 1
        for prefix in prefixes:
            self.add(prefix)

    def add(self, tokens: list[int]) -> Node:
        """Insert as a request would: slots of its own for what was not found."""
        _, found = self.cache.match(tokens)
        num_new = len(tokens) - len(found)
        new = np.arange(self.next_slot, self.next_slot + num_new)
        self.next_slot += num_new
        node, num_present = self.cache.insert(tokens, np.concatenate([found, new]))
        assert num_present == len(found)
        return node

    def found(self, tokens: list[int]) -> list[int]:
        return self.cache.match(tokens)[1].tolist()


def test_the_longest_common_prefix_is_found_in_order():
    filled = Filled([1, 2, 3, 4], [1, 2, 9], [5])
    assert filled.found([1, 2, 3, 4, 7]) == [1, 2, 3, 4]
    assert filled.found([1, 2, 9, 9]) == [1, 2, 5]
    assert filled.found([1, 7]) == [1]
    assert filled.found([2]) == [] and filled.found([]) == []
    assert filled.cache.num_tokens == filled.cache.num_evictable == 6


def test_slots_of_tokens_that_are_there_already_stay_with_the_caller():
    filled = Filled([1, 2, 3])
    _, num_present = filled.cache.insert([1, 2, 8], np.array([10, 11, 12]))
    assert num_present == 2
    assert filled.found([1, 2, 8]) == [1, 2, 12]


def test_what_is_locked_is_not_evicted_and_the_rest_is():
    filled = Filled([1, 2, 3], [1, 2, 4, 5])
    node, _ = filled.cache.match([1, 2, 3])
    filled.cache.lock(node)
    assert filled.cache.num_evictable == 2
    assert sorted(filled.cache.evict(2).tolist()) == [4, 5]
    assert filled.found([1, 2, 3]) == [1, 2, 3] and filled.found([1, 2, 4]) == [1, 2]
    with pytest.raises(AssertionError):
        filled.cache.evict(1)
    filled.cache.unlock(node)
    assert filled.cache.num_evictable == 3
    with pytest.raises(AssertionError, match="twice"):
        filled.cache.unlock(node)


def test_a_lock_holds_when_its_run_is_split_by_another_prefix():
    filled = Filled([1, 2, 3, 4])
    node, _ = filled.cache.match([1, 2, 3, 4])
    filled.cache.lock(node)
    filled.add([1, 2, 7])
    assert filled.cache.num_evictable == 1
    filled.cache.unlock(node)
    assert filled.cache.num_evictable == 5
    assert sorted(filled.cache.evict(5).tolist()) == [1, 2, 3, 4, 5]
    assert not list(filled.cache.nodes())


def test_the_least_recently_used_leaf_goes_first_and_from_its_end():
    filled = Filled([1, 2, 3], [4, 5, 6], [7, 8, 9])
    filled.found([1, 2, 3])
    assert filled.cache.evict(2).tolist() == [5, 6]
    assert filled.found([4]) == [4]
    assert filled.cache.evict(4).tolist() == [7, 8, 9, 3]
    assert filled.found([1, 2, 3]) == [1, 2]


def test_using_one_leaf_often_keeps_the_list_of_leaves_short():
    filled = Filled([1, 2, 3], [4])
    for _ in range(1000):
        filled.found([1, 2, 3])
    assert len(filled.cache._leaves) < 200
    assert filled.cache.evict(1).tolist() == [4]


class PrefixModel:
    """What the tree ought to hold: every known prefix as a tuple of tokens, with the slot of its last token, when it
    was last used, and how many lock it.
    """

    def __init__(self) -> None:
        self.slot: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.users: dict[tuple[int, ...], int] = {}
        self.time = 0

    def touch(self, tokens: list[int]) -> int:
        self.time += 1
        length = 0
        while length < len(tokens) and tuple(tokens[: length + 1]) in self.slot:
            length += 1
            self.used[tuple(tokens[:length])] = self.time
        return length

    def insert(self, tokens: list[int], slots: np.ndarray) -> int:
        length = self.touch(tokens)
        for i in range(length, len(tokens)):
            key = tuple(tokens[: i + 1])
            self.slot[key], self.used[key], self.users[key] = int(slots[i]), self.time, 0
        return length

    def lock(self, tokens: list[int], change: int) -> None:
        for i in range(len(tokens)):
            self.users[tuple(tokens[: i + 1])] += change

    def oldest_leaves(self) -> set[int]:
        """The slots of which one must go next. Those of equal age came with one insert; the tree may take any."""
        leaves = [
            key
            for key in self.slot
            if self.users[key] == 0 and not any(k[:-1] == key for k in self.slot if len(k) == len(key) + 1)
        ]
        oldest = min(self.used[key] for key in leaves)
        return {self.slot[key] for key in leaves if self.used[key] == oldest}

    def drop(self, slot: int) -> None:
        key = next(key for key, known in self.slot.items() if known == slot)
        assert self.users[key] == 0 and not any(k[: len(key)] == key and len(k) > len(key) for k in self.slot)
        del self.slot[key], self.used[key], self.users[key]


prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), prefixes),
        st.tuples(st.just("match"), prefixes),
        st.tuples(st.just("lock"), prefixes),
        st.tuples(st.just("unlock"), st.integers(0, 20)),
        st.tuples(st.just("evict"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_any_use_leaves_what_the_model_says(todo):
    cache, model, next_slot, locks = RadixCache(), PrefixModel(), 1, []
    for name, value in todo:
        if name == "insert":
            slots = np.arange(next_slot, next_slot + len(value))
            next_slot += len(value)
            assert cache.insert(value, slots)[1] == model.insert(value, slots)
        elif name == "match":
            length = model.touch(value)
            expected = [model.slot[tuple(value[: i + 1])] for i in range(length)]
            assert cache.match(value)[1].tolist() == expected
        elif name == "lock":
            node, found = cache.match(value)
            assert len(found) == model.touch(value)
            cache.lock(node)
            model.lock(value[: len(found)], 1)
            locks.append((node, value[: len(found)]))
        elif name == "unlock" and locks:
            node, tokens = locks.pop(value % len(locks))
            cache.unlock(node)
            model.lock(tokens, -1)
        elif name == "evict":
            for _ in range(min(value, cache.num_evictable)):
                oldest = model.oldest_leaves()
                (slot,) = cache.evict(1).tolist()
                assert slot in oldest, "a leaf that was used later than another went first"
                model.drop(slot)
        assert cache.num_tokens == len(model.slot)
        assert cache.num_evictable == sum(1 for users in model.users.values() if users == 0)
    for node, _ in locks:
        cache.unlock(node)
    slots = cache.evict(cache.num_tokens).tolist()
    assert sorted(slots) == sorted(model.slot.values()) and not list(cache.nodes())
