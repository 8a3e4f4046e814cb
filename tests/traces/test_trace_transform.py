"""Transforms: what they change, what they leave alone, and that each is on record."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.traces.workload_strategies import workloads
from twinserve.traces import prefix as blocks
from twinserve.traces import transform
from twinserve.traces.generators.synth import synth
from twinserve.traces.prefix import concatenate_ids
from twinserve.traces.readers.columns import check_workload
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
