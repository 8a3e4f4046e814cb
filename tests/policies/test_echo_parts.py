"""The parts of Echo's scheduler by themselves: costs, forecasts, the offline pool."""

import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.echo_runs import BY_HAND
from twinserve.policies.echo.cost import EchoCost, ModelCost, echo_estimator, step_cost
from twinserve.policies.echo.offline import ArrivalForecast, MemoryForecast, Window
from twinserve.policies.echo.pool import FcfsPool, OfflinePool
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.task_aware.ledger import TaskAwareLedger
from twinserve.policies.parts.estimators import LinearEstimator, ModelEstimator
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.profiles.forms.echo import EchoModel
from twinserve.profiles.forms.sums import BatchSumsModel
from twinserve.profiles.profile import load_profile

LINEAR = BrosLinearModel(PhaseCost(2e-4, 1e-8, 1e-3), PhaseCost(5e-5, 3e-7, 2e-3))


# -- cost ------------------------------------------------------------------------------------------
def test_eqs_6_to_8_by_hand():
    """Prompts of 4 and of 2 on 10 tokens: 0.8 + 0.4 s; decodes with 5 and 9 resident tokens: 0.4 +
    0.010 s."""
    cost = EchoCost(BY_HAND.model)
    assert cost.seconds([(4, 0), (2, 10)], 0, 0, 0) == pytest.approx(1.2)
    assert cost.seconds([], 2, 14, 9) == pytest.approx(0.41)
    assert cost.seconds([(4, 0), (2, 10)], 2, 14, 9) == pytest.approx(0.5 * 1.2 + 0.5 * 0.41)
    assert cost.decode_run(2, 14, 9, 3).tolist() == [
        cost.seconds([], 2, 14 + 2 * j, 9 + j) for j in range(3)
    ]


models = st.builds(
    EchoModel,
    alpha=st.sampled_from([0.0, 1e-9, 8e-8]),
    beta=st.sampled_from([1e-5, 8e-5]),
    c=st.sampled_from([0.0, 0.015]),
    gamma=st.sampled_from([0.0, 1e-7, 1e-6]),
    delta=st.just(1e-7),
    lambda_=st.sampled_from([0.3, 0.5, 0.96, 1.0, 1.3]),
    decode_base_s=st.sampled_from([0.0, 0.017]),
    mu=st.sampled_from([None, None, 0.0, 0.4, 1.0]),
)


@examples(150)
@given(
    model=models,
    prefills=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=2),
    n=st.sampled_from([0, 3, 40]),
    resident=st.sampled_from([0, 100, 20_000]),
    limit=st.integers(1, 3000),
    bound=st.sampled_from([0.001, 0.01, 0.02, 0.05, 0.3, 1.0]),
)
def test_the_longest_chunk_fits_and_one_token_more_does_not(
    model, prefills, n, resident, limit, bound
):
    cost, decodes = EchoCost(model), (n, n * 1000, 1500) if n else (0, 0, 0)
    chunk = cost.longest_chunk(prefills, decodes, resident, limit, bound)
    assert 0 <= chunk <= limit
    seconds = [cost.seconds([*prefills, (c, resident)], *decodes) for c in range(chunk, chunk + 3)]
    if chunk:
        assert seconds[0] <= bound
    if bound >= cost.seconds((), *decodes) and chunk + 2 <= limit:
        assert seconds[2] > bound  # within a token, by rounding


def test_every_estimator_will_do():
    swap = SwapTimeModel(1e-9)
    for estimator in (LinearEstimator(LINEAR, swap), ModelEstimator(LINEAR, swap)):
        cost = step_cost(estimator, "echo")
        assert isinstance(cost, ModelCost) and cost.model is LINEAR
    assert isinstance(step_cost(BY_HAND, "echo"), EchoCost)
    with pytest.raises(PolicyError, match="no estimator"):
        step_cost(None, "echo")


def test_a_model_cost_is_that_of_the_composition():
    cost = ModelCost(LINEAR)
    assert cost.seconds([], 0, 0, 0) == 0.0
    assert cost.seconds([(30, 12)], 2, 50, 40) == pytest.approx(
        2e-4 * 30 + 1e-8 * 30 * 42 + 1e-3 + 5e-5 * 2 + 3e-7 * 2 * 52 + 2e-3
    )
    # 1 ms and 0.2 ms a token, and a little
    assert cost.longest_chunk([], (0, 0, 0), 0, 100, 0.005) == 19
    assert cost.longest_chunk([], (0, 0, 0), 0, 100, 0.001) == 0


STEPWISE = load_profile("llama-3.1-8b@a100-40g").model()


@examples(100)
@given(
    prefills=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=2),
    n=st.sampled_from([0, 3, 40]),
    resident=st.sampled_from([0, 100, 20_000]),
    limit=st.integers(1, 8000),
    bound=st.floats(0.001, 1.0),
)
def test_any_model_is_asked_a_few_times_for_its_longest_chunk(prefills, n, resident, limit, bound):
    cost, decodes = ModelCost(STEPWISE), (n, n * 1000, 1500) if n else (0, 0, 0)
    with mock.patch.object(cost, "seconds", wraps=cost.seconds) as asked:
        chunk = cost.longest_chunk(prefills, decodes, resident, limit, bound)
    assert asked.call_count <= 2 * limit.bit_length() + 4
    if chunk:
        assert cost.seconds([*prefills, (chunk, resident)], *decodes) <= bound
    if chunk < limit:
        assert cost.seconds([*prefills, (chunk + 1, resident)], *decodes) > bound


@examples(150)
@given(
    terms=st.tuples(
        st.sampled_from([0.0, 0.012]),
        st.sampled_from([0.0, 1.7e-9, 3e-6]),
        st.sampled_from([0.0, 5.9e-5]),
        st.sampled_from([0.0, 1.1e-7]),
        st.sampled_from([0.0, 9.9e-5]),
    ),
    prefills=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=2),
    n=st.sampled_from([0, 3, 40]),
    resident=st.sampled_from([0, 100, 20_000]),
    limit=st.integers(1, 8000),
    bound=st.one_of(st.floats(0.001, 1.0), st.integers(0, 8000)),
)
def test_a_batch_of_sums_costs_what_its_composition_does(
    terms, prefills, n, resident, limit, bound
):
    model, decodes = BatchSumsModel(*terms), (n, n * 1000, 1500) if n else (0, 0, 0)
    sums = step_cost(ModelEstimator(model, SwapTimeModel(1e-9)), "echo")
    any_model = ModelCost(model)
    assert sums.seconds(prefills, *decodes) == any_model.seconds(prefills, *decodes)
    if isinstance(bound, int):  # a bound that is met to the last bit
        bound = any_model.seconds([*prefills, (bound + 1, resident)], *decodes)
    found = sums.longest_chunk(prefills, decodes, resident, limit, bound)
    assert found == any_model.longest_chunk(prefills, decodes, resident, limit, bound)


def test_the_fit_has_a_constant_for_decodes():
    """Eq. 7 as printed has none."""
    profile = load_profile("llama-3.1-8b@a100-80g")
    assert echo_estimator(profile, LINEAR).model.decode_base_s > 0
    assert EchoModel.fit(LINEAR).decode_base_s == 0


# -- forecasts -------------------------------------------------------------------------------------
@given(values=st.lists(st.integers(0, 10**6), min_size=1, max_size=60), size=st.integers(1, 20))
def test_a_window_is_numpys_mean_and_deviation_of_its_last_values(values, size):
    window = Window(size)
    for value in values:
        window.add(value)
    last = values[-size:]
    assert window.mean == pytest.approx(np.mean(last))
    assert window.deviation == pytest.approx(np.std(last), abs=1e-6)


def test_memory_is_sampled_by_the_clock_and_not_by_plans():
    """Held: 0 until 2 s, 10 at 2.5 s and after. The plan at 2.5 s fills in the samples due at 1 and
    2 s."""
    often, seldom = MemoryForecast(), MemoryForecast()
    for now in np.arange(0.0, 2.5, 0.1).tolist():
        often.observe(now, 0)
    seldom.observe(0.0, 0)
    seldom.observe(2.4, 0)
    for forecast in (often, seldom):
        assert forecast.next_s == 3.0
        forecast.observe(3.0, 10)
        assert list(forecast.window.values) == [0, 0, 0, 10]
        assert forecast.blocks == 12  # 2.5 + 2 * 4.33, rounded up
        assert forecast.reserve(5) == 7 and forecast.reserve(20) == 0


def test_a_long_silence_fills_the_window_once():
    forecast = MemoryForecast(window_s=10.0)
    forecast.observe(0.0, 50)
    forecast.observe(1e6, 3)
    assert list(forecast.window.values) == [3] * 10
    assert forecast.next_s == 1e6 + 1


def test_arrivals_are_counted_in_bins_that_have_ended():
    forecast = ArrivalForecast(window_s=180.0, bin_s=60.0, sigmas=1.0)
    assert forecast.rate(0.0) == 0.0
    for now in (1.0, 2.0, 59.0, 61.0):
        forecast.arrive(now)
    assert forecast.rate(62.0) == 3 / 60
    # bins of 3, 1, 0 arrivals: mean 4 / 3, deviation 1.247
    assert forecast.rate(180.0) == pytest.approx((4 / 3 + np.std([3, 1, 0])) / 60)
    assert forecast.rate(1e6) == 0.0


# -- pool ------------------------------------------------------------------------------------------
class PoolDesk:
    """A pool and a ledger of 40 blocks of four tokens; every text is a list of blocks."""

    def __init__(self, buckets: bool = False) -> None:
        self.table = RequestTable()
        self.ledger = TaskAwareLedger(self.table, 40, 4, shared_contents=2000)
        self.pool = OfflinePool(buckets)
        self.names: dict[tuple, int] = {}

    def submit(self, text: tuple) -> int:
        """Equal beginnings of texts are equal contents."""
        ids = [self.names.setdefault(text[: i + 1], len(self.names)) for i in range(len(text))]
        row = self.table.submit(
            "", np.array(ids, np.int64), prompt_tokens=4 * len(text) + 1, service_class=1
        )
        self.ledger.begin_step()
        self.pool.add(row, self.table)
        return row

    def compute(self, row: int, blocks: int = 99) -> bool:
        """What is not cached of the prompt, or the first `blocks` of that."""
        hit = self.ledger.hit_tokens(row)
        if not self.ledger.admit(row, min(hit + 4 * blocks, self._end(row)), hit):
            return False
        self.pool.computed(self.table.prefix[row], hit // 4)
        return True

    def go_on(self, row: int, blocks: int) -> None:
        """The next blocks of a prompt that is computed in pieces."""
        held = self.ledger.held_blocks(row)
        if self.ledger.grow(row, min(4 * (held + blocks), self._end(row))):
            self.pool.computed(self.table.prefix[row], held)

    def _end(self, row: int) -> int:
        return int(self.table.prompt_tokens[row]) - 1


def test_families_follow_the_tree():
    """Two questions on each of two documents that begin alike, and one text of its own."""
    desk = PoolDesk()
    rows = {name: desk.submit(tuple(name)) for name in ("sAA1", "sAA2", "sBB1", "sBB2", "zzzz")}
    depths = {name: desk.pool.shared_blocks(row) for name, row in rows.items()}
    assert depths == {"sAA1": 3, "sAA2": 3, "sBB1": 3, "sBB2": 3, "zzzz": 4}
    later = desk.submit(tuple("sAAA"))  # a third question
    assert desk.pool.shared_blocks(later) == 3
    deeper = desk.submit(tuple("sAA12"))  # continues the first one
    assert desk.pool.shared_blocks(rows["sAA1"]) == desk.pool.shared_blocks(deeper) == 4
    for row in (*rows.values(), later, deeper):
        desk.pool.remove(row)
    assert len(desk.pool) == 0 and not desk.pool._roots[0].children


def test_others_wait_while_one_computes_what_they_share():
    desk = PoolDesk()
    first, second, other = (desk.submit(tuple(name)) for name in ("AAA1", "AAA2", "BBB1"))
    assert desk.pool.best(desk.ledger) == [(first, 0)]  # more questions on it
    desk.pool.take(first, leads=True)
    assert desk.pool.best(desk.ledger) == [(other, 0)]
    desk.compute(first)
    desk.pool.passed(first, 2)
    assert desk.pool.best(desk.ledger) == [(other, 0)]
    desk.pool.passed(first, 3)
    assert desk.pool.best(desk.ledger) == [(second, 12)]


def test_what_is_taken_and_put_back_leaves_nothing_behind():
    desk = PoolDesk()
    rows = [desk.submit(tuple(name)) for name in ("AAA1", "AAA2", "BBB1")]
    for _ in range(1000):
        assert desk.pool.best(desk.ledger) == [(rows[0], 0)]
        desk.pool.take(rows[0], leads=False)
        # alone on its document now, and before `BBB1`
        assert desk.pool.best(desk.ledger) == [(rows[1], 0)]
        desk.pool.put_back(rows[0])
    assert all(
        len(family.queue) <= 3 for family in {id(f): f for f in desk.pool._family.values()}.values()
    )
    assert sum(map(len, desk.pool._heaps.values())) < 200


@pytest.mark.parametrize("leaves", ["ended", "preempted"])
def test_a_leader_that_leaves_makes_way(leaves):
    desk = PoolDesk()
    first, second = desk.submit(tuple("AAA1")), desk.submit(tuple("AAA2"))
    desk.pool.take(first, leads=True)
    assert desk.pool.best(desk.ledger) == []
    if leaves == "ended":
        desk.pool.remove(first)
        assert desk.pool.best(desk.ledger) == [(second, 0)]
    else:
        desk.pool.put_back(first)
        assert desk.pool.best(desk.ledger) == [(first, 0)]


@examples(20)
@given(seed=st.integers(0, 2**32), buckets=st.booleans())
def test_the_pool_finds_what_a_search_of_all_requests_finds(seed, buckets):
    """Requests come, run in pieces, are preempted and end, the cache fills and is evicted: the best
    one's hit is always the largest of any queued request whose family nobody leads; sets and counts
    add up."""
    rng = random.Random(seed)
    desk = PoolDesk(buckets)
    queued, running, texts, begun = set(), set(), [], -1
    for _ in range(80):
        turns = ("submit", "submit", "run", "run", "go on", "go on", "end", "preempt", "withdraw")
        turn = rng.choice(turns)
        if turn == "submit":
            text = tuple(rng.choice("ab") for _ in range(rng.randint(0, 7))) + tuple(
                rng.choice("xyz") for _ in range(rng.randint(0, 3))
            )
            if texts and rng.random() < 0.5:  # asks what another one asks, or goes on from there
                text = rng.choice(texts[-3:]) + text[:1]
            texts.append(text)
            queued.add(desk.submit(text))
        elif turn == "run" and queued:
            found = desk.pool.best(desk.ledger)
            row = rng.choice(found)[0] if found else None
            if row is not None and desk.compute(row, rng.choice((1, 2, 99))):
                begun = row
                desk.pool.take(row, leads=rng.random() < 0.3)
                queued.remove(row)
                running.add(row)
                if rng.random() < 0.7:
                    desk.pool.passed(row, 99)
        elif turn == "go on" and running:
            row = begun if begun in running else rng.choice(sorted(running))
            desk.go_on(row, rng.randint(1, 2))
        elif turn == "end" and running:
            row = rng.choice(sorted(running))
            running.remove(row)
            desk.ledger.free(row)
            desk.pool.remove(row)
        elif turn == "preempt" and running:
            row = rng.choice(sorted(running))
            running.remove(row)
            queued.add(row)
            desk.ledger.drop(row)
            desk.pool.put_back(row)
        elif turn == "withdraw" and queued:
            row = rng.choice(sorted(queued))
            queued.remove(row)
            desk.ledger.free(row)
            desk.pool.remove(row)
        desk.ledger.check()
        assert len(desk.pool) == len(queued) and all(row in desk.pool for row in queued)
        _same_as_search(desk, queued)


def _same_as_search(desk: PoolDesk, queued: set[int]) -> None:
    expected: dict[int, list[tuple[int, int, int]]] = {}
    families: dict[int, list[int]] = {}
    for row in sorted(queued):
        families.setdefault(id(desk.pool._family[row]), []).append(row)
    for rows in families.values():
        family = desk.pool._family[rows[0]]
        assert family.queued == len(rows)
        if family.leader is None:
            hit = desk.ledger.hit_tokens(rows[0])
            expected.setdefault(family.bucket, []).append((-hit, -len(rows), rows[0]))
    best = desk.pool.best(desk.ledger)
    assert best == [(min(rows)[2], -min(rows)[0]) for _, rows in sorted(expected.items())]


def test_without_the_scheduler_the_pool_is_a_queue():
    desk, pool = PoolDesk(), FcfsPool()
    rows = [desk.submit(tuple(name)) for name in ("A1", "B1", "C1")]
    for row in rows:
        pool.add(row, desk.table)
    pool.take(rows[0], leads=True)
    pool.remove(rows[1])
    assert pool.best(desk.ledger) == [(rows[2], 0)] and len(pool) == 1
    pool.put_back(rows[0])
    assert pool.best(desk.ledger) == [(rows[0], 0)]
