"""Hypothesis strategies for workloads with everything that a workload can have."""

import numpy as np
from hypothesis import strategies as st

from twinserve.traces.prefix import concatenate_ids, dense
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Provenance, Workload

SECONDS = st.floats(0, 2.0**31, allow_nan=False, allow_subnormal=True)
SLO = st.one_of(st.just(np.nan), st.floats(5e-324, 1e6))
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=8)


@st.composite
def prefixes(draw, prompt, block):
    """A chained prefix: each row follows an earlier row for a while, then goes its own way."""
    rows, fresh = [], 0
    for tokens in prompt:
        need = -(-tokens // block)
        base = rows[draw(st.integers(0, len(rows) - 1))] if rows else np.zeros(0, np.int64)
        shared = base[: draw(st.integers(0, min(need, len(base))))]
        new = need - len(shared)
        rows.append(np.concatenate([shared, np.arange(fresh, fresh + new)]))
        fresh += new
    p = concatenate_ids(rows, block)
    return PrefixBlocks(dense(p.ids), p.offsets, block)


@st.composite
def workloads(draw):
    """Valid workloads: open rows, sessions, applications of wide stages, classes, SLOs, a pool."""
    open_rows = draw(st.integers(1, 8))
    stages = []  # (group, stage) of grouped rows
    groups = draw(st.integers(0, 3))
    for g in range(groups):
        for stage in range(draw(st.integers(1, 3))):
            stages += [(g, stage)] * draw(st.integers(1, 2))
    known = [(-1, 0)] * open_rows + [s for s in stages if s[1] == 0]
    known = draw(st.permutations(known))
    waiting = [s for s in stages if s[1] > 0]
    group, stage = (np.array(c, np.int64) for c in zip(*known, *waiting, strict=True))
    n, k = len(group), len(known)
    sized = lambda of: st.lists(of, min_size=n, max_size=n)  # noqa: E731
    arrival = np.full(n, np.nan)
    arrival[:k] = np.sort(draw(st.lists(SECONDS, min_size=k, max_size=k)))
    delay = np.where(np.arange(n) < k, 0.0, np.array(draw(sized(SECONDS))))
    prompt = np.array(draw(sized(st.integers(1, 90))), np.int64)
    names = draw(st.lists(NAME, min_size=groups, max_size=groups, unique=True))
    own_ids = draw(st.booleans())
    block = draw(st.sampled_from([1, 16, 512]))
    pool = BestEffortPool(draw(st.integers(1, 9)), (3, 7), (1, 2), 5, draw(st.none() | SECONDS))
    return Workload.build(
        arrival,
        prompt,
        np.array(draw(sized(st.integers(1, 2**31 - 1))), np.int64),
        service_class=np.array(draw(sized(st.integers(0, 1))), np.int8),
        priority=np.array(draw(sized(st.integers(-(2**63), 2**63 - 1))), np.int64),
        slo_ttft_s=np.array(draw(sized(SLO))),
        slo_tpot_s=np.array(draw(sized(SLO))),
        group=group,
        stage=stage,
        delay_s=delay,
        group_names=names,
        prefix=draw(st.none() | prefixes(prompt.tolist(), block)),
        pool=draw(st.sampled_from([None, pool])),
        provenance=Provenance("made", transforms=("a",), notices=("b",)),
        **({"ids": draw(st.lists(NAME, min_size=n, max_size=n, unique=True))} if own_ids else {}),
    )


def assert_same(a, b):
    """Every column, block, group and the pool are equal, bit by bit."""
    for column in (
        *("arrival_s", "prompt_tokens", "output_tokens", "service_class", "priority"),
        *("slo_ttft_s", "slo_tpot_s", "group", "stage", "delay_s"),
    ):
        x, y = getattr(a, column), getattr(b, column)
        assert x.dtype == y.dtype, column
        np.testing.assert_array_equal(x, y, err_msg=column)
    assert a.ids == b.ids
    assert a.group_names == b.group_names
    assert a.pool == b.pool
    assert (a.prefix is None) == (b.prefix is None)
    if a.prefix is not None:
        assert a.prefix.block_tokens == b.prefix.block_tokens
        np.testing.assert_array_equal(a.prefix.ids, b.prefix.ids)
        np.testing.assert_array_equal(a.prefix.offsets, b.prefix.offsets)
