"""Offline requests that wait in the fleet: replicas pull families of them, and give back what they
have not begun (docs/fleet.md)."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.harness import same_rows
from tests.sim.test_fleet_policies import at, made
from tests.sim.troubled import TABLES, troubled
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import PolicySpec, parse_policy, policy_names
from twinserve.policies.requests import End, State
from twinserve.sim.fleet.pool import FamilyPool
from twinserve.sim.fleet.replica import Life
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.plain import Spread
from twinserve.sim.fleet.view import FleetView, Signals
from twinserve.sim.setup.audit import crowd
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import PrefixBlocks, Workload

BLOCK = 8
SERVED = ("echo", "vllm")


def documents(
    seed: int = 0, families: int = 10, questions: int = 5, online: int = 10, late: int = 0
) -> Workload:
    """Offline questions on documents, in any order, all there at the start but `late` ones a
    document, which come in the next half a second; and online requests. Request `dD-Q` is question
    Q on document D."""
    rng = np.random.default_rng(seed)
    asked = [(d, q) for d in range(families) for q in range(questions)]
    rng.shuffle(asked)
    arrival = [float(rng.random() * 0.5 if q >= questions - late else 0.0) for _, q in asked]
    lengths = rng.integers(2, 6, families)  # blocks of a document
    texts, prompt = [], []
    for number, (d, _) in enumerate(asked):
        texts.append(np.r_[1000 * d + np.arange(lengths[d]), 10**6 + number])
        prompt.append(len(texts[-1]) * BLOCK)
    for number in range(online):
        arrival.append(float(rng.random() * 0.3))
        texts.append(2 * 10**6 + 100 * number + np.arange(rng.integers(1, 8)))
        prompt.append(len(texts[-1]) * BLOCK)
    ids = np.unique(np.concatenate(texts), return_inverse=True)[1].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    service_class = np.r_[np.ones(len(asked), np.int8), np.zeros(online, np.int8)]
    unsorted = Workload.build(
        arrival,
        prompt,
        rng.integers(5, 40, len(arrival)),
        service_class=service_class,
        ids=[f"d{d}-{q}" for d, q in asked] + [f"online-{i}" for i in range(online)],
        prefix=PrefixBlocks(ids, offsets, BLOCK),
    )
    return take_rows(unsorted, np.argsort(arrival, kind="stable"))


def served(policy: str, workload: Workload, window: int | None, replicas: int = 2, **more):
    run = made(policy, workload, replicas, offline_window=window, **more)
    run.run()
    return run


def is_offline(request: Request) -> bool:
    return request.values["service_class"] == 1


def families_of(run: Simulation) -> dict[str, set[int]]:
    """Document -> replicas that had questions on it."""
    found: dict[str, set[int]] = defaultdict(set)
    for request in run.fleet.requests:
        if is_offline(request):
            document = request.id.partition("-")[0]
            found[document] |= {p.replica.index for p in request.placements}
    return dict(found)


class Watched:
    """Looks at the pool whenever a replica plans."""

    def __init__(self, run: Simulation) -> None:
        self.run, self.waited = run, 0
        for engine in run.engines:
            self._watch(engine.core)

    def _watch(self, core) -> None:
        plan = core.plan

        def planning(now):
            self.look()
            return plan(now)

        core.plan = planning

    def look(self) -> None:
        """While anybody waits, each replica that is up has its window's worth."""
        pool, here = self.run.fleet._pool, self.here()
        if not len(pool):
            return
        self.waited += 1
        for replica in self.run.fleet.replicas:
            if replica.life is Life.UP:
                assert here[replica.index] >= pool.window

    def here(self) -> list[int]:
        """Unfinished offline requests of each replica, counted anew."""
        counts = []
        for replica in self.run.fleet.replicas:
            table = replica.engine.core.requests
            counts.append(int(((table.state != State.FINISHED) & (table.service_class == 1)).sum()))
        return counts


# -- off, or of no consequence ---------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("policy", SERVED)
@pytest.mark.parametrize("workload", [documents(1, late=2), crowd(3)], ids=["documents", "crowd"])
def test_with_one_replica_and_a_large_window_nothing_changes(policy, workload):
    plain, pooled = (served(policy, workload, window, 1) for window in (None, 10_000))
    same_rows(plain.rows(), pooled.rows())
    for table in TABLES:
        assert getattr(plain.rows(), table).equals(getattr(pooled.rows(), table))


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="an offline window of 0 requests; give one at least"):
        made("echo", documents(), offline_window=0)


def test_a_policy_that_cannot_forget_a_request_is_refused():
    class Stubborn(VllmPolicy):
        name = "stubborn"

        @classmethod
        def withdraws(cls):
            return False

    run = made("vllm", documents(), offline_window=4)
    with pytest.raises(PolicyError, match="'stubborn' has no on_withdraw"):
        run.add(Description(run.inputs.hardware, PolicySpec("stubborn", own=Stubborn)))


# -- families --------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [1, 4, 12])
@pytest.mark.parametrize("policy", SERVED)
def test_a_family_is_never_split(policy, window):
    run = served(policy, documents(3, families=12, late=2), window, 3)
    found = families_of(run)
    assert all(len(replicas) == 1 for replicas in found.values())
    assert set.union(*found.values()) == {0, 1, 2}
    assert all(request.end is End.COMPLETED for request in run.fleet.requests)


def test_without_the_pool_they_are_split():
    assert any(
        len(replicas) > 1 for replicas in families_of(served("echo", documents(3), None)).values()
    )


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("policy", SERVED)
def test_no_replica_lacks_offline_work_while_the_pool_has_any(policy, window):
    run = made(policy, documents(4, families=16), 2, offline_window=window)
    watched = Watched(run)
    run.run()
    assert watched.waited > 20


def test_a_replica_pulls_no_more_than_its_window_and_the_family_that_fills_it():
    questions, window = 5, 7
    run = made("vllm", documents(5, questions=questions), offline_window=window)
    most = []
    watched = Watched(run)
    look = watched.look
    watched.look = lambda: (look(), most.append(max(watched.here())))
    run.run()
    assert window <= max(most) < window + questions


def test_requests_of_a_session_are_a_family_where_there_is_no_text():
    n = 12
    workload = Workload.build(
        np.zeros(n), [20] * n, [10] * n, service_class=np.ones(n), group=np.arange(n) % 3,
        group_names=["a", "b", "c"],
    )  # fmt: skip
    run = served("vllm", workload, 2)
    homes = defaultdict(set)
    for request in run.fleet.requests:
        homes[request.group] |= {p.replica.index for p in request.placements}
    assert all(len(replicas) == 1 for replicas in homes.values()) and len(homes) == 3
    assert set.union(*homes.values()) == {0, 1}


# -- replicas that leave ---------------------------------------------------------------------------
def leaves(how: str, migrates: bool, policy: str = "vllm", when: float = 0.1):
    """Two replicas with large windows; the first leaves. Returns the run, and the numbers of the
    offline requests that it had and had not begun, and had begun."""
    run = made(policy, documents(7, families=14), offline_window=30, migrates=migrates)
    seen: dict[str, set[int]] = {}

    def leave():
        replica = run.fleet.replicas[0]
        table = replica.engine.core.requests
        rows = [r for r in range(len(table)) if table.end[r] == End.NONE]
        rows = [r for r in rows if is_offline(replica.requests[r])]
        idle = [r for r in rows if table.state[r] == State.WAITING and not table.output_tokens[r]]
        seen["idle"] = {replica.requests[r].number for r in idle}
        seen["begun"] = {replica.requests[r].number for r in set(rows) - set(idle)}
        run.fleet.fail(0) if how == "fail" else run.fleet.drain(0, 0.05 if how == "grace" else None)

    at(run, when, leave)
    run.run()
    assert seen["idle"] and seen["begun"]
    requests = run.fleet.requests
    return run, [requests[n] for n in seen["idle"]], [requests[n] for n in seen["begun"]]


def stays(request: Request) -> list[int]:
    return [placement.replica.index for placement in request.placements]


@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("policy", SERVED)
def test_what_a_draining_replica_has_not_begun_is_served_by_the_other(policy, migrates):
    run, idle, begun = leaves("drain", migrates, policy)
    assert all(stays(request) == [0, 1] for request in idle)
    assert all(stays(request) == [0] for request in begun)
    assert all(request.end is End.COMPLETED for request in run.fleet.requests)
    # and at once: the replica is down when it has served what it had begun
    ended = max(request.ended_s for request in begun)
    online = [r for r in run.fleet.requests if not is_offline(r) and stays(r) == [0]]
    assert run.fleet.replicas[0].since_s[Life.DOWN] == max(
        ended, *(request.ended_s for request in online)
    )


def test_what_has_not_left_when_the_grace_ends_still_returns():
    """The fleet does not migrate, and the grace ends within the step in which they are to leave."""
    run = made("vllm", documents(7, families=14), offline_window=30)
    returned = []

    def leave():
        replica = run.fleet.replicas[0]
        run.fleet.drain(0, 1e-9)
        table = replica.engine.core.requests
        returned.extend(replica.requests[r] for r in np.flatnonzero(table.end == End.MOVED))

    at(run, 0.1, leave)
    run.run()
    assert returned and all(request.end is End.COMPLETED for request in returned)
    assert any(request.end is End.FAILED for request in run.fleet.requests)


def test_a_client_that_leaves_the_pool_is_gone_at_once():
    run = made("vllm", documents(4, families=16), offline_window=2)
    gone = []

    def leave():
        waiting = [r for r in run.fleet.requests if r.number in run.fleet._pool]
        for request in waiting[::2]:
            assert run.fleet.withdraw(request, End.DISCONNECTED)
            assert not run.fleet.withdraw(request, End.DISCONNECTED)
            assert (request.end, request.ended_s) == (End.DISCONNECTED, run.clock.now)
        gone.extend(waiting[::2])

    at(run, 0.05, leave)
    run.run()
    assert len(gone) > 10 and not any(request.placements for request in gone)
    others = [r for r in run.fleet.requests if r not in gone]
    assert all(request.end is End.COMPLETED for request in others)


def test_what_waits_when_no_replica_is_left_has_failed_since_then():
    run = made("vllm", documents(4, families=16), offline_window=2)
    at(run, 0.1, lambda: (run.fleet.fail(0), run.fleet.fail(1)))
    run.run()
    failed = [r for r in run.fleet.requests if r.end is End.FAILED]
    assert not run.fleet.active and sum(not r.placements for r in failed) > 20
    assert {r.ended_s for r in failed if r.arrival_s < 0.1} == {0.1}


@pytest.mark.slow
@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), "echo", "bros"))
def test_a_troubled_fleet_with_a_pool_of_its_own(policy, migrates):
    troubled(parse_policy(policy), 3, 14, migrates, offline_window=2)


@pytest.mark.slow
@pytest.mark.parametrize("migrates", [False, True])
def test_a_pool_beside_one_order_of_applications(migrates):
    spec = parse_policy("justitia:predictor=perfect")
    troubled(spec, 4, 20, migrates, router=Spread, offline_window=2)


@pytest.mark.nightly
@examples(20)
@given(seed=st.integers(0, 10**6), window=st.integers(1, 20), ahead=st.booleans())
def test_random_troubles_of_a_fleet_with_a_pool(seed, window, ahead):
    policy = ("echo", "vllm", "echo:benefit=offline")[seed % 3]
    spec = parse_policy(policy)
    ahead = ahead and spec.policy.asynchronous
    troubled(spec, seed, 20, seed % 2 == 0, offline_window=window, async_scheduling=ahead)


# -- by itself -------------------------------------------------------------------------------------
@examples(60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 4)),
            st.tuples(st.just("leave"), st.integers(0, 30)),
            st.tuples(st.just("end"), st.integers(0, 2)),
            st.tuples(st.just("down"), st.integers(0, 2)),
        ),
        max_size=40,
    ),
    st.integers(1, 4),
)
def test_the_pool_is_a_list_of_families(events, window):
    """Beside lists that are searched from the front."""
    pool, view = FamilyPool(window), FleetView(0.0, [0, 1, 2], [True] * 3, [0] * 3, Signals(), None)
    waiting, homes, here, number = [], {}, [0, 0, 0], 0
    for what, which in events:
        if what == "add":
            request = Request(f"r{number}", 1, 0.0, {"service_class": 1}, affinity=which - 1)
            request.number, number = number, number + 1
            home = homes.get(request.affinity) if request.affinity >= 0 else None
            up = home is not None and view.takes[home]
            assert pool.home(request, view) == (home if up else None)
            if up:
                pool.came(home)
                here[home] += 1
            else:
                pool.add(request, 0.0)
                waiting.append(request)
        elif what == "leave" and waiting:
            assert pool.remove(gone := waiting.pop(which % len(waiting)))
            assert not pool.remove(gone)
        elif what == "end" and here[which]:
            pool.left(which)
            here[which] -= 1
        elif what == "down":
            view.takes[which], view.up = False, [i for i in view.up if i != which]
        while (pulled := pool.pull(view)) is not None:
            replica, family = pulled
            assert here[replica] == min(here[i] for i in view.up) < window
            head = waiting[0]
            alike = [r for r in waiting if r is head or r.affinity == head.affinity >= 0]
            assert family == alike
            waiting = [r for r in waiting if r not in alike]
            homes[head.affinity] = replica
            for _ in family:
                pool.came(replica)
            here[replica] += len(family)
        assert len(pool) == len(waiting)
        assert not waiting or all(here[i] >= window for i in view.up)
    assert [request for request, _ in pool.clear()] == waiting and not pool
