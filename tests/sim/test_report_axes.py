"""What the drawn artists of a report's figures say: gaps, objectives, empty panels, repeats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.sim.test_results_rows import toy_rows
from twinserve.sim.report.axes import draw_cdf, from_zero, over_time, summed_peak
from twinserve.sim.report.figures import latency_figure, load_figure
from twinserve.sim.report.seen import look
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics import summarise


def steps(**columns) -> pd.DataFrame:
    """Two steps of a second, with a pause of six between them."""
    return pd.DataFrame({"replica": 0, "start_s": [0.0, 7.0], "end_s": [1.0, 8.0], **columns})


def result(rows) -> RunResult:
    return RunResult(rows, {}, {}, summarise(rows))


# -- cached prefixes in idle gaps ------------------------------------------------------------------
@pytest.mark.parametrize("after", [3, 50])
def test_what_is_cached_stays_while_nothing_runs(after):
    table = steps(kv_cached_blocks=[20, after])
    drawn = over_time(table, "kv_cached_blocks", np.arange(9.0), stays=True)
    assert drawn[0] == 20 and drawn[-1] == after
    np.testing.assert_allclose(drawn[1:-1], max(20, after))


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
    figure = load_figure({"a": replace_rows(rows)})
    used, best_effort, cached = figure.axes[1].collections
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in (used, best_effort, cached)]
    assert 0.9 < max(tops) <= 1 + 1e-9
    shown = cached.get_datalim(figure.axes[1].transData)
    assert shown.x0 < 1 and shown.x1 > rows.steps["end_s"].max() * 0.99


def test_what_is_cached_stays_on_a_page_too(tmp_path):
    rows = toy_rows(40, rate=0.5, blocks=200)
    rows.steps["kv_cached_blocks"] = 7
    found = look("a", tmp_path, replace_rows(rows))
    drawn = found.times["kv_cached_blocks"].mean
    first = int(np.searchsorted(found.edges, rows.steps["start_s"].min(), side="right"))
    np.testing.assert_allclose(drawn[first:], 7)
    assert (found.times["kv_used_blocks"].mean[first:] == 0).any()  # there are gaps


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
def width_of_curve(ax: Axes) -> float:
    """Share of the panel's width between the curve's ends."""
    x = ax.lines[0].get_xdata()
    ends = ax.transData.transform([(x.min(), 0), (x.max(), 0)])[:, 0]
    return float(np.diff(ax.transAxes.inverted().transform([(e, 0) for e in ends])[:, 0])[0])


@pytest.mark.parametrize("high", [0.02, 5.0], ids=["linear", "logarithmic"])
@pytest.mark.parametrize("bound", [1e-5, 0.004, 0.015, 0.04, 30.0, 1e4])
def test_an_objective_never_squeezes_the_curve(bound, high):
    ax = Figure().subplots()
    draw_cdf(ax, {"a": np.geomspace(0.01, high, 50)}, "TTFT", "time", "s", bound)
    assert width_of_curve(ax) > 0.3
    (said,) = [t for t in ax.texts if "objective" in t.get_text()]
    low, top = ax.get_xlim()
    lines = [line for line in ax.lines if len(set(line.get_xdata())) == 1]
    if low <= bound <= top:
        assert [line.get_xdata()[0] for line in lines] == [bound] and said.xy[0] == bound
    else:  # its side is said, in the panel
        assert lines == [] and said.xy[0] == (bound > top)
        assert ("\u2192" in said.get_text()) == (bound > top)


def test_an_objective_near_the_curve_is_a_line():
    for high in (0.02, 5.0):
        ax = Figure().subplots()
        draw_cdf(ax, {"a": np.geomspace(0.01, high, 50)}, "TTFT", "time", "s", high * 1.5)
        at = ax.lines[-1].get_xdata()[0]
        assert at == pytest.approx(high * 1.5) and at < ax.get_xlim()[1]


# -- empty panels ----------------------------------------------------------------------------------
@pytest.mark.parametrize("values", [[], [0.0, 0.0], [np.nan]])
def test_a_panel_with_nothing_to_see_ends_at_one(values):
    ax = Figure().subplots()
    ax.plot(range(len(values)), values)
    from_zero(ax)
    assert ax.get_ylim() == (0, 1)


def test_a_panel_of_small_values_ends_beside_them():
    ax = Figure().subplots()
    ax.plot([0, 1], [0.0, 0.02])
    from_zero(ax)
    assert 0.02 < ax.get_ylim()[1] < 0.03


def test_queue_in_which_nobody_waits_has_room_for_one():
    rows = toy_rows(5, rate=0.1)
    rows.steps["waiting"] = 0
    assert load_figure({"a": result(rows)}).axes[0].get_ylim() == (0, 1)


# -- repeats ---------------------------------------------------------------------------------------
def test_what_is_said_of_repeats_is_the_mean_of_all_and_each_is_drawn():
    live = [np.full(9, seconds) for seconds in (0.010, 0.020, 0.060)]
    ax = Figure().subplots()
    draw_cdf(ax, {"simulated": np.full(9, 0.001), "live": live}, "TTFT", "time", "ms")
    said = ax.texts[0].get_text()
    assert said == "median 1 ms (simulated) to 30 ms (live); live: mean of 3 runs"
    assert sorted(line.get_xdata()[-1] for line in ax.lines) == pytest.approx([1, 10, 20, 60])
    assert len({line.get_color() for line in ax.lines}) == 2


def test_the_median_beside_a_table_of_means_is_the_tables():
    runs = [result(toy_rows(60, seed=seed, be_share=0.0)) for seed in range(4)]
    simulated, *live = runs
    figure = latency_figure({"simulated": simulated, "live": live[0]}, {"live": live[1:]})
    mean = np.mean([run.summary["p50_ttft_ms"] for run in live])
    shown = f"{mean:.3g} ms" if mean < 1000 else f"{mean / 1000:.3g} s"
    assert f"{shown} (live)" in figure.axes[0].texts[0].get_text()


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
