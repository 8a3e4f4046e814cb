"""The study of estimators on the same loads: what each run is, and what is compared with what."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.estimators.main import (
    BELIEFS,
    EXACT,
    GRID,
    LOADS,
    METRICS,
    POLICIES,
    STUDY,
    TABLE,
)
from twinserve.experiments.study.runs import inputs_of
from twinserve.experiments.study.study import Scale
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.forms.sums import BatchSumsModel
from twinserve.sim.setup.inputs import Inputs


@pytest.fixture(scope="module")
def small() -> dict[tuple[str, str, str], Inputs]:
    """Of the smallest runs: load, system, belief -> inputs."""
    return {
        tuple(point.axes[name] for name in TABLE.by): inputs_of(point.arguments["settings"])
        for point in GRID(Scale(quick=True, seeds=(1,)))
    }


def test_every_system_gets_the_same_requests_whatever_it_believes(small):
    for load in LOADS:
        first, *others = [given.workload for key, given in small.items() if key[0] == load]
        assert len(others) == len(POLICIES) * len(BELIEFS) - 1
        assert (first.service_class == 0).any()
        assert first.pool or (first.service_class == 1).any()
        for other in others:
            assert other.ids == first.ids and other.pool == first.pool, load
            assert np.array_equal(other.prompt_tokens, first.prompt_tokens)


def test_beliefs_are_what_they_are_called(small):
    load = next(iter(LOADS))

    def believed(system: str, estimator: str):
        given = small[load, system, estimator]
        (spec,) = given.policies
        return given.estimator_for(spec.policy).model, given.hardware.model

    for system in POLICIES:
        exact, truth = believed(system, EXACT)
        assert exact is truth
        common, truth = believed(system, "echo-sum")
        assert isinstance(common, BatchSumsModel) and common is not truth
    assert isinstance(believed("BROS", "paper")[0], BrosLinearModel)
    own = [type(believed(system, "paper")[0]) for system in POLICIES]
    assert type(believed("Echo", EXACT)[1]) not in own


def test_costs_are_against_exact_step_times_with_the_same_seed():
    rows = []
    for seed, (own, exact) in enumerate(((0.4, 0.5), (0.8, 1.0))):
        for estimator, value in (("paper", own), (EXACT, exact)):
            axes = {"load": "l", "system": "BROS", "estimator": estimator, "seed": seed}
            rows.append(axes | dict.fromkeys(METRICS, value))
    found = TABLE(pd.DataFrame(rows)).set_index("estimator")
    assert found.cost_kept["paper"] == pytest.approx(-0.15)  # points
    assert found.cost_offline_tps["paper"] == pytest.approx(0.8)  # a ratio
    assert found.cost_kept[EXACT] == 0 and found.cost_ttft_ms[EXACT] == 1


@pytest.mark.nightly
def test_the_study_at_its_smallest(tmp_path):
    STUDY.run((), Scale(quick=True, seeds=(0,)), tmp_path, workers=1)
    table = pd.read_csv(tmp_path / "loads" / "table.csv")
    assert set(table.system) == set(POLICIES) and (table.kept <= 1).all()
    assert (tmp_path / "loads" / "plot.png").stat().st_size and "BROS" in (
        tmp_path / "tables.md"
    ).read_text()
