"""Ticks are found and spread; statistics count what they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.traces.generators.replica import replica
from twinserve.traces.generators.synth import synth
from twinserve.traces.load import find_tick, spread_ticks
from twinserve.traces.prefix import concatenate_ids
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.stats import lru_hit_rate, statistics
from twinserve.traces.transform import with_pool
from twinserve.traces.verbs import describe, inspect
from twinserve.traces.workload import BestEffortPool, Workload


def ticked(per_tick=5, ticks=40, tick=3.0):
    at = np.repeat(np.arange(ticks) * tick, per_tick)
    return Workload.build(at, np.full(len(at), 8), np.full(len(at), 2))


def test_rows_stay_in_their_tick_and_in_order():
    w = ticked()
    s = spread_ticks(w, seed=4)
    check_workload(s)
    assert (s.arrival_s >= w.arrival_s).all() and (s.arrival_s < w.arrival_s + 3).all()
    assert len(np.unique(s.arrival_s)) == len(s)
    assert s.provenance.transforms == ("spread-ticks(tick=3s, seed=4)",)
    offsets = s.arrival_s - w.arrival_s
    assert offsets.mean() == pytest.approx(1.5, abs=0.2)
    assert spread_ticks(w, seed=4).arrival_s.tolist() == s.arrival_s.tolist()
    assert spread_ticks(w, seed=5).arrival_s.tolist() != s.arrival_s.tolist()


@pytest.mark.slow
def test_spreading_takes_the_bursts_out():
    w = replica("mooncake:conversation")
    assert find_tick(w.arrival_s) == pytest.approx(3.0, abs=0.01)
    before, after = statistics(w), statistics(spread_ticks(w))
    assert before["gap_cv"] > 2.5 and after["gap_cv"] == pytest.approx(1.0, abs=0.1)
    assert after["rate_per_s"] == pytest.approx(before["rate_per_s"], rel=0.01)


@pytest.mark.parametrize(
    "w",
    [
        synth("fixed:8,2", rate=5, count=500),
        ticked(per_tick=1),  # regular arrivals, not quantised ones
        ticked(ticks=5),  # a handful of bursts may be meant
        ticked(ticks=1, per_tick=500),  # offline: everything at once
        ticked(tick=0.01),  # a clock's resolution
        Workload.build([0.0], [1], [1]),
    ],
)
def test_other_arrivals_are_left_alone(w):
    assert find_tick(w.arrival_s) is None
    assert spread_ticks(w) is w


def brute_force_hits(rows, capacity):
    cache, hits = [], 0  # least recent first
    for row in rows:
        for block in row:
            if block not in cache:
                break
            hits += 1
        for block in row[::-1]:
            if block in cache:
                cache.remove(block)
            cache.append(block)
        del cache[: max(0, len(cache) - capacity)]
    return hits / sum(map(len, rows))


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=12))
@examples(100)
def test_hit_rate_by_a_plain_list(paths):
    names = {}
    rows = [[names.setdefault(tuple(p[: k + 1]), len(names)) for k in range(len(p))] for p in paths]
    prefix = concatenate_ids([np.array(r) for r in rows], 16)
    for capacity in (1, 3, 8, 1000):
        assert lru_hit_rate(prefix, capacity * 16) == brute_force_hits(rows, capacity)
    assert lru_hit_rate(prefix) == brute_force_hits(rows, 10**9)


def test_statistics_of_a_small_workload():
    w = Workload.build(
        [1.0, 1.0, 3.0, np.nan],
        [10, 20, 30, 40],
        [1, 2, 3, 4],
        service_class=np.array([0, 1, 0, 0], np.int8),
        group=np.array([-1, -1, 0, 0]),
        stage=np.array([0, 0, 0, 1]),
        group_names=["s"],
    )
    s = statistics(w)
    assert (s["rows"], s["closed_loop_rows"], s["groups"], s["best_effort_rows"]) == (4, 1, 1, 1)
    assert s["span_s"] == 2.0 and s["rate_per_s"] == 1.5 and s["first_arrival_s"] == 1.0
    assert s["arrival_moments"] == 2 and s["per_moment"] == {"mean": 1.5, "max": 2}
    assert s["prompt_tokens"]["mean"] == 25 and s["prompt_tokens"]["max"] == 40
    assert s["total_tokens"] == 110 and "lru_hit_rate" not in s
    assert inspect(w)["summary"] == describe(w)
    assert "1 rows in closed loops" in describe(w)
    assert (w.span_s, w.last_arrival_s) == (2.0, 3.0)
    nobody = Workload.build([np.nan], [1], [1], group=np.array([0]), stage=np.array([1]))
    assert (nobody.span_s, nobody.last_arrival_s) == (0.0, 0.0)
    assert w.longest == 44
    assert with_pool(w, BestEffortPool(2, (5, 60), (1, 7))).longest == 67
