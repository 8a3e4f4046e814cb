"""Transforms: what they change, what they leave alone, and that each is on record."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.examples import examples
from tests.traces.workload_strategies import workloads
from twinserve.traces import prefix as blocks
from twinserve.traces import transform
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.replica import replica
from twinserve.traces.generators.synth import synth
from twinserve.traces.generators.tidal import tidal
from twinserve.traces.load import find_tick, spread_ticks
from twinserve.traces.prefix import concatenate_ids
from twinserve.traces.ranges import PrefixRanges
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.stats import lru_hit_rate, statistics
from twinserve.traces.transform import merge, with_pool
from twinserve.traces.verbs import describe, inspect
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Workload, WorkloadError

NAN = np.nan


def sessions():
    """Rows: open at 0 s, session A at 1 s and 5 s later turns, open at 2 s, session B at 3 s."""
    return Workload.build(
        [0.0, 1.0, 2.0, 3.0, NAN, NAN, NAN],
        [10, 20, 30, 40, 50, 60, 70],
        [1] * 7,
        group=np.array([-1, 0, -1, 1, 0, 0, 1]),
        stage=np.array([0, 0, 0, 0, 1, 2, 1]),
        delay_s=np.array([0, 0, 0, 0, 1.0, 2.0, 3.0]),
        group_names=["A", "B"],
    )


def test_head_counts_arrivals_and_keeps_their_turns():
    w = transform.head(sessions(), 2)
    assert w.prompt_tokens.tolist() == [10, 20, 50, 60]
    assert w.group_names == ["A"] and w.group.tolist() == [-1, 0, 0, 0]
    assert w.provenance.transforms == ("head(2)",)
    assert len(transform.head(sessions(), 99)) == 7


def test_window_starts_at_zero():
    w = transform.window(sessions(), 2.0, 4.0)
    assert w.prompt_tokens.tolist() == [30, 40, 70]
    assert w.arrival_s[:2].tolist() == [0.0, 1.0] and w.group_names == ["B"]
    assert transform.window(sessions(), 2.0, 3.0).prompt_tokens.tolist() == [30]
    check_workload(w)
    with pytest.raises(WorkloadError, match="the trace ends at 3 s"):
        transform.window(sessions(), 10, 20)


def test_scale_rate_leaves_think_times():
    w = transform.scale_rate(replace(sessions(), stages_s=(1.0, 3.0)), 2.0)
    assert w.arrival_s[:4].tolist() == [0.0, 0.5, 1.0, 1.5] and w.stages_s == (0.5, 1.5)
    assert w.delay_s.tolist() == sessions().delay_s.tolist()


def test_cap_length_cuts_prompts_to_make_room():
    w = Workload.build([0, 1, 2, 3], [100, 1000, 10, 900], [10, 50, 5000, 800])
    c = transform.cap_length(w, 512)
    assert c.prompt_tokens.tolist() == [100, 462, 10, 256]
    assert c.output_tokens.tolist() == [10, 50, 502, 256]
    assert c.provenance.transforms == ("cap-length(512: 3 rows cut)",)
    transform.check_fits(c, 512)
    with pytest.raises(WorkloadError, match=r"3 of 4 rows.*request r1 \(row 2\).*--cap-length 512"):
        transform.check_fits(w, 512)


def test_a_block_cut_through_is_only_shared_by_rows_cut_alike():
    ids = [[0, 1, 2], [0, 1, 3], [0, 1]]
    prefix = concatenate_ids([np.array(r) for r in ids], 10)
    w = Workload.build([0, 1, 2], [30, 30, 20], [1, 3, 1], prefix=prefix)
    c = transform.cap_length(w, 18)
    assert c.prompt_tokens.tolist() == [17, 15, 17]
    check_workload(c)
    first = c.prefix.of(0).tolist()
    assert first == c.prefix.of(2).tolist()  # both keep 7 tokens of block 1
    assert c.prefix.of(1)[0] == first[0] and c.prefix.of(1)[1] != first[1]


def test_check_fits_looks_at_the_pool_too():
    w = transform.with_pool(synth("fixed:10,10", count=2), BestEffortPool())
    with pytest.raises(WorkloadError, match="best-effort pool draws up to 1024 prompt"):
        transform.check_fits(w, 1000)
    transform.check_fits(w, 1152)


def test_slo_class_priority():
    w = transform.set_class(sessions(), "be")
    assert (w.service_class == 1).all()
    w = transform.set_slo(w, 0.4, 0.2)
    assert (w.slo_ttft_s == 0.4).all() and (w.slo_tpot_s == 0.2).all()
    w = transform.set_slo(w, ttft_s=9.0, service_class="rt")
    assert (w.slo_ttft_s == 0.4).all()
    w = transform.set_priority(w, -3)
    assert (w.priority == -3).all()
    assert w.provenance.transforms == (
        *("set-class(be)", "set-slo(ttft=0.4s, tpot=0.2s)", "set-slo(ttft=9s, class=rt)"),
        "set-priority(-3)",
    )


def test_merge_keeps_rows_apart():
    a = sessions()
    b = transform.set_class(sessions(), "be")
    m = transform.merge(a, b)
    check_workload(m)
    assert m.arrival_s[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert m.ids[:2] == ["r0", "r0.b1"]
    assert m.group_names == ["A", "B", "A.b1", "B.b1"]
    assert m.service_class.tolist()[:8] == [0, 1] * 4
    again = transform.merge(m, b)
    check_workload(again)
    assert "r0.b2" in again.ids


def test_merged_prompts_share_nothing():
    prefix = PrefixBlocks(np.array([0, 1, 0]), np.array([0, 2, 3]), 16)
    a = Workload.build([0, 1], [20, 16], [1, 1], prefix=prefix)
    m = transform.merge(a, Workload.build([0.5], [40], [1]))
    check_workload(m)
    assert m.prefix.distinct == 2 + 3
    assert m.prefix.of(0)[0] == m.prefix.of(2)[0]
    other = Workload.build([0], [20], [1], prefix=PrefixBlocks(np.array([0]), np.array([0, 1]), 32))
    with pytest.raises(WorkloadError, match="16 and 32 tokens"):
        transform.merge(a, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: transform.scale_rate(w, 0),
        lambda w: transform.scale_rate(w, NAN),
        lambda w: transform.window(w, 5, 5),
        lambda w: transform.head(w, 0),
        lambda w: transform.cap_length(w, 1),
        lambda w: transform.set_slo(w, ttft_s=0),
        lambda w: transform.set_class(w, "gold"),
        lambda w: transform.with_pool(w, BestEffortPool(batch=0)),
        lambda w: transform.with_pool(w, BestEffortPool(prompt_tokens=(5, 4))),
    ],
)
def test_impossible_changes_are_one_line(change):
    with pytest.raises(WorkloadError) as e:
        change(sessions())
    assert "\n" not in str(e.value)


@given(workloads(), st.data())
@examples(80)
def test_every_transform_keeps_a_workload_valid(w, data):
    end = data.draw(st.floats(1e-3, 2.0**31))
    steps = {
        "head": lambda w: transform.head(w, data.draw(st.integers(1, 10))),
        "window": lambda w: transform.window(w, end * data.draw(st.floats(0, 0.9)), end),
        "cap": lambda w: transform.cap_length(w, data.draw(st.integers(2, 60))),
        "rate": lambda w: transform.scale_rate(w, data.draw(st.floats(0.1, 10))),
        "rebase": transform.rebase,
        "merge": lambda w: transform.merge(w, synth("fixed:40,3", rate=1, count=3)),
    }
    before = len(w.provenance.transforms)
    for name in data.draw(st.lists(st.sampled_from(sorted(steps)), max_size=3)):
        try:
            w = steps[name](w)
        except WorkloadError as e:
            assert "\n" not in str(e)
            continue
        check_workload(w)
        before += 1
        assert len(w.provenance.transforms) == before


@given(workloads(), st.integers(2, 60))
@examples(60)
def test_capped_rows_share_what_they_shared(w, limit):
    """Two rows' common prefix, in whole blocks, is what it was as far as both still reach."""
    if w.prefix is None:
        return
    c = transform.cap_length(w, limit)
    size = w.prefix.block_tokens
    common = lambda p, i, j: next(  # noqa: E731
        (k for k, (x, y) in enumerate(zip(p.of(i), p.of(j), strict=False)) if x != y),
        min(len(p.of(i)), len(p.of(j))),
    )
    for i in range(len(w)):
        for j in range(i):
            whole = min(c.prompt_tokens[i], c.prompt_tokens[j]) // size
            after, before = common(c.prefix, i, j), common(w.prefix, i, j)
            assert min(after, whole) == min(before, whole)
            assert after <= before


def test_take_reorders_and_renames_densely():
    p = PrefixBlocks(np.array([0, 1, 0, 2, 3]), np.array([0, 2, 4, 5]), 4)
    t = blocks.take(p, np.array([2, 1]))
    assert t.of(0).tolist() == [2] and t.of(1).tolist() == [0, 1]


# -- prefix blocks as ranges are the same blocks, in less memory -----------------------------------
def written(prefix: PrefixRanges) -> PrefixBlocks:
    return PrefixBlocks(prefix.ids, prefix.offsets, prefix.block_tokens)


@st.composite
def questions(draw) -> PrefixRanges:
    """Questions on documents, some of them without one or without text of their own."""
    documents = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    of = draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=6))
    own = np.array(draw(st.lists(st.integers(0, 3), min_size=len(of), max_size=len(of))))
    shared = np.array(documents)
    offsets = blocks.offsets_of(shared[of] + own)
    first_own = shared.sum() + blocks.offsets_of(own)[:-1]
    return PrefixRanges(blocks.offsets_of(shared)[:-1][of], shared[of], first_own, offsets, 16)


def assert_same(ours, theirs) -> None:
    assert_array_equal(ours.ids, theirs.ids)
    assert_array_equal(ours.offsets, theirs.offsets)
    assert ours.distinct == theirs.distinct
    for row in range(len(ours.offsets) - 1):
        assert_array_equal(ours.of(row), theirs.of(row))


@given(questions(), st.data())
def test_rows_taken_from_ranges_are_those_taken_from_ids(prefix, data):
    n = len(prefix.shared)
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True)), np.int64)
    assert_same(blocks.take(prefix, rows), blocks.take(written(prefix), rows))


@given(questions(), questions())
def test_ranges_join_as_ids_do(a, b):
    every = np.arange(len(a.shared))
    a = blocks.take(a, every)  # dense, as what is joined has to be
    assert_same(blocks.join(a, b), blocks.join(written(a), written(b)))
    assert_same(blocks.join(a, written(b)), blocks.join(written(a), b))


def test_a_pool_of_many_blocks_takes_little_memory():
    online = tidal(duration_s=600.0, peak_rate=2.0, seed=0)
    tracemalloc.start()
    load = merge(online, longdoc("loogle-short", requests=4_000, seed=0))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert load.prefix.offsets[-1] > 4_000_000
    assert most < 8_000_000  # bytes; a number a block would be 32 MB


# -- ticks are found and spread; statistics count what they say ------------------------------------
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
