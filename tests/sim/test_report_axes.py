"""What a report's charts are made of and say: gaps, objectives, axes, repeats, fronts, labels."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.examples import examples
from tests.sim.test_results_rows import toy_rows
from twinserve.sim.report import interactive
from twinserve.sim.report.chart import Chart, Curve, best, dash, marked, plain, thinned_steps
from twinserve.sim.report.run_charts import distributions, run_charts
from twinserve.sim.report.seen import look, over_time, summed_peak
from twinserve.sim.report.static import panels, svg
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.parts import front
from twinserve.sim.twin.validate_report import latency_figure, load_figure


def steps(**columns) -> pd.DataFrame:
    """Two steps of a second, with a pause of six between them."""
    return pd.DataFrame({"replica": 0, "start_s": [0.0, 7.0], "end_s": [1.0, 8.0], **columns})


def result(rows) -> RunResult:
    return RunResult(rows, {}, {}, summarise(rows))


# -- cached prefixes in idle gaps ------------------------------------------------------------------
def test_what_is_cached_stays_until_the_run_ends_or_its_replica_goes():
    table = pd.concat([steps(kv_cached_blocks=[4, 4]), steps(kv_cached_blocks=[9, 9])[:1]])
    table["replica"] = [0, 0, 1]
    edges = np.arange(11.0)
    drawn = over_time(table, "kv_cached_blocks", edges, stays=True)
    np.testing.assert_allclose(drawn, [13] * 8 + [0, 0])
    drawn = over_time(table, "kv_cached_blocks", edges, stays=True, gone_s={1: 5.0})
    np.testing.assert_allclose(drawn, [13] * 5 + [4] * 3 + [0, 0])


def test_memory_drawn_is_never_more_than_there_is():
    rows = toy_rows(40, rate=0.5, blocks=200)
    rows.steps["kv_cached_blocks"] = 200 - rows.steps["kv_used_blocks"]
    times = look("a", None, replace_rows(rows)).times
    both = times["kv_used_blocks"].mean + times["kv_cached_blocks"].mean
    assert 0.9 < both.max() / 200 <= 1 + 1e-9
    assert times["kv_cached_blocks"].mean[-1] > 0


def test_memory_is_that_of_all_replicas_that_were_up_at_once():
    """Idle ones too; one that takes the place of another adds nothing."""
    rows = toy_rows(4, rate=0.5, blocks=200)
    lives = [(0.0, np.nan, 100), (0.0, 5.0, 50), (5.0, np.nan, 30), (np.nan, np.nan, 999)]
    replicas = pd.DataFrame(lives, columns=["up_s", "down_s", "num_blocks"])
    assert replace(rows, replicas=replicas.assign(replica=range(4))).kv_blocks == 150
    assert replace(rows, replicas=None, kv_total_blocks=7).kv_blocks == 7


def test_the_interval_of_a_share_is_of_all_objectives_and_of_what_was_measured():
    """Nobody ends in time of those that are measured, and everybody did before."""
    rows = toy_rows(40, rate=0.5, blocks=200)
    middle = float(rows.requests["arrival_s"].median())
    early = (rows.requests["arrival_s"] < middle).to_numpy()
    requests = rows.requests.assign(slo_ttft_s=np.where(early, 1e6, 0.0), slo_tpot_s=np.nan)
    asked = {"service_class": "rt", "metric": "e2el", "bound_s": 1e-9}
    summary = {"classes": {"rt": {"slo_attainment": 0.0}}}
    run = RunResult(replace(rows, requests=requests), summary=summary)
    assert look("a", None, run).attained["rt"][1] > 0.1
    run.config = {"metrics": {"objectives": [asked]}}
    assert look("a", None, run).attained["rt"] == (0.0, 0.0)
    run = RunResult(run.rows, summary=summary | {"warmup": {"end_s": middle, "requests": 20}})
    assert look("a", None, run).attained["rt"] == (0.0, 0.0)


def test_a_bound_is_drawn_where_all_requests_have_it():
    rows = toy_rows(40, rate=0.5, blocks=200)
    same, apart = np.full(40, 0.5), np.where(np.arange(40) < 20, 0.5, 0.7)
    requests = rows.requests.assign(service_class="rt", slo_ttft_s=same, slo_tpot_s=apart)
    bounds = look("a", None, result(replace(rows, requests=requests))).bounds
    assert bounds == {("rt", "ttft_s"): 0.5}


def replace_rows(rows) -> RunResult:
    return RunResult(replace(rows, kv_total_blocks=200), {}, {}, summarise(rows))


# -- objectives ------------------------------------------------------------------------------------
def cdf(values, bound: float) -> Chart:
    at, share = thinned_steps(np.asarray(values, float))
    marks = ((bound, "objective"),)
    return Chart(
        "k", "t", "x", "y", (Curve("a", at, share, 0, "step"),), "", log_x=None, marks=marks
    )


@pytest.mark.parametrize("high", [0.02, 5.0], ids=["linear", "logarithmic"])
@pytest.mark.parametrize("bound", [1e-5, 0.004, 0.015, 0.04, 30.0, 1e4])
def test_an_objective_never_squeezes_the_curve(bound, high):
    chart = cdf(np.geomspace(0.01, high, 50), bound)
    scale = np.log if chart.x_log else np.asarray
    low, top = chart.x_range
    assert (scale(high) - scale(0.01)) / (scale(top) - scale(low)) > 0.3
    ((at, said, side),) = chart.placed
    assert side == (bound > top) - (bound < low) and at == bound
    assert ("\u2192" in said, "\u2190" in said) == (side > 0, side < 0)
    lines = [line for line in panels([chart]).axes[0].lines if len(set(line.get_xdata())) == 1]
    assert [line.get_xdata()[0] for line in lines] == ([bound] if side == 0 else [])


@pytest.mark.parametrize("high", [0.02, 5.0])
def test_an_objective_near_the_curve_is_a_line(high):
    chart = cdf(np.geomspace(0.01, high, 50), high * 1.5)
    assert chart.placed[0][2] == 0 and high * 1.5 < chart.x_range[1]


# -- axes ------------------------------------------------------------------------------------------
def line(*y: float, x: Sequence[float] | None = None) -> Chart:
    at = np.arange(len(y), dtype=float) if x is None else np.array(x)
    return Chart("k", "t", "x", "y", (Curve("a", at, np.array(y, float), 0),), "")


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [np.nan]])
def test_a_chart_with_nothing_to_see_ends_at_one(values):
    assert line(*values).y_range == (0, 1)


def test_a_chart_of_small_values_ends_beside_them():
    low, high = line(0.0, 0.02).y_range
    assert low == 0 and 0.02 < high < 0.03


def test_a_scale_is_logarithmic_where_one_value_would_flatten_the_others():
    assert line(1.0, 40.0).y_log and not line(1.0, 20.0).y_log and not line(0.0, 40.0).y_log
    low, high = line(1.0, 40.0).y_range
    assert 0 < low < 1 and high > 40


@pytest.mark.slow
def test_the_axes_of_picture_and_page_are_the_same():
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install 'twinserve[report]'")
    for chart in (line(3.0, 5.0, x=[2, 9]), line(1.0, 400.0), cdf([0.1, 0.2, 9.0], 3.0)):
        ax, page = panels([chart]).axes[0], interactive.figure_of(chart)
        for shown, limits in ((page.x_range, ax.get_xlim()), (page.y_range, ax.get_ylim())):
            assert (shown.start, shown.end) == pytest.approx(limits)
        assert (ax.get_xscale() == "log") == chart.x_log
        assert (ax.get_xlabel(), ax.get_ylabel()) == (chart.x, chart.y)


def test_curves_differ_in_grey():
    """Eight in a row, by dash or mark."""
    looks = {(dash(i), marked(i)) for i in range(8)}
    assert len(looks) == 8


# -- repeats ---------------------------------------------------------------------------------------
def test_a_queue_in_which_none_waits_has_room_for_one():
    rows = toy_rows(5, rate=0.1)
    rows.steps["waiting"] = 0
    assert load_figure({"a": result(rows)}).axes[0].get_ylim() == (0, 1)


def test_each_repeat_is_drawn_in_the_colour_of_its_label():
    simulated, *live = (result(toy_rows(20, seed=seed, be_share=0.0)) for seed in range(4))
    figure = latency_figure({"simulated": simulated, "live": live[0]}, {"live": live[1:]})
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert len(colours) == 4 and len(set(colours)) == 2 and len(set(colours[1:])) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["simulated", "live"]


def test_the_median_beside_a_table_of_means_is_the_tables():
    runs = [result(toy_rows(60, seed=seed, be_share=0.0)) for seed in range(4)]
    seen = [look(name, None, run) for name, run in zip(["a", "b", "b", "b"], runs, strict=True)]
    mean = np.mean([run.summary["p50_ttft_ms"] for run in runs[1:]]) / 1000
    assert f"{mean:.4g} s (b)" in next(distributions(seen)).alt


def test_the_highest_is_of_all_replicas_together():
    """5 and 4 wait at one time, 8 alone at another; of steps that touch one ends first."""
    table = pd.DataFrame(
        {
            "replica": [0, 0, 1, 1],
            "start_s": [0.0, 2.0, 1.0, 6.0],
            "end_s": [2.0, 4.0, 3.0, 7.0],
            "waiting": [3, 5, 4, 8],
        }
    )
    assert summed_peak(table, "waiting") == 9.0
    assert summed_peak(table[table["replica"] == 0], "waiting") == 5.0
    assert summed_peak(table[:0], "waiting") == 0.0


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
