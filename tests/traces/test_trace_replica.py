"""The embedded replicas against what they stand in for.

The targets are measured numbers of the originals (statistics() on them); where the originals are at
hand, the last test measures them again.
"""

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.traces.workload_strategies import assert_same
from twinserve.traces.generators.fit_replica import fit_mooncake, fit_plain
from twinserve.traces.generators.replica import FILES, replica, tables
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import read_file
from twinserve.traces.stats import statistics

MOONCAKE = {
    "rows": 12_031, "span_s": 3536.999, "rate_per_s": 3.40, "gap_cv": 3.03, "moments": 1180,
    "per_moment": (10.2, 28),
    "prompt": {"mean": 12_035, "p50": 6_909, "p90": 27_367, "p99": 85_400, "max": 126_195},
    "output": {"mean": 342.6, "p50": 350, "p90": 597, "p99": 1_118.5, "max": 2_000},
    "hits": {"1000000": 0.0533, "3000000": 0.1361, "10000000": 0.2852, "unlimited": 0.3664},
    "distinct_blocks": 182_790,
}  # fmt: skip


def check_against_mooncake(s, length=0.05, hit=0.025):
    assert s["rows"] == MOONCAKE["rows"]
    assert s["span_s"] == pytest.approx(MOONCAKE["span_s"], abs=0.5)
    assert s["rate_per_s"] == pytest.approx(MOONCAKE["rate_per_s"], rel=0.005)
    assert s["gap_cv"] == pytest.approx(MOONCAKE["gap_cv"], rel=0.05)
    assert s["arrival_moments"] == MOONCAKE["moments"]
    assert s["per_moment"]["mean"] == pytest.approx(MOONCAKE["per_moment"][0], abs=0.01)
    assert s["per_moment"]["max"] == MOONCAKE["per_moment"][1]
    for column in ("prompt", "output"):
        for key, value in MOONCAKE[column].items():
            assert s[f"{column}_tokens"][key] == pytest.approx(value, rel=length), (column, key)
    for size, rate in MOONCAKE["hits"].items():
        assert s["lru_hit_rate"][size] == pytest.approx(rate, abs=hit), size
    assert s["distinct_blocks"] == pytest.approx(MOONCAKE["distinct_blocks"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_nightly([0, 1, 2, 1234], 0))
def test_mooncake_replica_has_the_statistics_of_the_original(seed):
    w = replica("mooncake:conversation", seed)
    check_workload(w)
    assert w.provenance.replica
    check_against_mooncake(statistics(w))


@pytest.mark.slow
def test_its_seed_fixes_the_replica():
    first = replica("mooncake:conversation", 7)
    assert_same(first, replica("mooncake:conversation", 7))
    other = replica("mooncake:conversation", 8)
    assert (first.prompt_tokens != other.prompt_tokens).mean() > 0.9


@pytest.mark.slow
def test_conversations_grow():
    # What makes hits: a prompt that shares more than the system block extends an earlier, shorter
    # one.
    w = replica("mooncake:conversation")
    first_owner, deep = {}, 0
    for row in range(len(w)):
        ids = w.prefix.of(row).tolist()
        known = sum(1 for b in ids if b in first_owner)
        assert all(b in first_owner for b in ids[:known])  # sharing is a prefix
        if known > 1:
            deep += 1
            assert w.arrival_s[first_owner[ids[known - 1]]] < w.arrival_s[row]
        for b in ids[known:]:
            first_owner[b] = row
    assert deep / len(w) == pytest.approx(0.387, abs=0.01)


@pytest.mark.parametrize("seed", [0, 5])
def test_azure_replica(seed):
    w = replica("azure-2023:conv", seed)
    check_workload(w)
    s = statistics(w)
    assert s["rows"] == 19_366
    assert s["rate_per_s"] == pytest.approx(5.53, rel=0.01)
    assert s["gap_cv"] == pytest.approx(1.09, rel=0.05)
    for key, value in {"mean": 1155, "p50": 1020, "p99": 4142}.items():
        assert s["prompt_tokens"][key] == pytest.approx(value, rel=0.05)
    for key, value in {"mean": 211, "p50": 129, "p99": 601}.items():
        assert s["output_tokens"][key] == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("name", FILES)
def test_tables_are_small_and_hold_no_rows(name):
    # A few dozen quantiles a column: far too few numbers to hold thousands of recorded rows.
    numbers = sum(np.size(v) for v in tables(name).values() if not isinstance(v, str))
    assert 20 * numbers < 2 * tables(name)["rows"]


@pytest.mark.slow
@pytest.mark.traces
def test_the_tables_are_those_of_the_original(original):
    w = read_file(original("mooncake:conversation"))
    check_against_mooncake(statistics(w), length=0.001, hit=0.0001)
    assert fit_mooncake(w) == tables("mooncake:conversation")
    azure = read_file(original("azure-2023:conv"))
    assert fit_plain(azure) == tables("azure-2023:conv")
