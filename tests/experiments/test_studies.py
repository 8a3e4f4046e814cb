"""What studies as data are made of: grids, columns of runs, tables, texts; a user's own study."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.study.claims import Number, Said, claims, most, rows_of, teller, texts
from twinserve.experiments.study.grid import Grid, joined, windows
from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Scale
from twinserve.experiments.study.tables import BEFORE, Against, Table, Text, mean
from twinserve.sim.setup.config import SettingsError

COLUMNS = {"kept": "classes.rt.slo_attainment"}


# -- grids -----------------------------------------------------------------------------------------
def test_a_grid_crosses_what_varies_the_seed_changing_fastest():
    grid = Grid(
        {
            "load": (0.5, 1.0),
            "system": {"a": {"policy": "vllm", "pool": 4}, "b": {"policy": "bros"}},
        },
        common={"trace": "sharegpt"},
        columns=COLUMNS,
        where=lambda axes: axes != {"load": 1.0, "system": "b"},
    )
    found = grid(Scale(seeds=(0, 1)))
    axes = [tuple(point.axes.values()) for point in found]
    assert axes == [
        (load, s, n) for load, s in ((0.5, "a"), (0.5, "b"), (1.0, "a")) for n in (0, 1)
    ]
    assert found[0].arguments == {
        "settings": {"trace": "sharegpt", "load": 0.5, "policy": "vllm", "pool": 4, "seed": 0},
        "columns": COLUMNS,
    }
    assert len(joined(grid, grid)(Scale(seeds=(0,)))) == 6


def test_windows_follow_the_seed_and_the_smallest_grid_is_smaller():
    grid = Grid(
        {"trace": {"mooncake": {"trace": "mooncake", "windows": windows((0, 600), 60.0)}, "b": {}}},
        common={"pool": 64},
        few={"trace": ("mooncake",)},
        quick={"pool": lambda pool: pool // 8, "rate": 1.0, "windows": windows((0,), 5.0)},
    )
    full = [point for point in grid(Scale(seeds=(0, 1, 2))) if point.axes["trace"] == "mooncake"]
    assert [p.axes["window"] for p in full] == [0.0, 600.0, 0.0]
    assert full[1].arguments["window"] == [600.0, 660.0]
    (quick,) = grid(Scale(quick=True, seeds=(1,)))
    assert quick.arguments == {"trace": "mooncake", "pool": 8, "window": [0.0, 5.0], "seed": 1}


# -- runs ------------------------------------------------------------------------------------------
SMALL = {"policy": "vllm", "trace": "sharegpt", "profile": "llama-3.1-8b@h100", "seed": 0}
SMALL |= {"rate": 4.0, "duration": 3.0, "slo": "ttft=1,tpot=0.05"}


def test_columns_are_numbers_of_the_summary():
    row = run(
        {**SMALL, "beside": {"documents": "toolbench", "requests": 30}, "until_online": 0.5},
        {
            **COLUMNS,
            "ttft_s": "classes.rt.mean_ttft_ms / 1000",
            "ttft_ms": "classes.rt.mean_ttft_ms",
            "online": "classes.rt.submitted",
            "both": "classes.rt.submitted + classes.be.submitted",
            "share": "classes.rt.submitted / classes.rt.submitted",
            "none": "classes.nobody.submitted",
            "nothing": "classes.nobody.submitted or 0",
            "steady": "classes.rt.saturation.verdict == saturated",
            "planning": "decision_share",
            "left": "offline_left",
            "span_s": "online_span_s",
        },
    )
    assert row["kept"] == 1.0 and np.isnan(row["none"]) and row["share"] == 1.0
    assert row["both"] == row["online"] + 30 and row["ttft_s"] == row["ttft_ms"] / 1000
    assert row["nothing"] == row["steady"] == 0 < row["planning"] < 1
    assert 0 <= row["left"] < 30 and 0 < row["span_s"] < 3


# -- tables ----------------------------------------------------------------------------------------
def points() -> pd.DataFrame:
    """Two seeds, three parts: the second keeps 0.2 and 0.4 more than the first, the third as much
    as the second."""
    kept = {"a": (0.1, 0.5), "b": (0.3, 0.9), "c": (0.3, 0.9)}
    rows = [{"part": part, "seed": s, "kept": kept[part][s]} for part in kept for s in (0, 1)]
    return pd.DataFrame(rows)


GAIN = {"gain": ("kept", "difference")}
VERDICT = {"verdict": ("gain", 0.0, ("more", "less", "open", "the same"))}


def test_gains_are_paired_by_seed_and_judged():
    rows = Table(("part",), None, GAIN, BEFORE, verdicts=VERDICT)(points()).set_index("part")
    assert list(rows.columns) == ["verdict", "seeds", "gain", "gain_ci", "kept", "kept_ci"]
    assert np.isnan(rows.gain["a"]) and rows.gain["b"] == pytest.approx(0.3)
    # t(0.975, 1) x sd / sqrt(2) of 0.2 and 0.4
    assert rows.gain_ci["b"] == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert list(rows.verdict) == ["", "open", "the same"]
    rows = Table(("part",), None, GAIN)(points()).set_index("part")
    assert rows.gain["c"] == pytest.approx(0.3) and np.isnan(rows.gain["a"])
    rows = Table(("part",), ["kept"], GAIN, {"part": "b"}, own=False)(points())
    assert rows.part.tolist() == ["a", "c"] and rows.gain.tolist() == pytest.approx([-0.3, 0.0])


def test_a_ratio_to_nothing_is_no_number():
    rows = points().assign(kept=[0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    found = Table(("part",), None, {"gain": ("kept", "ratio")}, {"part": "a"})(rows)
    assert found.gain.isna().all()


def test_a_run_may_have_several_baselines_and_one_by_its_own_value():
    """Each rung against the first one and against the rung below; shown where it is asked for."""
    runs = pd.DataFrame(
        {"rung": rung, "seed": seed, "rate": rate * (1 + seed)}
        for seed in (0, 1)
        for rung, rate in (("a", 1.0), ("b", 4.0), ("c", 2.0))
    )
    table = Table(
        ("rung",),
        ("rate", "step"),
        {"over": ("rate", "ratio")},
        {"rung": "a"},
        also=(Against({"step": ("rate", "ratio")}, {"rung": {"b": "a", "c": "b"}}),),
        derived={"twice": lambda found: 2 * found.over},
    )
    found = table(runs)
    assert [*found][:2] == ["rung", "seeds"] and [*found][2::2] == ["over", "twice", "rate", "step"]
    assert found.over.tolist() == [1, 4, 2] and found.twice.tolist() == [2, 8, 4]
    assert np.isnan(found.step[0]) and found.step[1:].tolist() == [4, 0.5]


def test_means_over_an_axis_are_taken_seed_by_seed():
    """And what is only compared with is not shown."""
    runs = pd.DataFrame(
        [
            {"load": load, "policy": policy, "seed": seed, "s": s}
            for load, seed, pair in ((1, 0, (2, 4)), (1, 1, (4, 4)), (2, 0, (1, 3)), (2, 1, (1, 1)))
            for policy, s in zip(("a", "b"), pair, strict=True)
        ]
    )
    table = Table(
        ("load", "policy"),
        ("more",),
        {"_a": ("s", "baseline")},
        {"policy": "a"},
        ("load",),
        own=False,
        derived={"more": lambda rows: rows.s - rows._a},
        prepared=lambda points: points.assign(s=10 * points.s),
        pooled="load",
    )
    found = table(runs)
    assert found.load.tolist() == [1, 2, "all"] and found.more.tolist() == [10, 10, 10]
    assert found.more_ci.tolist() == [pytest.approx(10 * 12.706, rel=1e-3)] * 3
    assert "_a" not in found


def test_a_number_keeps_its_interval_and_is_judged_with_it():
    table = pd.DataFrame({"at": [1, 2, 2], "gain": [np.nan, 0.3, 0.2], "gain_ci": [0.0, 0.1, 0.3]})
    first, second = rows_of(table, at=2)
    assert first.at == 2 and f"{100 * first.gain:2}" == "30 ± 10"
    assert (1 - first.gain, abs(first.gain - 1)) == (Number(0.7, 0.1), Number(0.7, 0.1))
    assert [first.gain.above(0.1), first.gain.below(0.1)] == ["agrees", "differs"]
    assert second.gain.above(0.1) == second.gain.more() == "not significant"
    assert Number(0.3, 0.01).beside(0.3) == "agrees"
    rows = rows_of(table)
    assert most(rows, "gain").gain.mean == 0.3 and most(rows, "gain", -1).gain.mean == 0.2
    assert not rows[0].gain.known


def test_a_text_has_a_table_of_each_and_a_column_of_each():
    table = Table(("part",), None, GAIN)(points()).assign(load=[1, 1, 2], x=[1, 2, 1])
    said = Text("Over {seeds} seeds.", {"part": "part"}, {"kept": mean("kept")}, each="load")(table)
    assert said.startswith(
        "Over 2 seeds.\n\n**1**\n\n| part | kept |\n|---|---|\n| a | 0.3 ± 2.5 |"
    )
    wide = Text("", {"load": "load"}, {"": mean("gain")}, over="x", over_heading="x {}")
    assert "| load | x 1 | x 2 |" in wide(table) and "| 2 | 0.3 ± 1.3 |  |" in wide(table)


def test_a_number_of_a_paper_stands_beside_a_row():
    table = pd.DataFrame({"part": ["a", "b"], "gain": [0.3, 0.5], "gain_ci": [0.01, 0.01]})
    said = Said("Fig. 1", "gain, %", "50 %", 50.0, {"part": "b"}, "gain", "not known", 0.0, 100.0)
    (claim,) = claims(said, replace(said, row={"part": "c"}))(table)
    assert (claim.ours, claim.verdict, claim.why) == ("50.0 ± 1.0", "agrees", "")
    (claim,) = claims(replace(said, row={"part": "a"}, neutral=None))(table)
    assert (claim.verdict, claim.why, claim.directed) == ("differs", "not known", False)
    # no number is printed, only a direction
    said = replace(said, paper="lower", number=None, text="{} points")
    (claim,) = claims(said)(table)
    assert (claim.ours, claim.verdict, claim.paper) == ("50.0 ± 1.0 points", "differs", "lower")
    assert claims(replace(said, paper="higher"))(table)[0].verdict == "agrees"
    assert claims(replace(said, paper="higher", neutral=48.0))(table)[0].verdict == "no effect"


def test_words_of_claims_are_data(tmp_path):
    (tmp_path / "texts.yaml").write_text(
        """WHY: too small
CLAIMS:
  kept: {where: Fig. 1, what: "kept, {policy}", paper: most, ours: "{kept:%}", why: "{WHY}"}
SIZES: [1, 2]
"""
    )
    said = texts(str(tmp_path / "main.py"))
    assert said.SIZES == (1, 2) and said.CLAIMS["kept"]["why"] == "too small"
    (row,) = rows_of(pd.DataFrame([{"policy": "a", "kept": 0.25, "kept_ci": 0.01}]))
    claim = teller(said)("kept", row.kept.above(0.5), row)
    assert (claim.what, claim.ours, claim.why) == ("kept, a", "25.0 ± 1.0 %", "too small")
    assert claim.directed and not teller(said)("kept", "agrees", row, directed=False).directed


def test_a_file_that_is_no_study_is_a_line(tmp_path, capsys):
    from twinserve.experiments.study.command import study

    with pytest.raises(SettingsError, match=r"none.py: there is no such file"):
        study(str(tmp_path / "none.py"))
    file = tmp_path / "mine.py"
    for text, said in (("x = 1", "names no STUDY"), ("x = y", "NameError: name 'y'")):
        file.write_text(text)
        with pytest.raises(SettingsError, match=said):
            study(str(file))
