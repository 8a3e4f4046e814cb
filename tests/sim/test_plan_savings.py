"""What a policy saves against vllm: what brute force says of each policy by itself."""

from types import SimpleNamespace

import pytest

from tests.sim.planned import MODEL, write_trace
from tests.sim.test_plan_day import MOST, by_brute_force
from twinserve.sim.plan.document import described
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.savings import HOURS_A_MONTH, Needed, Saving, savings
from twinserve.sim.plan.show import foot_lines
from twinserve.sim.results.checked import SHAPES, check_shape
from twinserve.sim.sweep.executors import InThisProcess


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", count=80, rate=40.0)


def plan(trace: str, slo: str, usd: dict[str, float], policies, pool: int) -> Plan:
    table = "gpu,usd_per_hour\n" + "".join(f"{gpu},{one}\n" for gpu, one in usd.items())
    question = Question(
        MODEL, (trace,), slo, tuple(usd), (1, 2), policies, most_gpus=MOST, pool=pool
    )
    return make_plan(question, read_prices(table, "prices"), InThisProcess())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo", "usd", "policies", "pool"),
    [
        ("ttft p90 < 80 ms, tpot p90 < 25 ms", {"a100-40g": 1.0}, ("vllm", "bros"), 8),
        pytest.param(
            "ttft p90 < 60 ms, tpot p90 < 30 ms",
            {"a100-40g": 1.0, "h100": 2.5},
            ("echo", "vllm"),
            16,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "ttft p90 < 200 ms, tpot p90 < 22 ms",
            {"l40s": 0.7, "a100-40g": 1.0},
            ("vllm", "bros:chunk=fit"),
            24,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "ttft p90 < 90 ms",
            {"h100": 1.0, "l40s": 0.6},
            ("vllm", "vllm:kv=bidirectional"),
            4,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_saving_is_the_difference_of_two_brute_forces(trace, slo, usd, policies, pool):
    found = plan(trace, slo, usd, policies, pool)
    assert [(one.policy, one.pool) for one in found.savings] == [
        (policy, n) for n in (0, pool) for policy in policies if policy != "vllm"
    ]
    for saving in found.savings:
        wanted = {
            policy: by_brute_force(trace, slo, usd, (1, 2), (policy,), saving.pool)
            for policy in (saving.policy, "vllm")
        }
        for one, policy in ((saving.ours, saving.policy), (saving.theirs, "vllm")):
            told = one and ((one.candidate.gpu, one.candidate.tp, policy), one.replicas)
            assert told == wanted[policy]
    document = described(found, {})
    assert [one["line"] for one in document["savings"]] == foot_lines(found, {})[-2:]
    check_shape(document, SHAPES["plan"], "plan.json")


def needed(replicas: int, tp: int = 1, usd: float | None = 2.0, answer: str = "meets") -> Needed:
    candidate = SimpleNamespace(gpu="h100", tp=tp, usd_per_hour=usd, policy="vllm")
    return Needed(candidate, replicas, answer)  # type: ignore[arg-type]


def test_dollars_are_those_of_a_month_of_730_hours():
    saving = Saving("bros", needed(2), needed(5, answer="undecided"), 96)
    assert (saving.gpus, saving.usd_per_month, saving.saves) == (3, 3 * 2 * HOURS_A_MONTH, True)
    assert str(saving) == (
        "with 96 offline requests: policy bros saves 3 GPUs, $4,380 a month, against vllm: "
        "2 x h100 tp1 instead of 5 x h100 tp1 (undecided)"
    )


def test_cheaper_gpus_save_though_they_are_more():
    saving = Saving("bros", needed(3, usd=0.5), needed(1))
    assert saving.gpus == -2 and saving.saves
    assert "saves $365 a month (with 2 GPUs more), against" in str(saving)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (needed(2), needed(2), "saves nothing against vllm: 2 x h100 tp1 instead of 2 x h100"),
        (needed(3), needed(2), "saves nothing against vllm: 3 x h100 tp1 instead of 2 x h100"),
        (None, needed(2), "saves nothing against vllm: within --most-gpus no number"),
        (needed(2), None, "keeps the objectives with 2 x h100 tp1; vllm with no number"),
        (None, None, "saves nothing against vllm: within --most-gpus no number"),
    ],
)
def test_it_is_said_where_nothing_is_saved(ours, theirs, said):
    saving = Saving("bros", ours, theirs)
    assert said in str(saving) and not saving.saves


def test_a_plan_without_vllm_compares_nothing():
    assert savings(("bros", "echo"), [needed(1)], 0) == ()
    (one,) = savings(("vllm", "bros"), [needed(1)], 0)
    assert one.policy == "bros" and one.ours is None and one.theirs is not None
