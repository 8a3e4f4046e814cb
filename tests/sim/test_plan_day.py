"""Step 2 of a plan: the same day as when every candidate is taken through everything."""

from itertools import count

import pytest

from tests.sim.planned import MODEL, settings, write_trace
from twinserve.sim.plan.day import LEVELS
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.trial import TrialSpec, run_trial
from twinserve.sim.sweep.executors import InThisProcess

MOST, POOL = 6, 8


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", count=80, rate=40.0)


def plan(trace: str, slo: str, usd: dict[str, float], **further) -> Plan:
    table = "gpu,usd_per_hour\n" + "".join(f"{gpu},{one}\n" for gpu, one in usd.items())
    question = Question(MODEL, (trace,), slo, tuple(usd), most_gpus=MOST, pool=POOL, **further)
    return make_plan(question, read_prices(table, "prices"), InThisProcess())


def by_brute_force(trace: str, slo: str, usd: dict[str, float], tp, policies) -> tuple | None:
    """(dollars, GPUs, label, replicas) of the cheapest day, each candidate one replica at a time: without
    offline work first, then with it from there on. Of equals the cheaper one alone, then the first.
    """
    found = []
    for gpu in usd:
        for ranks in tp:
            for policy in policies:
                profile = f"{MODEL}@{gpu}" + (f":tp{ranks}" if ranks > 1 else "")
                given = settings(trace, slo, policy=(policy,), rate_scale=1.0)
                given |= {"profile": profile}
                fitting = range(1, MOST // ranks + 1)

                def first(numbers, given=given, **more):
                    trials = (run_trial(TrialSpec(given | more | {"replicas": n})) for n in numbers)
                    return next((n for n, t in zip(numbers, trials) if t.keeps), None)

                alone = first(fitting)
                number = alone and first(range(alone, fitting.stop), pool=POOL)
                if number:
                    cost, less = ((n * ranks * usd[gpu], n * ranks) for n in (number, alone))
                    found.append((cost, less, len(found), (gpu, ranks, policy), number))
    return min(found)[-2:] if found else None


CASES = [
    # the cheapest alone needs more beside offline work, and another one is the cheapest then
    ("ttft p90 < 90 ms, tpot p90 < 17 ms", {"a100-40g": 1.0, "l40s": 0.7}, ("vllm",)),
    ("ttft p90 < 80 ms, tpot p90 < 25 ms", {"a100-40g": 1.0, "h100": 2.5}, ("vllm", "echo")),
    ("ttft p90 < 200 ms, tpot p90 < 40 ms", {"h100": 2.5, "a100-40g": 1.0}, ("echo",)),
    # all cost the same
    ("ttft p90 < 200 ms, tpot p90 < 40 ms", {"h100": 1.0, "a100-40g": 1.0}, ("vllm",)),
    # beside offline work nothing is enough
    ("ttft p99 < 60 ms", {"a100-40g": 1.0}, ("vllm",)),
]


@pytest.mark.parametrize(("slo", "usd", "policies"), CASES)
def test_the_day_is_that_of_brute_force(trace, slo, usd, policies):
    found = plan(trace, slo, usd, tp=(1, 2), policies=policies)
    wanted = by_brute_force(trace, slo, usd, (1, 2), policies)
    print(wanted, [(r.candidate.label, r.status, r.at_least) for r in found.rows])
    got = found.day and (
        (found.day.candidate.gpu, found.day.candidate.tp, found.day.candidate.policy),
        found.day.replicas,
    )
    assert got == wanted
