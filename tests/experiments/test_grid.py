"""The runner of many points, and the studies on top of it."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experiments.squares import CALLS, square
from twinserve.experiments.study import command
from twinserve.experiments.study.command import GridOptions
from twinserve.experiments.study.points import Plan, Point, planned, run_grid
from twinserve.experiments.study.study import Figure, Scale, Study, how_long
from twinserve.experiments.study.tables import Table
from twinserve.experiments.study.verdict import Claim
from twinserve.sim.report.over import with_digits
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep import points as sweep_points
from twinserve.sim.sweep.baseline import KINDS, told
from twinserve.sim.sweep.points import KEPT
from twinserve.sim.sweep.statistics import interval, over_seeds
from twinserve.traces import catalog


def points(scale: Scale) -> list[Point]:
    return [Point({"x": x, "seed": s}, {"x": x, "seed": s}) for x in (1, 2, 3) for s in scale.seeds]


@pytest.fixture(autouse=True)
def _forget():
    CALLS.clear()


@pytest.mark.nightly
def test_rows_come_in_the_order_of_the_points_whoever_ran_them(tmp_path):
    alone = run_grid(square, points(Scale()), tmp_path / "a", workers=1)
    many = run_grid(square, points(Scale()), tmp_path / "b", workers=2)
    assert alone.y.tolist() == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    pd.testing.assert_frame_equal(alone, many)


def test_what_has_ended_is_not_run_again(tmp_path):
    run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1)
    run_grid(square, points(Scale(seeds=(0, 1))), tmp_path, workers=1)
    assert CALLS == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1)]


def test_points_of_other_code_are_run_again_unless_they_are_asked_for(tmp_path):
    run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1)
    for file in (tmp_path / KEPT).iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sources": "another"}))
    run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1, any_version=True)
    assert len(CALLS) == 3
    run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1)
    assert len(CALLS) == 6


@pytest.mark.parametrize("content", [b"", b'{"sources": "a', b"[1]", b'{"rows": []}', b"\xff\xfe"])
def test_a_damaged_point_is_run_again(tmp_path, content):
    first = run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1)
    damaged = next(
        file
        for file in (tmp_path / KEPT).iterdir()
        if json.loads(file.read_text())["rows"] == [{"y": 4}]
    )
    damaged.write_bytes(content)
    again = run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1, any_version=True)
    pd.testing.assert_frame_equal(first, again)
    assert CALLS == [(1, 0), (2, 0), (3, 0), (2, 0)]


def test_points_with_other_traces_are_run_again(tmp_path, monkeypatch):
    """Whatever version is asked for: nothing at hand, a file, another content, and the file again
    at another place."""
    monkeypatch.setenv("TWINSERVE_CACHE", str(tmp_path / "cache"))

    def runs(folder: str, content: str = "") -> int:
        before = len(CALLS)
        if content:
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "mooncake_toolagent.jsonl").write_text(content)
            published = hashlib.sha256(content.encode()).hexdigest()
            info = replace(catalog.BY_NAME["mooncake:toolagent"], sha256=published)
            monkeypatch.setitem(catalog.BY_NAME, info.name, info)
        monkeypatch.setenv("TWINSERVE_TRACES", str(tmp_path / folder))
        run_grid(square, points(Scale(seeds=(0,))), tmp_path / "out", workers=1, any_version=True)
        return len(CALLS) - before

    assert [
        runs("nowhere"),
        runs("nowhere"),
        runs("a", "x"),
        runs("a"),
        runs("a", "y"),
        runs("b", "y"),
    ] == [3, 0, 3, 0, 3, 0]


def broken(x: int, seed: int) -> dict:
    if x == 3:
        raise SettingsError("three is too many")
    return square(x, seed)


def test_a_failing_point_loses_none_that_ended(tmp_path):
    for _ in range(2):
        with pytest.raises(SettingsError, match="three"):
            run_grid(broken, points(Scale(seeds=(0,))), tmp_path, workers=1)
    assert CALLS == [(1, 0), (2, 0)]


def test_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = [
        abs(mean - 5) <= half for mean, half in (interval(rng.normal(5, 2, 4)) for _ in range(2000))
    ]
    assert 0.93 < np.mean(covered) < 0.97
    assert math.isnan(interval([1.0])[1])


def test_over_seeds_keeps_the_order_of_appearance():
    frame = pd.DataFrame(
        {"p": ["b", "a", "b", "a"], "seed": [0, 0, 1, 1], "v": [1.0, 5.0, 3.0, 5.0]}
    )
    found = over_seeds(frame, ["p"], ["v"])
    assert (
        found.p.tolist() == ["b", "a"]
        and found.v.tolist() == [2.0, 5.0]
        and found.v_ci.tolist()[1] == 0.0
    )


def study() -> Study:
    figure = Figure(
        "fig1",
        "squares",
        points,
        square,
        lambda frame: over_seeds(frame, ["x"], ["y"]),
        lambda canvas, table, _: canvas.subplots().plot(table.x, table.y),
        lambda table: [
            Claim(
                "Fig. 1",
                "largest",
                "9",
                with_digits(table.y.max(), 0.0),
                "direction only",
                "seeds are | added",
            )
        ],
    )
    return Study(
        "squares",
        "a book",
        [figure],
        [Claim("Fig. 2", "cubes", "27", "-", "not reproduced", "no cubes here")],
    )


def test_a_study_writes_tables_plots_and_claims(tmp_path):
    said = study().command(("fig1",), GridOptions(seeds=2, workers=1, out=tmp_path))
    assert said.strip() == str(tmp_path / "paper_vs_ours.md")
    text = (tmp_path / "paper_vs_ours.md").read_text()
    assert (
        "| Fig. 1 | largest | 9 | 9.5 ± 0 | direction only | seeds are \\| added |" in text
        and "no cubes here" in text
    )
    assert "seeds 0, 1" in text
    assert {p.name for p in (tmp_path / "fig1").iterdir()} == {
        "points.csv",
        "table.csv",
        "plot.png",
        "claims.json",
    }


@pytest.mark.slow
def test_what_is_stale_is_named(tmp_path, capsys, monkeypatch):
    """Nothing run, what this code made, a table that was edited, other runs, other code."""
    monkeypatch.setattr(command, "_of_package", lambda name: study())

    def checked() -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            command.study("squares", options=GridOptions(out=tmp_path, check=True))
        return ended.value.code, capsys.readouterr().out

    assert checked() == (1, "fig1: not run\n")
    study().command((), GridOptions(seeds=2, workers=1, out=tmp_path))
    assert capsys.readouterr().err.startswith("6 runs\n")
    assert checked() == (0, "what is kept is what this code makes\n")
    table, claims = tmp_path / "fig1" / "table.csv", tmp_path / "fig1" / "claims.json"
    whole = table.read_text()
    table.write_text(whole.replace("9.5", "9.6"))
    assert "not that of its runs" in checked()[1]
    table.write_text(whole)
    made = json.loads(claims.read_text())
    for name, said in (("runs", "those of its grid"), ("sources", "other code")):
        claims.write_text(json.dumps(made | {"made": made["made"] | {name: "another"}}))
        code, line = checked()
        assert code == 1 and said in line
    report = tmp_path / study().report
    assert f"Run by twinserve {made['made']['version']}" in report.read_text()
    claims.write_text(json.dumps({name: of for name, of in made.items() if name != "made"}))
    assert "is unknown" in checked()[1]
    study().redraw((), tmp_path)  # draws, and does not know who ran it
    assert "Run by a version that is not known: rules" in report.read_text()
    assert "is unknown" in checked()[1]


@pytest.mark.parametrize(
    ("file", "text", "same"),
    [
        ("policies/a.py", '# Other.\ndef f(x):\n    "Words."\n    return (x + 1)\n', True),
        ("policies/a.py", 'def f(x):\n    """Doc."""\n    return x + 2  # why\n', False),
        ("policies/a.py", 'def f(x):\n    """Doc."""\n    return "Doc."\n', False),
        ("backends/live/a.py", "y = 1", True),
        ("sim/report/a.py", "y = 1", True),
        ("native/a.py", "y = 1", False),
        ("native/a.pyx", "cdef int y = 1", False),
        ("native/a.pxd", "cdef int y", False),
        ("formats.py", "y = 1", False),
        ("errors.py", "y = 1", True),
    ],
)
def test_code_is_other_code_if_it_computes_something_else(tmp_path, monkeypatch, file, text, same):
    def digest(name: str, **files: str) -> str:
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(content)
        monkeypatch.setattr(sweep_points, "ROOT", tmp_path / name)
        monkeypatch.setattr(sweep_points, "FORMATS", tmp_path / name / "formats.py")
        return sweep_points.code_digest(square)

    text_before = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    before = {"policies/a.py": text_before, "formats.py": "x = 1"}
    assert (digest("old", **before) == digest("new", **before | {file: text})) == same


def test_how_long_a_study_takes_is_told_by_what_its_runs_took(tmp_path):
    run_grid(square, points(Scale(seeds=(0,))), tmp_path, workers=1)
    for file, seconds in zip(sorted((tmp_path / KEPT).iterdir()), (30.0, 60.0, 90.0), strict=True):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": seconds}))
    plan = planned([(square, points(Scale(seeds=(0, 1)))), (broken, [])], tmp_path)
    assert plan == Plan(total=6, left=3, seconds=180.0)
    assert how_long(plan, 1) == "6 runs, 3 of them kept, about 3 min"
    assert how_long(plan, 3) == how_long(plan, 99) == "6 runs, 3 of them kept, about 1 min"
    # other code: all are to be run again, and take what they took
    for file in (tmp_path / KEPT).iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sources": "another"}))
    assert planned([(square, points(Scale(seeds=(0,))))], tmp_path) == Plan(3, 3, 180.0)
    assert how_long(planned([(square, points(Scale()))], tmp_path / "new"), 1) == "9 runs"


@pytest.mark.parametrize(
    ("arguments", "said"), [(["fig9"], "no figure 'fig9'; there are fig1"), ([], "from 1 to 1000")]
)
def test_what_is_not_there_is_refused(tmp_path, arguments, said):
    seeds = None if arguments else 0
    with pytest.raises(SettingsError, match=said):
        study().command(arguments, GridOptions(seeds=seeds, out=tmp_path))
    assert not CALLS


values = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=6), st.randoms())
def test_gains_are_of_the_same_seed_whatever_the_order(pairs, random):
    """Against a plain loop over seeds; a run without a baseline gains nan."""
    rows = [
        {"policy": policy, "seed": seed, "x": x}
        for seed, both in enumerate(pairs)
        for policy, x in zip(("a", "b"), both, strict=True)
    ]
    rows.append({"policy": "b", "seed": len(pairs), "x": 1.0})
    random.shuffle(rows)
    frame = pd.DataFrame(rows)
    gains = {kind: ("x", kind) for kind in KINDS}
    found = Table((), gains=gains, base={"policy": "a"}).compared(frame)
    for row in found.to_dict("records"):
        if row["seed"] == len(pairs):
            assert all(np.isnan(row[kind]) for kind in KINDS)
            continue
        mine, theirs = row["x"], pairs[row["seed"]][0]
        assert row["ratio"] == mine / theirs and row["change"] == mine / theirs - 1
        assert row["difference"] == mine - theirs == -row["saving"]
        assert row["factor"] == theirs / mine


@given(values, st.floats(0, 1e3) | st.just(float("nan")), values)
def test_a_gain_is_told_where_its_whole_interval_is_on_one_side(gain, half, neutral):
    said = told(gain, half, ("above", "below", "open"), neutral)
    mirrored = told(-gain, half, ("below", "above", "open"), -neutral)
    assert said == mirrored
    assert said == "open" or half < abs(gain - neutral) * (1 + 1e-9)


def scaled(x: int, scale: int = 1) -> dict:
    return {"y": x * scale}


def test_a_default_is_part_of_a_kept_point(tmp_path, monkeypatch):
    """What a point does not say, the function does: another default is another point, the same
    value said is the same."""
    assert run_grid(scaled, [Point({}, {"x": 2})], tmp_path, 1).y.tolist() == [2]
    assert run_grid(scaled, [Point({}, {"x": 2, "scale": 1})], tmp_path, 1).y.tolist() == [2]
    assert len(list((tmp_path / KEPT).iterdir())) == 1
    monkeypatch.setattr(scaled, "__defaults__", (3,))
    assert run_grid(scaled, [Point({}, {"x": 2})], tmp_path, 1, any_version=True).y.tolist() == [6]
