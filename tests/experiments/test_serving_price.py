"""The experiment on what serving costs: its flood and its table. What it runs is tested in
tests/live/test_serving_price.py."""

from __future__ import annotations

import pytest

from twinserve.experiments.serving.cases import Case, cases
from twinserve.experiments.serving.flood import Flood
from twinserve.experiments.serving.main import main
from twinserve.experiments.serving.tables import HEADER, price_table
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
    assert sum(one.output for one in sent) == flood.output_tokens
    assert all(0 < token < 100 for one in sent for token in one.prompt)
    assert sent == list(flood.requests(100, seed=1)) != list(flood.requests(100, seed=2))


def test_every_policy_is_measured_and_each_case_has_a_name_of_its_own():
    chosen = cases()
    assert {case.policy.partition(":")[0] for case in chosen} == set(policy_names())
    assert len({case.name for case in chosen}) == len(chosen)
    assert [case.policy for case in cases(["bros:chunk=64"])] == ["bros:chunk=64"]


def run(whole_s: float, ttft_s: float) -> dict:
    same = dict.fromkeys(("batch", "preemptions", "computed_again", "decision_s"), 1)
    times = {"whole_s": whole_s, "ttft_mean_s": ttft_s, "ttft_max_s": 2 * ttft_s}
    return {**same, **times, "flood_ttft_mean_s": 3.0, "steps": 10, "ledger": "", "blocks": 9}


def test_a_run_is_compared_with_that_of_vllm_beside_it():
    """The second pair ran on a machine half as fast."""
    bros = [run(3.0, 0.1), run(6.0, 0.2)]
    cases_ = [
        {"name": "bros", "runs": bros, "beside": [run(2.0, 1.0), run(4.0, 2.0)], "fault": ""},
        {"name": Case("x").name, "runs": [], "beside": [], "fault": "it does not start"},
    ]
    report = {"flood": {"real_time": 1, "best_effort": 2}, "engine": {"model": "tiny"}}
    table = price_table({**report, "cases": cases_})
    stock, row, failed = (dict(zip(HEADER, row, strict=True)) for row in table.rows)
    assert stock["whole, s"] == "3.00 (2.00-4.00)" and stock["x vLLM"].startswith("1.00")
    assert row["x vLLM"] == "1.50 (1.50-1.50)" and row["sooner, x"] == "10.0"
    assert failed["ledger, blocks"] == "it does not start"


@pytest.mark.parametrize("given", [["--repeats", "5"], ["--best-effort", "9"]])
def test_a_quick_look_refuses_what_it_would_not_heed(given, capsys):
    with pytest.raises(SystemExit):
        main(["--quick", *given])
    assert "--quick has a flood of its own" in capsys.readouterr().err
