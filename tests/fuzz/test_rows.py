"""What each row of a measured file counts as, whatever stands in it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.rows import (
    COLUMNS,
    ERRORS,
    ODD_ARRIVALS,
    ODD_TIMES,
    ODD_TOKENS,
    TOOLS,
    Sent,
    judged,
    none_served,
)
from twinserve.traces.readers.formats import read_measurement
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError


def or_odd(good, odd):
    """Mostly good values."""
    return st.one_of(*[good] * 5, st.sampled_from(odd))


requests = st.builds(
    Sent,
    or_odd(st.integers(0, 90).map(lambda n: 10 * n), ODD_ARRIVALS),
    or_odd(st.integers(1, 500), (*ODD_TOKENS, 0)),
    or_odd(st.integers(1, 60), (*ODD_TOKENS, 0)),
    or_odd(st.integers(1, 9).map(lambda n: 10 * n), ODD_TIMES),
    or_odd(st.integers(1, 90).map(lambda n: 10 * n), ODD_TIMES),
    or_odd(st.just(""), ERRORS),
)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@given(st.lists(requests, min_size=1, max_size=7))
@examples(1000)
def test_a_row_is_served_failed_or_impossible_and_what_cannot_be_is_unknown(tool, rows):
    if tool == "guidellm":
        rows = sorted(rows, key=lambda row: bool(row.error))
    expected = judged(rows)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        file.write_text(TOOLS[tool](rows))
        options = ReadOptions(columns=COLUMNS if tool == "csv" else None)
        if none_served(rows):
            with pytest.raises(WorkloadError, match=f"none of {len(rows)} requests can be used"):
                read_measurement(file, tool, options)
            return
        found = read_measurement(file, tool, options)
    kinds = [
        "failed" if error else "impossible" if lacks else "served"
        for error, lacks in zip(found.errors, found.impossible, strict=True)
    ]
    assert kinds == [kind for kind, *_ in expected]
    for name, place in (("ttft_s", 1), ("e2el_s", 2), ("tpot_s", 3)):
        right = [np.nan if row[place] is None else row[place] / 1e3 for row in expected]
        assert getattr(found, name).tolist() == pytest.approx(right, nan_ok=True), name
    said = " | ".join(found.notices)
    for kind, words in (("failed", "requests failed"), ("impossible", "left out")):
        assert (kind in kinds) == (words in said), said
