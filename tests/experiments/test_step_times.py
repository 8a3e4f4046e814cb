"""Forms of step times scored on measured steps and prompts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("aiconfigurator_core")

from tests.truth import truth  # noqa: E402
from twinserve.experiments.measured.points import Measured, read_measured  # noqa: E402
from twinserve.experiments.measured.scores import scores, whole  # noqa: E402
from twinserve.experiments.step_times import main  # noqa: E402
from twinserve.experiments.step_times.main import seconds  # noqa: E402
from twinserve.profiles.composition import decode_work  # noqa: E402
from twinserve.profiles.evidence import SERVER_ERRORS  # noqa: E402
from twinserve.profiles.profile import load_profile  # noqa: E402

ONE = Measured("a", "tpot", "llama-3.1-8b@h100", 100, 200, 1, 0.0075, ahead=True)


@pytest.fixture(scope="module")
def points():
    for name in ("step_points.csv", "prefill_points.csv", "public_bench.csv"):
        truth(name)
    return read_measured()


@pytest.fixture(scope="module")
def scored(points):
    return main.score(points, ["roofline"])


def test_one_request_decodes_at_the_profile_s_step():
    profile = load_profile(ONE.profile)
    step = profile.model().step_seconds(decode_work(1, 200))
    assert seconds(ONE, profile) == pytest.approx(step)
    more = seconds(replace(ONE, concurrency=8), profile)
    assert more > profile.model().step_seconds(decode_work(8, 200))  # others' prompts
    assert seconds(replace(ONE, ahead=False), profile) > step


def test_a_load_beyond_the_memory_is_not_scored():
    rows = main.score([replace(ONE, concurrency=1e5)], ["roofline"])
    assert rows.why.tolist() == ["more KV than there is room"]


def test_a_summary_counts_what_ranges_hold():
    rows = pd.DataFrame({"source": ["a", "a", "b"], "kind": ["x"] * 3, "ratio": [1.0, 1.05, 2.0]})
    (row,) = scores(main.ranged(rows.assign(error=0.1)), ["kind"]).to_dict("records")
    assert (row["points"], row["sources"], row["median"]) == (3, 2, pytest.approx(5))
    assert row["mean"] == row["size"] == pytest.approx(35)
    assert row["held"] == pytest.approx(200 / 3) and row["width"] == pytest.approx(21)
    missed = 20 * (np.log(2) - np.log(1.1))
    assert row["interval"] == pytest.approx(100 * (2 * np.log(1.1) + missed / 3))


@pytest.mark.slow
def test_mixtures_and_quantised_models_are_near_what_was_measured(scored):
    """On all points of these kinds; none was fitted to. The roofline was 15 and 34 % off."""
    rows = scored[(scored.why == "") & (scored.what == "tpot") & (scored.kind != "dense 16 bits")]
    error = (rows.ratio - 1).abs()
    assert len(rows) > 400
    assert error.median() < 0.08 and error.quantile(0.9) < 0.2


def test_a_bar_caps_what_a_source_counts_and_is_wider_for_strangers():
    near = pd.DataFrame(
        {"kind": "mixture fp8", "family": "hopper", "class": main.MIXTURE}, range(24)
    )
    near = near.assign(source=["a"] * 20 + ["b"] * 4, size=[0.01] * 20 + [0.2, 0.3, 0.4, 0.5])
    assert main.bar(near, "mixture fp8", main.MIXTURE, "hopper") == (np.expm1(0.4), 24)
    alone = near[near.source == "b"]
    assert main.bar(alone, "mixture fp8", main.MIXTURE, "hopper") is None
    alone = near[near.source == "a"]
    wider = pytest.approx(np.expm1(main.STRANGERS * 0.01))
    assert main.bar(alone, "mixture fp8", main.MIXTURE, "hopper") == (wider, 20)
    assert main.bar(near, "mixture mxfp4", main.MIXTURE, "ada") == (
        pytest.approx(np.expm1(main.STRANGERS * 0.4)),
        24,
    )


def test_a_source_is_scored_with_the_ranges_of_others():
    rows = pd.DataFrame({"source": list("aaaaabbbbb"), "ratio": [1.1] * 5 + [1.3] * 5})
    rows = rows.assign(
        form="roofline", what="tpot", kind="dense fp8", family="hopper", why="", suspect=False
    )
    unseen = main.held_out(rows)
    errors = unseen.groupby("source").error.first()
    assert errors["a"] == pytest.approx(1.3**main.STRANGERS - 1)
    assert errors["b"] == pytest.approx(1.1**main.STRANGERS - 1)


@pytest.mark.slow
def test_the_stored_errors_are_those_of_the_points(scored):
    found = main.bars(scored)
    stored = {key: value for key, value in SERVER_ERRORS.items() if key[0] == "roofline"}
    assert found.keys() == stored.keys()
    for key, (error, count) in stored.items():
        assert found[key] == (pytest.approx(error, abs=0.0011), count), key


@pytest.mark.nightly
def test_the_stored_errors_of_tables_are_those_of_the_points(points):
    found = main.bars(main.score(points, ["operators"]))
    of_tables = {key: value for key, value in found.items() if key[0] == "operators"}
    for key, (error, count) in of_tables.items():
        assert SERVER_ERRORS[key] == (pytest.approx(error, abs=0.0011), count), key


def test_the_study_has_tables(points, monkeypatch):
    monkeypatch.setattr(main, "read_measured", lambda: points[:12])
    rows = whole(pd.DataFrame(main.scored("roofline", 0)).assign(seed=0))
    printed = main.markdown(rows)
    assert "### By kind and GPU family" in printed and "| decode | dense 16 bits |" in printed
    assert "### Not scored" in printed


@pytest.mark.slow
def test_runs_are_scored_beside_benchmarks(points, monkeypatch):
    bench = main.rows_of("public_bench.csv")
    monkeypatch.setattr(main, "rows_of", lambda name: [bench[0], bench[31]])
    rows = main.score_runs("roofline")
    assert rows.metric.tolist() == ["TPOT", "TTFT", "throughput", ""]
    assert (rows.low[:3] <= rows.ratio[:3]).all() and (rows.ratio[:3] <= rows.high[:3]).all()
    assert "### Runs by source" in main.markdown_of_runs(rows)
