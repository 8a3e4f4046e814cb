"""The experiment on what serving costs: its flood and its table. What it runs is tested in
tests/live/test_serving_price.py."""

from __future__ import annotations

import pytest

from twinserve.experiments.serving.flood import Case, Flood, cases
from twinserve.experiments.serving.main import HEADER, Found, main, price_rows
from twinserve.policies.registry import policy_names


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


def test_every_policy_is_measured_and_each_case_has_a_name_of_its_own():
    chosen = cases()
    assert {case.policy.partition(":")[0] for case in chosen} == set(policy_names())
    assert len({case.name for case in chosen}) == len(chosen)
    assert [case.policy for case in cases(["bros:chunk=64"])] == ["bros:chunk=64"]


def run(whole_s: float, ttft_s: float) -> dict:
    same = dict.fromkeys(("steps", "preemptions", "computed_again"), 1)
    return {**same, "whole_s": whole_s, "ttft_mean_s": ttft_s}


def test_a_run_is_compared_with_that_of_vllm_beside_it():
    """The second pair ran on a machine half as fast."""
    bros = [run(3.0, 0.1), run(6.0, 0.2)]
    found = Found(Case("bros"), bros, [run(2.0, 1.0), run(4.0, 2.0)])
    rows = price_rows([found, Found(Case("x"), fault="it does not start")])
    stock, row, failed = (dict(zip(HEADER, row, strict=True)) for row in rows)
    assert stock["whole, s"] == "3.00 (2.00-4.00)" and stock["x vLLM"].startswith("1.00")
    assert row["x vLLM"] == "1.50 (1.50-1.50)" and row["sooner, x"] == "10.0"
    assert failed["whole, s"] == "it does not start"


def test_no_runs_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
    assert "--repeats and --best-effort: at least 1" in capsys.readouterr().err
