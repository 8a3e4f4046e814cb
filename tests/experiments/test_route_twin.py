"""Live runs of the front beside simulated ones."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.route.main import STUDY, beside, metrics
from twinserve.experiments.study.command import GridOptions

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results" / "route"


def ran(figure: str, out: Path) -> pd.DataFrame:
    """The rows of the smallest grid of a figure."""
    STUDY.command((figure,), GridOptions(quick=True, seeds=1, out=out))
    return pd.read_csv(out / figure / "points.csv")


def test_metrics_are_of_whole_answers():
    """Three of four; the last has one token."""
    latencies = {"ttft": [0.1, 0.3, 0.2], "tpot": [0.02, 0.02, math.nan], "e2el": [1.0, 2.0, 0.2]}
    found = metrics({name: np.array(values) for name, values in latencies.items()}, 4)
    assert found["ttft mean, ms"] == pytest.approx(200)
    assert found["tpot p99, ms"] == pytest.approx(20)
    assert found["failed"] == 1


def test_a_simulation_is_inside_where_live_runs_are_on_both_sides():
    table = pd.DataFrame(
        {
            "run": ["live 1", "live 2", "simulated"],
            "tpot mean, ms": [10.0, 14.0, 15.0],
            "sent to 1": [3.0, 5.0, 4.0],
        }
    )
    found = beside(table).set_index("metric")
    assert found["inside"].tolist() == ["no", "yes"]
    assert found["off by"].tolist() == ["+25.0 %", "+0"]
    assert found.loc["sent to 1", ["least", "most"]].tolist() == ["3", "5"]


@pytest.mark.nightly
@pytest.mark.live
def test_emulated_servers_and_the_simulation(tmp_path):
    """Of step times that are known: what is off is the machine's, never less than nothing."""
    pytest.importorskip("vllm")
    table = ran("twin", tmp_path).set_index("run")
    assert not table.loc["live 1", ["other views", "other picks"]].any()
    assert (table["failed"] == 0).all() and table.index.tolist() == ["live 1", "simulated"]
    assert (table[["sent to 1", "sent to 2"]].sum(axis=1) == 24 + table["moved"]).all()
    assert (table[["moved", "sent to 1", "sent to 2"]] > 0).all(axis=None)
    live, simulated = (table.loc[run, "tpot p50, ms"] for run in table.index)
    assert live > 0.98 * simulated
    assert (table["prefix hits, %"] > 5).all()
