"""The index that routers ask which replica has how much of a prompt: beside sets, and beside the
ledgers of simulated replicas. What a router remembers of prompts: beside a plain list."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.golden.golden_runs import traced
from tests.parameters import mostly_nightly
from tests.policies.event_checks import Listener
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.registry import (
    PolicySpec,
    ledger_class,
    ledger_names,
    parse_policy,
    policy_names,
)
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.fleet.prefix_index import PrefixIndex, RecentPrefixes
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation

LEDGERS = [name for name in ledger_names() if ledger_class(name).publishes_events]
SPECS = [*policy_names(), "vllm:scheduling=priority", "vllm-v0:preemption_mode=swap"]
CACHING = [spec for spec in SPECS if parse_policy(spec).policy.uses_prefix_cache]
PAIRS = [(spec, ledger) for spec in CACHING for ledger in LEDGERS]
# Policies that try, swap or recompute, each on a ledger in its turn; the slow tests have all pairs.
SAMPLE = [
    (spec, LEDGERS[i % len(LEDGERS)])
    for i, spec in enumerate(("conserve", "echo", "mlfq", "vllm", "vllm-v0:preemption_mode=swap"))
]


# -- by itself -------------------------------------------------------------------------------------
def ids(*contents: int) -> np.ndarray:
    return np.array(contents, np.int64)


def test_the_longest_prefix_ends_at_the_first_block_that_is_not_there():
    index = PrefixIndex()
    index.add(0).stored(ids(3, 4, 6))
    assert index.longest_prefix(0, ids(3, 4, 5, 6)) == 2
    assert index.longest_prefix(0, ids(5, 3, 4)) == 0
    assert index.longest_prefix(0, ids(6, 4, 3)) == 3
    assert index.longest_prefix(0, ids()) == 0
    assert index.longest_prefix(0, ids(3, 10**9)) == 1  # a text that nobody has had yet


def test_replicas_have_caches_of_their_own():
    index = PrefixIndex()
    index.add(0).stored(ids(0, 1, 2))
    second = index.add(7)
    second.stored(ids(0, 1))
    second.removed(ids(1))
    assert index.replicas == [0, 7]
    assert index.longest_prefixes(ids(0, 1, 2, 3)) == {0: 3, 7: 1}
    assert index.contents(7).tolist() == [0]


def test_a_replica_that_left_comes_again_with_nothing():
    """And what its old engine may still tell is not its own."""
    index = PrefixIndex()
    old = index.add(1)
    old.stored(ids(0, 1))
    with pytest.raises(ValueError, match="replica 1 is in the prefix index already"):
        index.add(1)
    index.remove(1)
    assert index.replicas == [] and index.longest_prefixes(ids(0)) == {}
    with pytest.raises(KeyError):
        index.longest_prefix(1, ids(0))
    new = index.add(1)
    old.stored(ids(2))
    assert index.longest_prefix(1, ids(2)) == 0
    new.stored(ids(2))
    assert index.longest_prefix(1, ids(2)) == 1


@examples(100)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.sets(st.integers(0, 3000), min_size=1))
    ),
    prompts=st.lists(st.lists(st.integers(0, 3000)), max_size=5),
)
def test_the_index_is_a_set_of_contents_a_replica(events, prompts):
    index, sets = PrefixIndex(), [set(), set(), set()]
    feeds = [index.add(replica) for replica in range(3)]
    for replica, comes, names in events:
        changed = names - sets[replica] if comes else names & sets[replica]
        if changed:
            (feeds[replica].stored if comes else feeds[replica].removed)(ids(*sorted(changed)))
        sets[replica] = sets[replica] | names if comes else sets[replica] - names
    held = [sorted(names) for names in sets]
    for prompt in [*prompts, *held, held[0] + held[1]]:
        for replica, names in enumerate(sets):
            there = next((i for i, name in enumerate(prompt) if name not in names), len(prompt))
            assert index.longest_prefix(replica, ids(*prompt)) == there
    assert [index.contents(replica).tolist() for replica in range(3)] == held


# -- beside simulated replicas ---------------------------------------------------------------------
class Compared:
    """Asks after every plan and every outcome of an engine."""

    def __init__(self, core: EngineCore, index: PrefixIndex, replica: int) -> None:
        self.listener = Listener(core.ledger, index, replica)
        self.listener.compare()
        self.times = 0
        self._plan, self._complete = core.plan, core.complete
        core.plan, core.complete = self.plan, self.complete

    def plan(self, now: float) -> StepPlan:
        plan = self._plan(now)
        self.compare()
        return plan

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        gaps = self._complete(plan, outcome)
        self.compare()
        return gaps

    def compare(self) -> None:
        self.times += 1
        self.listener.compare()


class Leaving(Simulation):
    """A run in which eight clients leave at random."""

    def __init__(self, inputs: Inputs, spec: PolicySpec, seed: int) -> None:
        super().__init__(inputs, spec)
        self.left: list[int] = []
        rng = np.random.default_rng([seed, 7])
        self.clock.process(self._leave(np.sort(rng.exponential(0.25, 8)), rng))

    def _leave(self, times: np.ndarray, rng: np.random.Generator):
        for time in times.tolist():
            yield self.clock.at(time, BEFORE_STEPS)
            engine = self.engines[int(rng.integers(len(self.engines)))]
            here = np.flatnonzero(engine.core.requests.end == End.NONE)
            draw = rng.random()  # in any case, so that the next client is the same one
            if len(here):
                self.left.append(int(here[int(draw * len(here))]))
                engine.withdraw(self.left[-1], End.DISCONNECTED)


def compared(run: Simulation) -> list[Compared]:
    """The run, with an index beside its replicas."""
    index = PrefixIndex()
    beside = [Compared(engine.core, index, i) for i, engine in enumerate(run.engines)]
    run.run()
    assert index.replicas == list(range(len(run.engines)))
    assert all(one.times > 30 for one in beside)
    return beside


def crowded(policy: str, ledger: str, seed: int, **settings) -> tuple[Leaving, list[Compared]]:
    """A crowd that shares prefixes, clients that leave, memory for a fifth of them."""
    spec = replace(parse_policy(policy), kv=ledger)
    config = CROWDED.model_copy(update={"prefix_caching": True, **settings})
    inputs = Inputs(config, crowd(seed), resolve_hardware(config), (spec,), ())
    run = Leaving(inputs, spec, seed)
    return run, compared(run)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly(PAIRS, *SAMPLE))
def test_the_index_finds_what_the_ledger_finds(policy, ledger):
    run, (beside,) = crowded(policy, ledger, seed=2)
    assert run.left
    assert beside.listener.stored_blocks > beside.listener.removed_blocks > 20


ASYNCHRONOUS = [pair for pair in PAIRS if parse_policy(pair[0]).policy.asynchronous]


@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly(ASYNCHRONOUS, ("vllm", "task-aware")))
def test_the_index_finds_what_the_ledger_finds_when_steps_are_planned_ahead(policy, ledger):
    _, beside = crowded(policy, ledger, seed=2, async_scheduling=True, replicas=2)
    assert sum(one.listener.removed_blocks for one in beside) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly(PAIRS, *SAMPLE[::4]))
def test_steps_one_by_one_on_three_replicas(policy, ledger):
    _, beside = crowded(policy, ledger, seed=3, exact=True, replicas=3)
    assert len(beside) == 3 and all(one.listener.stored_blocks for one in beside)


@pytest.mark.slow
def test_the_runs_try_and_take_back_swap_and_lose_what_others_could_find():
    """What the tests above are for does happen in them."""
    taken_back = swapped = 0
    for policy, ledger in SAMPLE:
        run, (beside,) = crowded(policy, ledger, seed=2)
        taken_back += beside.listener.unsaid
        swapped += int(run.engines[0].core.requests.swaps.sum())
    assert taken_back > 0 and swapped > 0


def test_a_policy_without_prefix_cache_has_no_events():
    _, (beside,) = crowded("bros", "paged", seed=1)
    assert not beside.listener.stored_blocks


@pytest.mark.slow
def test_the_index_finds_what_the_ledger_finds_on_a_trace():
    """Prompts of hundreds of blocks, conversations whose turns begin alike."""
    inputs = traced(
        "vllm", trace="mooncake", requests=50, seed=2, num_blocks=1200, cap_length=12_000
    )
    (beside,) = compared(Simulation(inputs, inputs.policies[0]))
    assert beside.listener.removed_blocks > 1000


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
