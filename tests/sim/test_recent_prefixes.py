"""What a router remembers of the prompts that it sent: beside a plain list of what was used."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.sim.fleet.prefix_index import RecentPrefixes

# Paths of a tree: a document, how much of it, and a tail of its own.
PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=40
)


def path(document: int, length: int, tail: int) -> np.ndarray:
    """Names of blocks that say all that comes before them."""
    shared = [100 * document + i for i in range(length)]
    return np.array([*shared, *(5000 + 70 * (7 * document + length) + i for i in range(tail))])


class Plain:
    """The same with a dictionary: content -> number of its last use and place in that prompt."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.uses, self.number = capacity, {}, 0

    def sent(self, contents) -> None:
        self.number += 1
        self.uses |= {int(c): (self.number, -i) for i, c in enumerate(contents)}
        while len(self.uses) > self.capacity:  # the oldest prompt's last block
            del self.uses[min(self.uses, key=self.uses.__getitem__)]

    def longest_prefix(self, contents) -> int:
        held = [int(c) in self.uses for c in contents]
        return held.index(False) if False in held else len(held)


@examples(200)
@given(PROMPTS, st.integers(1, 30))
def test_it_keeps_what_a_list_of_uses_says(prompts, capacity):
    recent, plain = RecentPrefixes(), Plain(capacity)
    recent.add(0, capacity)
    for given_prompt in prompts:
        contents = path(*given_prompt)
        assert recent.longest_prefix(0, contents, 0.0) == plain.longest_prefix(contents)
        recent.sent(0, contents, 0.0)
        if len(contents):
            plain.sent(contents)
        assert recent.size(0) == len(plain.uses) <= capacity


def test_replicas_are_apart_and_go_with_their_prompts():
    recent = RecentPrefixes()
    for replica in (0, 1):
        recent.add(replica, 10)
    contents = path(0, 4, 0)
    recent.sent(1, contents, 0.0)
    assert [recent.longest_prefix(i, contents, 0.0) for i in (0, 1)] == [0, 4]
    recent.remove(1)
    recent.sent(1, contents, 0.0)  # on its way when the replica went
    recent.add(1, 10)
    assert recent.longest_prefix(1, contents, 0.0) == 0


def test_what_was_used_again_lives_longer():
    recent = RecentPrefixes(ttl_s=10.0)
    recent.add(0, 100)
    recent.sent(0, path(0, 6, 0), 0.0)
    recent.sent(0, path(0, 3, 0), 8.0)
    assert recent.longest_prefix(0, path(0, 6, 0), 10.0) == 6
    assert recent.longest_prefix(0, path(0, 6, 0), 12.0) == 3
    assert recent.longest_prefix(0, path(0, 6, 0), 19.0) == 0 == recent.size(0)


def test_it_remembers_no_more_prompts_than_it_needs():
    """One document a hundred thousand times takes no more memory than once."""
    recent = RecentPrefixes()
    recent.add(0, 1000)
    for number in range(20_000):
        recent.sent(0, path(number % 2, 6, 0), 0.0)
    assert recent.size(0) == 12
    assert len(recent._recent[0]._prompts) < 2000
