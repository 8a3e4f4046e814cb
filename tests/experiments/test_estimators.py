"""The study of estimators on the same loads: what each run is, and what is compared with what."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.estimators.main import (
    BELIEFS,
    EXACT,
    LOADS,
    METRICS,
    POLICIES,
    STUDY,
    costs,
    inputs_of,
    points,
)
from twinserve.experiments.study.study import Scale
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.forms.sums import BatchSumsModel


def test_every_system_gets_the_same_requests_whatever_it_believes():
    for load, work in LOADS.items():
        small = {"duration": 5.0} | {k: min(v, 8) for k, v in work.items()}
        found = [
            inputs_of(policy, estimator, seed=1, **small).workload
            for policy in POLICIES.values()
            for estimator in BELIEFS
        ]
        first = found[0]
        assert (first.service_class == 0).any()
        assert first.pool or (first.service_class == 1).any()
        for other in found[1:]:
            assert other.ids == first.ids and other.pool == first.pool, load
            assert np.array_equal(other.prompt_tokens, first.prompt_tokens)


def test_beliefs_are_what_they_are_called():
    def believed(policy: str, estimator: str):
        inputs = inputs_of(policy, estimator, rate=1.0, seed=0, duration=5.0)
        (spec,) = inputs.policies
        return inputs.estimator_for(spec.policy).model, inputs.hardware.model

    for policy in POLICIES.values():
        exact, truth = believed(policy, EXACT)
        assert exact is truth
        common, truth = believed(policy, "echo-sum")
        assert isinstance(common, BatchSumsModel) and common is not truth
    assert isinstance(believed(POLICIES["BROS"], "paper")[0], BrosLinearModel)
    own = [type(believed(policy, "paper")[0]) for policy in POLICIES.values()]
    assert type(believed(POLICIES["Echo"], EXACT)[1]) not in own


def test_costs_are_against_exact_step_times_with_the_same_seed():
    rows = []
    for seed, (own, exact) in enumerate(((0.4, 0.5), (0.8, 1.0))):
        for estimator, value in (("paper", own), (EXACT, exact)):
            axes = {"load": "l", "system": "BROS", "estimator": estimator, "seed": seed}
            rows.append(axes | dict.fromkeys(METRICS, value))
    found = costs(pd.DataFrame(rows)).set_index("estimator")
    assert found.cost_kept["paper"] == pytest.approx(-0.15)  # points
    assert found.cost_offline_tps["paper"] == pytest.approx(0.8)  # a ratio
    assert found.cost_kept[EXACT] == 0 and found.cost_ttft_ms[EXACT] == 1


def test_the_full_study_runs_all_of_them():
    found = points(Scale())
    assert len(found) == len(LOADS) * len(POLICIES) * len(BELIEFS) * 3
    assert {p.arguments["estimator"] for p in found} == set(BELIEFS)


@pytest.mark.nightly
def test_the_study_at_its_smallest(tmp_path):
    STUDY.run((), Scale(quick=True, seeds=(0,)), tmp_path, workers=1)
    table = pd.read_csv(tmp_path / "loads" / "table.csv")
    assert set(table.system) == set(POLICIES) and (table.kept <= 1).all()
    assert (tmp_path / "loads" / "plot.png").stat().st_size and "BROS" in (
        tmp_path / "tables.md"
    ).read_text()
