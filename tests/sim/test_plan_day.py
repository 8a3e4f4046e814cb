"""Step 2 of a plan: the same day as when every candidate is taken through everything."""

import json
import math

import numpy as np
import pytest

from tests.sim.planned import MODEL, settings, write_trace
from twinserve.sim.plan import waves
from twinserve.sim.plan.closer import steps_off
from twinserve.sim.plan.document import described
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.show import day_lines
from twinserve.sim.plan.trial import Kept, Trial, TrialSpec, run_trial
from twinserve.sim.sweep.executors import InThisProcess
from twinserve.traces.generators.tidal import DAY_S, tide

MOST, POOL = 6, 8


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", count=80, rate=40.0)


def plan(trace: str, slo: str, usd: dict[str, float], pool: int = POOL, **further) -> Plan:
    table = "gpu,usd_per_hour\n" + "".join(f"{gpu},{one}\n" for gpu, one in usd.items())
    question = Question(MODEL, (trace,), slo, tuple(usd), most_gpus=MOST, pool=pool, **further)
    return make_plan(question, read_prices(table, "prices"), InThisProcess())


def by_brute_force(
    trace: str, slo: str, usd: dict[str, float], tp, policies, pool: int = POOL
) -> tuple | None:
    """((GPU, ranks, policy), replicas) of the cheapest day; pool 0: of the cheapest peak.
    Of each candidate one replica after the other is tried: without offline work first, then with it
    from there on. Of two that cost the same it is the one that costs less without offline work,
    then the first.
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
                    for n in numbers:
                        if run_trial(TrialSpec(given | more | {"replicas": n})).keeps:
                            return n
                    return None

                alone = first(fitting)
                number = alone and first(range(alone, fitting.stop), pool=pool)
                if number:
                    cost, less = ((n * ranks * usd[gpu], n * ranks) for n in (number, alone))
                    found.append((cost, less, len(found), (gpu, ranks, policy), number))
    return min(found)[-2:] if found else None


def case(slo: str, usd: dict, policies: tuple, dearer: bool = False, marks=()):
    return pytest.param(slo, usd, policies, dearer, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo", "usd", "policies", "dearer"),
    [
        # step 1 had given up the one that is the cheapest beside offline work
        case(
            "ttft p90 < 80 ms, tpot p90 < 25 ms",
            {"a100-40g": 1.0, "h100": 2.5},
            ("vllm", "echo"),
            dearer=True,
        ),
        case("ttft p99 < 60 ms", {"a100-40g": 1.0}, ("vllm",)),  # nothing is enough
        case(
            "ttft p90 < 90 ms, tpot p90 < 17 ms",
            {"a100-40g": 1.0, "l40s": 0.7},
            ("vllm",),
            marks=pytest.mark.nightly,
        ),
        case(
            "ttft p90 < 200 ms, tpot p90 < 40 ms",
            {"h100": 1.0, "a100-40g": 1.0},  # several cost the same
            ("vllm", "echo"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_day_is_that_of_brute_force(trace, slo, usd, policies, dearer):
    found = plan(trace, slo, usd, tp=(1, 2), policies=policies)
    wanted = by_brute_force(trace, slo, usd, (1, 2), policies)
    if wanted is None:
        assert found.day is None and found.best is not None
        (said,) = day_lines(found)
        assert f"with up to {MOST} GPUs keeps" in said
        return
    day = found.day
    assert ((day.candidate.gpu, day.candidate.tp, day.candidate.policy), day.replicas) == wanted
    (row,) = [one for one in found.rows if one.candidate is day.candidate]
    assert (row.status == "dearer") == dearer and day.holds


@pytest.mark.slow
def test_offline_work_changes_nothing_of_what_is_said_of_the_peak(trace):
    slo, usd = "ttft p90 < 80 ms, tpot p90 < 25 ms", {"a100-40g": 1.0, "h100": 2.5}
    found = [plan(trace, slo, usd, tp=(1, 2), pool=pool) for pool in (POOL, 0)]
    beside, alone = (described(one, {}) for one in found)
    assert beside["rows"] == alone["rows"] and beside["closer"] == alone["closer"]
    assert beside["trials"] > alone["trials"] and beside["day"] and not alone["day"]
    day = found[0].day
    shares, offline = zip(*(level[:2] for level in day.levels), strict=True)
    minutes = np.interp(tide(np.arange(30.0, DAY_S, 60.0)), shares, offline) * 60.0
    assert day.offline_tokens_per_day == pytest.approx(minutes.sum()) and np.ptp(minutes) > 0


GROW = 2.0


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_of_trials_by_a_formula_is_that_of_the_formula(trace, seed, monkeypatch):
    """A replica keeps so many times the recorded rate, and offline work takes a third of that."""
    rng = np.random.default_rng(seed)
    usd = {gpu: float(rng.uniform(1, 3)) for gpu in ("a100-40g", "h100")}
    power = {
        (f"{MODEL}@{gpu}{tp}", policy): float(rng.uniform(0.3, 2.5))
        for gpu in usd
        for tp in ("", ":tp2")
        for policy in ("vllm", "echo")
    }
    seen: list[TrialSpec] = []
    crashes = seed % 2

    def by_formula(spec: TrialSpec) -> Trial:
        seen.append(spec)
        asked = spec.settings
        up = asked["replicas"] - len(json.loads(asked["failures"] or "[]"))
        load = asked["rate_scale"] * spec.off[0] * (1.5 if asked["pool"] else 1.0)
        keeps = load <= up * power[asked["profile"], asked["policy"][0]]
        kept = Kept(100, 100 * keeps, ((10, 10 * keeps),) * 10, 0.05)
        offline = 100.0 * up * (2 - asked["rate_scale"] / GROW)
        return Trial(keeps, False, () if keeps else (0,), (kept,), 100, offline)

    monkeypatch.setattr(waves, "run_trial", by_formula)
    more = {"grow": GROW, "peak_s": 0.5, "lead_s": 0.2, "survive": crashes}
    found = plan(trace, "ttft p90 < 80 ms", usd, tp=(1, 2), policies=("vllm", "echo"), **more)
    wanted = []
    for i, row in enumerate(found.rows):
        one = row.candidate
        keeps, most = power[one.config.profile, one.policy], MOST // one.tp

        def needed(load: float, keeps=keeps, most=most) -> int | None:
            n = crashes + math.ceil(GROW * load / keeps)
            return n if n <= most else None

        n, beside = needed(1.0), needed(1.5)
        assert n or row.status in ("too few", "dearer")
        if n and beside:
            cost, less = ((k * one.tp * usd[one.gpu], k * one.tp) for k in (beside, n))
            name = one.config.profile, one.policy
            wanted.append((cost, less, [*power].index(name), name, beside))
        if row.status == "enough":
            assert row.replicas == n and (row.closer.below is None) == (n == 1)
            fast, slow = (steps_off(one, sign) for sign in (-1, 1))
            assert max(fast) < 1 < min(slow) and {fast, slow, (1.0, 1.0)} >= {
                spec.off for spec in seen if spec.settings["profile"] == one.config.profile
            }
            assert (row.closer.fast, row.closer.slow) == (needed(fast[0]), needed(slow[0]))
            assert row.closer.farthest == min(8 * n, most)
            if not i and n > 1 + crashes:
                assert keeps / GROW - 1 / 16 < row.closer.rate_of_one <= keeps / GROW
    (peak,) = found.peaks
    (start, end), day = peak.window_s, found.day
    began = start + peak.since_s * GROW
    assert peak.since_s > 0.1 and len(wanted) > 2
    for spec in seen:
        asked, share = spec.settings, spec.settings["rate_scale"] / GROW
        if asked["pool"]:
            first, last = asked["window"]
            assert first + spec.since_s * asked["rate_scale"] == pytest.approx(began)
            assert last - began == pytest.approx((end - began) * share)
    *_, name, number = min(wanted)
    assert (day.candidate.config.profile, day.candidate.policy) == name
    assert day.replicas == number and [share for share, *_ in day.levels][-1] == 1.0
    offline = [100.0 * (number - crashes) * (2 - share) for share, *_ in day.levels]
    assert [got for _, got, _ in day.levels] == pytest.approx(offline)
    load = tide(np.arange(30.0, DAY_S, 60.0))
    per_day = np.mean(100.0 * (number - crashes) * (2 - np.maximum(load, 1 / 6))) * DAY_S
    assert day.offline_tokens_per_day == pytest.approx(per_day)
