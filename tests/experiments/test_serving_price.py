"""The study of live servers: its flood, its rows, and what it refuses. What it runs is tested in
tests/live."""

import numpy as np
import pytest

from twinserve.backends.live.versions import LiveEngineError
from twinserve.experiments.serving import main as study
from twinserve.experiments.serving.flood import CASES, Flood
from twinserve.experiments.study.study import Scale
from twinserve.policies.registry import policy_names
from twinserve.sim.cli.main import main


def test_the_flood_comes_first_and_real_time_requests_one_by_one():
    flood = Flood(best_effort=3, prompt=5, output=7, real_time=2, urgent_prompt=4, every_s=0.5)
    sent = list(flood.requests(100, seed=1))
    assert [(one.service_class, one.at_s) for one in sent] == [
        *[("be", 0.0)] * 3,
        ("rt", 0.5),
        ("rt", 1.0),
    ]
    assert [len(one.prompt) for one in sent] == [5, 5, 5, 4, 4]
    assert [one.output for one in sent] == [7, 7, 7, 40, 40]
    assert all(0 < token < 100 for one in sent for token in one.prompt)
    assert sent == list(flood.requests(100, seed=1)) != list(flood.requests(100, seed=2))


def test_every_policy_is_measured_and_each_case_is_one_of_its_own():
    policies = {case["policy"].partition(":")[0] for case in CASES.values()}
    assert policies == set(policy_names())
    assert len({repr(sorted(case.items())) for case in CASES.values()}) == len(CASES)


def run(whole_s: float, ttft_s: float, answer: int = 1) -> dict:
    same = dict.fromkeys(("steps", "preemptions", "computed_again"), 1)
    return {**same, "whole_s": whole_s, "ttft_mean_s": ttft_s, "answers": {"rt0": [answer]}}


def test_a_run_is_compared_with_that_of_vllm_beside_it(monkeypatch, capsys):
    """The second pair ran on a machine half as fast; the third policy cannot be served."""
    pairs = [[run(3.0, 0.1), run(2.0, 1.0)], [run(6.0, 0.2, 2), run(4.0, 2.0)]]

    def of(self, cases, engine, flood, seed):
        assert [case.policy for case in cases] == ["bros", None] and flood.best_effort == 8
        if seed == 2:
            raise LiveEngineError("it does not start")
        return pairs[seed]

    monkeypatch.setattr(study.Processes, "run", of)
    monkeypatch.setattr(study, "installed_vllm", lambda: "0.32")
    rows = [study.price("bros", seed, best_effort=8) for seed in range(3)]
    assert [row["over_vllm"] for row in rows[:2]] == [1.5, 1.5]
    assert [row["sooner"] for row in rows[:2]] == [10.0, 10.0]
    assert [row["differing"] for row in rows[:2]] == [0, 1]
    assert np.isnan([*rows[2].values()]).all() and rows[2].keys() == rows[0].keys()
    assert "bros: it does not start" in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["price", "plan"])
def test_without_vllm_it_is_one_line(figure, tmp_path, capsys, monkeypatch):
    def missing():
        raise LiveEngineError("no vLLM is installed")

    monkeypatch.setattr(study, "installed_vllm", missing)
    with pytest.raises(SystemExit) as end:
        main(["study", "serving", figure, "--quick", "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert end.value.code and "no vLLM is installed" in error and "Traceback" not in error


def test_repeats_are_of_one_server():
    (point,) = study.repeats(Scale(seeds=(0, 1, 2)), requests=30)
    assert point.arguments == {"repeats": 3, "requests": 30}
