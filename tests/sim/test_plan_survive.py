"""`plan --survive`: the smallest fleet that keeps its objectives through failures at the peak."""

import json

import pytest

from tests.commands import status
from tests.parameters import mostly_nightly
from tests.sim.planned import GPU, MODEL, settings, write_trace
from twinserve.sim.cli.main import main
from twinserve.sim.plan.document import described
from twinserve.sim.plan.peaks import find_peak
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.show import foot_lines, head_lines
from twinserve.sim.plan.trial import TrialSpec, run_trial
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.executors import InThisProcess

PRICES = read_prices("gpu,usd_per_hour\na100-40g,1\n", "prices")
PEAK = {"peak_s": 1.0, "lead_s": 0.4}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", count=80, rate=40.0)


def plan(trace: str, slo: str, **further) -> Plan:
    asked = {"gpus": (GPU,), "tp": (1,), "most_gpus": 6, **PEAK, **further}
    return make_plan(Question(MODEL, (trace,), slo, **asked), PRICES, InThisProcess())


def by_brute_force(trace: str, slo: str, crashes: int, most: int, **more) -> list[bool]:
    """Whether 1, 2, ... replicas keep the objectives although so many die as the peak begins."""
    peak = find_peak(trace, 1.0, PEAK["peak_s"], PEAK["lead_s"])
    assert peak.since_s > 0.3
    keeps = []
    for n in range(1, most + 1):
        rows = [{"replica": i, "at_s": peak.since_s} for i in range(min(crashes, n))]
        failing = {"failures": json.dumps(rows), **more} if crashes else {}
        asked = {"window": peak.window_s, "replicas": n, "rate_scale": 1.0, **failing}
        given = settings(trace, slo, **asked)
        keeps.append(run_trial(TrialSpec(given, peak.since_s, early=False)).keeps)
    return keeps


SURVIVED = [
    (1, "ttft p90 < 70 ms, tpot p90 < 17 ms", {"on_failure": "migrate"}),
    (2, "ttft p90 < 80 ms, tpot p90 < 20 ms", {}),
    (1, "ttft p90 < 80 ms", {"on_failure": "retry", "detection": 0.1}),
    (1, "ttft p99 < 200 ms", {"on_failure": "error"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("crashes", "slo", "more"), mostly_nightly(SURVIVED, *SURVIVED[:2]))
def test_brute_force_finds_the_same_number_that_survives(trace, crashes, slo, more):
    keeps = by_brute_force(trace, slo, crashes, 6, **more)
    asked = {"detection_s" if k == "detection" else k: v for k, v in more.items()}
    (row,) = plan(trace, slo, survive=crashes, **asked).rows
    if any(keeps):
        assert keeps[row.replicas - 1] and not keeps[row.replicas - 2]
        assert row.replicas == keeps.index(True) + 1 or keeps != sorted(keeps)
        assert row.replicas > crashes
        (without,) = plan(trace, slo).rows
        assert row.replicas >= without.replicas
    else:
        assert row.status in ("never", "too few")


def test_a_fleet_that_fails_before_its_first_step_keeps_nothing(trace):
    failing = {"failures": '[{"replica": 0, "at_s": 0.0}]', "on_failure": "error"}
    given = settings(trace, "ttft p90 < 80 ms", replicas=1, **failing)
    found = run_trial(TrialSpec(given, early=False))
    assert not found.keeps and found.memory is None and found.objectives[0].kept == 0


@pytest.mark.slow
def test_an_early_verdict_knows_what_migrated_requests_had_before(tmp_path):
    """All first tokens come in time; whoever migrates waits long for a place on the other."""
    file = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:00:00.{i:07d},100,400" for i in range(16)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    failing = {"failures": '[{"replica": 0, "at_s": 1.0}]', "on_failure": "migrate"}
    given = settings(str(file), "ttft p90 < 2 s", replicas=2, max_num_seqs=8, **failing)
    whole, early = (run_trial(TrialSpec(given, early=early)) for early in (False, True))
    assert whole.keeps and early.keeps


@pytest.mark.slow
def test_a_plan_says_what_it_survives(trace):
    found = plan(trace, "ttft p90 < 80 ms", survive=1, on_failure="retry", detection_s=0.1)
    (said,) = [line for line in head_lines(found) if "fails" in line]
    assert "one replica" in said and "retry" in said and "0.1 s" in said
    shown = "\n".join(foot_lines(found, {}))
    assert "one replica that does not fail keeps " in shown
    assert ("  1 replica, the one that fails: fails; " in shown) == (found.best.replicas == 2)
    roomy = plan(trace, "ttft p90 < 5 s", survive=1)
    assert len(roomy.best.binds) == 1 and roomy.best.replicas == 2
    assert "1 replica, the one that " in "".join(foot_lines(roomy, {}))
    question = described(found, PRICES)["question"]
    assert (question["survive"], question["on_failure"]) == (1, "retry")
    assert not any("fails" in line for line in head_lines(plan(trace, "ttft p90 < 80 ms")))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"survive": -1}, "--survive -1"),
        ({"survive": 101}, "--survive 101"),
        ({"on_failure": "retry"}, "--on-failure: nothing fails"),
        ({"detection_s": 1.0}, "--detection: nothing fails"),
        ({"survive": 1, "on_failure": "panic"}, "--on-failure panic"),
        ({"survive": 1, "detection_s": -1.0}, "--detection -1"),
    ],
)
def test_what_cannot_be_survived_is_one_line(trace, asked, said):
    with pytest.raises(SettingsError, match=said) as error:
        plan(trace, "ttft p90 < 80 ms", **asked)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", ["１２", "1.5"])
def test_what_is_no_whole_number_of_failures_is_one_line(number, trace, capsys):
    words = ["--model", MODEL, "-t", trace, "--slo", "ttft p90 < 80 ms", f"--survive={number}"]
    status(main, ["plan", *words])
    said = capsys.readouterr().err
    assert f"--survive: '{number}' is no whole number" in said and said.count("\n") == 1
