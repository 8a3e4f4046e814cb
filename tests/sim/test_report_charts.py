"""What charts are made of: thinned curves stay true, fronts are fronts, labels can be shown."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.examples import examples
from tests.sim.test_results_rows import toy_rows
from twinserve.sim.report.chart import Chart, Curve, best, plain, thinned_steps
from twinserve.sim.report.run_charts import run_charts
from twinserve.sim.report.seen import look
from twinserve.sim.report.static import svg
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.parts import front

SECONDS = st.floats(0.0, 1e6)


@examples(60)
@given(arrays.arrays(float, st.integers(1, 3000), elements=SECONDS), st.integers(2, 700))
def test_a_thinned_distribution_is_exact_where_it_has_a_point_and_close_between(values, points):
    at, share = thinned_steps(values, points)
    ordered = np.sort(values)
    assert len(at) <= points and at[0] == ordered[0] and at[-1] == ordered[-1] and share[-1] == 1
    # as many of the values lie at or below each point as it says, but for ties with later ones
    assert (share <= np.searchsorted(ordered, at, side="right") / len(values) + 1e-12).all()
    assert (share > np.searchsorted(ordered, at, side="left") / len(values)).all()
    assert np.diff(share).max(initial=0.0) <= 1 / (points - 1) + 1 / len(values) + 1e-12


@examples(60)
@given(
    st.lists(st.tuples(*[st.integers(0, 6) | st.just(float("nan"))] * 2), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_on_the_front_is_what_nothing_beats(points, low_x, low_y):
    def beats(a, b) -> bool:
        x = a[0] <= b[0] if low_x else a[0] >= b[0]
        y = a[1] <= b[1] if low_y else a[1] >= b[1]
        return x and y and a != b

    known = [i for i, p in enumerate(points) if not np.isnan(p).any()]
    expected = [i for i in known if not any(beats(points[j], points[i]) for j in known)]
    found = front(points, low_x, low_y)
    assert sorted(found) == expected
    assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)


@given(st.text() | st.text(alphabet="\x00\ud800$\\<>&\"'\n\u202e"))
def test_any_label_becomes_text_that_can_be_written_and_shown(label):
    shown = plain(label)
    assert shown.encode() or not label
    assert shown.isprintable() and len(shown) == len(label)


@examples(10)
@given(st.text(min_size=1, max_size=12), st.floats(1e-9, 1e9))
def test_a_picture_holds_any_label_without_markup_of_it(label, value):
    curve = Curve("a", np.array([value]), np.array([value]), 0, "points")
    drawn = svg(Chart("k", "t", "x", "y", (curve,), "alt", marks=((value, label),)), "chart-1")
    assert drawn.startswith("<svg") and drawn.count("<svg") == 1 and "\x00" not in drawn
    assert "<script" not in drawn and "://" not in drawn


def test_the_better_one_comes_first_in_words():
    pairs = [("a", 3.0), ("b", 1.0), ("c", float("nan"))]
    assert best(pairs, "ms") == "from 1 ms (b) to 3 ms (a)"
    assert best(pairs, "ms", high=True) == "from 3 ms (a) to 1 ms (b)"
    assert best([("a", 2.0)], "") == "2" and best([], "") == "no numbers"


def test_courses_over_time_keep_their_integral_and_say_their_highest():
    rows = toy_rows(200, rate=30.0, blocks=200)
    run = look("run", None, RunResult(rows, {}, {}, summarise(rows)))
    queue, steps = run.times["waiting"], rows.steps
    spent = (steps["waiting"] * (steps["end_s"] - steps["start_s"])).sum()
    np.testing.assert_allclose((queue.mean * np.diff(run.edges)).sum(), spent)
    assert queue.most == steps["waiting"].max() == queue.highest.max()
    (chart,) = [c for c in run_charts([run]) if c.key == "time-queue"]
    np.testing.assert_array_equal(chart.curves[0].y, queue.mean)
    assert f"{steps['waiting'].max():g}" in chart.alt and f"{len(steps):,} steps" in chart.note
