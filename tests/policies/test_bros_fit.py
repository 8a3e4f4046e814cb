"""BROS with `chunk=fit`: prompts are cut to the time that an iteration has left, objectives that
can be kept are kept, and nobody starves (docs/bros.md). Worked examples: a prompt token takes 1 ms,
a decode 10 ms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.policies.policy_runs import BE, BY_HAND, RT, Desk, run_core
from twinserve.backends.links import PcieLink
from twinserve.policies.base import EngineLimits
from twinserve.policies.bros.fit_cost import AnyCost, FitCost, FitEstimator, FitModel, Load, cost_of
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.names import RegistryError
from twinserve.policies.parts.estimators import ModelEstimator
from twinserve.policies.registry import ledger_names, parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.profile import load_profile
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.fleet.prefix_index import shared_contents
from twinserve.sim.setup.audit import check_policy
from twinserve.traces.workload import PrefixBlocks, Workload

MODEL = FitModel(beta=0.004, alpha=1e-4, knee=16, kappa=1e-8, delta0=2e-4, delta1=1e-7)
PLAIN = "bros:chunk=fit,kv=paged,fit_least=1,fit_margin=0,fit_feedback=0"


def limits(seats: int = 64, tokens: int = 4096) -> EngineLimits:
    return EngineLimits(max_num_seqs=seats, max_num_batched_tokens=tokens, max_model_len=8192)


def estimator_of(model: FitModel) -> FitEstimator:
    return FitEstimator(model, BY_HAND.swap, model, BY_HAND)


def run(
    workload: Workload,
    policy: str,
    truth: FitModel = MODEL,
    believed: FitModel = MODEL,
    seats: int = 64,
):
    """Steps and requests as frames; memory for all. truth: what steps take; believed: what the
    policy estimates."""
    table, spec = RequestTable(), parse_policy(policy)
    ledger = PagedLedger(
        table, 20_000, 4, 0, shared_contents=shared_contents(workload, 4), prefix_caching=True
    )
    core = EngineCore(table, spec.build(limits(seats), estimator_of(believed)), ledger)
    steps, _, ended, _ = run_core(workload, core, truth, PcieLink(5e9), limits(seats), fast=False)
    return steps, ended


def requests(arrival, prompt, output, classes=None, ttft=100.0, tpot=0.03) -> Workload:
    n = len(arrival)
    classes = np.zeros(n, np.int8) if classes is None else np.array(classes, np.int8)
    real_time = classes == RT
    return Workload.build(
        np.array(arrival, float),
        np.array(prompt),
        np.array(output),
        service_class=classes,
        slo_ttft_s=np.where(real_time, ttft, np.nan),
        slo_tpot_s=np.where(real_time, tpot, np.nan),
    )


# -- seats -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tpot, in_time", [(0.03, True), (0.006, False)])
def test_a_prompt_gets_a_seat_where_decodes_have_time_to_spare(tpot, in_time):
    # four long decodes hold the four seats, in steps of 5 ms; then a short request arrives
    workload = requests([0, 0, 0, 0, 0.5], [16] * 5, [300] * 4 + [4], ttft=0.1, tpot=tpot)
    _, found = run(workload, PLAIN, seats=4)
    assert (found.first_token_s.iloc[4] - 0.5 <= 0.1) == in_time
    assert (found.late_tokens == 0).all()


# -- worked examples -------------------------------------------------------------------------------
def test_a_prompt_gets_the_time_that_the_decodes_leave():
    desk = Desk(PLAIN, 60, estimator=BY_HAND)
    desk.submit("a", 4, 20, slo_ttft_s=1.0, slo_tpot_s=0.04, service_class=RT)
    desk.step()
    desk.submit("b", 50, 5, slo_ttft_s=1.0, slo_tpot_s=0.04, service_class=RT)
    assert desk.step().scheduled == {"a": 1, "b": 30}  # 10 + 30 ms
    assert desk.step().scheduled == {"a": 1, "b": 20}
    assert desk.step().scheduled == {"a": 1, "b": 1}


def test_a_margin_of_the_bound_is_left_free():
    desk = Desk(PLAIN.replace("margin=0", "margin=0.25"), 60, estimator=BY_HAND)
    desk.submit("a", 4, 20, slo_ttft_s=1.0, slo_tpot_s=0.04, service_class=RT)
    desk.step()
    desk.submit("b", 50, 5, slo_ttft_s=1.0, slo_tpot_s=0.04, service_class=RT)
    assert desk.step().scheduled == {"a": 1, "b": 20}


def test_best_effort_decodes_keep_their_time_and_tokens_beside_a_long_prompt():
    """The prompt is cut, they go on."""
    desk = Desk(PLAIN, 60, limits=limits(8, 24), estimator=BY_HAND)
    desk.submit("slow", 4, 20, service_class=BE)
    desk.step()
    desk.submit("long", 60, 5, slo_ttft_s=10.0, slo_tpot_s=0.5, service_class=RT)
    for _ in range(2):
        assert desk.step().scheduled == {"slow": 1, "long": 23}


def test_a_prompt_that_cannot_be_kept_comes_after_those_that_can():
    """By residual time alone it would be first."""
    orders = {}
    for order in ("savable", "residual", "arrival"):
        desk = Desk(f"{PLAIN},fit_order={order}", 60, limits=limits(8, 20), estimator=BY_HAND)
        desk.submit("lost", 40, 2, slo_ttft_s=0.03, slo_tpot_s=0.1, service_class=RT)
        desk.submit("kept", 20, 2, slo_ttft_s=0.2, slo_tpot_s=0.1, service_class=RT)
        orders[order] = next(iter(desk.step().scheduled))
    assert orders == {"savable": "kept", "residual": "lost", "arrival": "lost"}


def test_best_effort_prompts_take_what_is_left_and_a_share_of_the_ttft_objective():
    desk = Desk(PLAIN, 60, estimator=BY_HAND, limits=limits(8, 60))
    desk.submit("urgent", 10, 2, slo_ttft_s=0.16, slo_tpot_s=0.5, service_class=RT)
    desk.submit("late", 50, 2, service_class=BE)
    assert desk.step().scheduled == {"urgent": 10, "late": 30}  # 0.16 / 4 s


def test_an_explicit_estimator_wins_and_parts_can_be_chosen():
    perfect = ModelEstimator(MODEL, BY_HAND.swap)
    assert isinstance(cost_of(perfect, printed=False), AnyCost)
    assert isinstance(cost_of(estimator_of(MODEL), printed=False), FitCost)
    printed = cost_of(estimator_of(MODEL), printed=True)
    assert printed.model is BY_HAND.model


@pytest.mark.parametrize(
    "policy, said",
    [
        ("bros:chunk=fit,replacement=true", "option replacement=.*chunk=fit has none"),
        ("bros:chunk=fit,late_drops=true", "option late_drops=.*chunk=fit has none"),
        ("bros:chunk=fit,order=savable", "option order=.*chunk=fit uses fit_order"),
        ("bros-exact:order=savable", "option order=.*the problem is solved as printed"),
        ("bros:fit_order=arrival", "no option 'fit_order'"),
        ("bros:chunk=fitt", "valid integer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(policy, said):
    with pytest.raises(RegistryError, match=said):
        parse_policy(policy)


# -- what a step takes -----------------------------------------------------------------------------
sizes = st.integers(0, 3000)


@examples(60)
@given(st.integers(0, 60), sizes, st.integers(1, 3000), st.integers(1, 4096), st.floats(0, 0.5))
def test_a_chunk_is_the_longest_that_keeps_the_bound(decodes, before, resident, limit, bound):
    """As found by trying: the closed form, and the search that serves other models."""
    load = Load()
    load.add_decodes(np.full(decodes, 100))
    if before:
        load.add_chunk(before, 7)
    found = FitCost(MODEL).chunk(load, resident, limit, bound)
    assert found == AnyCost(MODEL).chunk(load, resident, limit, bound)

    def seconds(new: int) -> float:
        return MODEL.step_seconds(load.composition(new, resident))

    assert 0 <= found <= limit
    assert not found or seconds(found) <= bound
    assert found == limit or seconds(found + 1) > bound


@examples(40)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=8), st.integers(0, 2000))
def test_a_prompt_costs_the_same_however_it_is_cut(chunks, resident):
    """Beside decodes that use up what is free."""
    load = Load()
    load.add_decodes(np.full(MODEL.knee, 50))
    cost = FitCost(MODEL)
    base, total, done = cost.seconds(load), 0.0, resident
    for new in chunks:
        one = Load(load.decodes, load.context, load.longest)
        one.add_chunk(new, done)
        total += cost.seconds(one) - base
        done += new
    whole = cost.own(np.array([sum(chunks)]), np.array([resident]))[0]
    assert total == pytest.approx(whole, rel=1e-9)


def test_the_form_is_closer_to_a_profile_than_the_printed_one():
    """A chunk beside decodes, of which the printed form says that each phase pays by itself."""
    profile = load_profile("llama-3.1-70b@h100:tp4")
    truth = profile.model(256)
    form = FitModel.fit(truth)
    load = Load()
    load.add_decodes(np.full(20, 500))
    load.add_chunk(512, 0)
    takes = truth.step_seconds(load.composition())
    printed = BrosLinearModel.fit(truth).step_seconds(load.composition())
    assert form.step_seconds(load.composition()) == pytest.approx(takes, rel=0.05)
    assert abs(printed / takes - 1) > 0.2
    assert form.error < 0.03


# -- properties ------------------------------------------------------------------------------------
@st.composite
def decodes_and_prompts(draw):
    """Decodes that go on for long, then prompts that come at once; their objectives are far."""
    decodes, prompts = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 1500), min_size=prompts, max_size=prompts))
    return requests(
        [0.0] * decodes + [0.5] * prompts, [8] * decodes + lengths, [400] * decodes + [3] * prompts
    )


@pytest.mark.slow
@examples(25)
@given(decodes_and_prompts())
def test_a_prompt_is_in_time_if_the_time_left_covers_it(workload):
    """The lemma: after the iterations whose time left adds up to what it and all before it cost, a
    prompt has its first token. A chunk is whole tokens, so each iteration leaves less than one."""
    steps, rows = run(workload, PLAIN)
    bound, cost = 0.03, FitCost(MODEL)
    prompts = rows[rows.arrival_s == 0.5].sort_values("first_token_s", kind="stable")
    own = cost.own(prompts.prompt_tokens.to_numpy(), np.zeros(len(prompts), np.int64))
    first = steps[steps.start_s >= prompts.first_scheduled_s.min() - 1e-9]
    # of the decodes in each iteration: as long as a step with them alone
    alone = np.array([_decodes_alone(one, rows) for one in first.itertuples()])
    token = MODEL.alpha + 2 * MODEL.kappa * int(prompts.prompt_tokens.max()) + MODEL.kappa
    left = np.cumsum(bound - alone - token)
    for needed, told in zip(own.cumsum(), prompts.first_token_s, strict=True):
        covered = np.flatnonzero(left >= needed)
        if len(covered):
            assert told <= first.end_s.iloc[covered[0]] + 1e-9


def _decodes_alone(step, rows) -> float:
    """At least what the decodes of the step take, by what each may have in its context."""
    n = step.decode_requests
    longest = int((rows.prompt_tokens + rows.output_tokens).max())
    return MODEL.beta + MODEL.alpha * max(n - MODEL.knee, 0) + n * (2e-4 + 1e-7 * (longest + 1))


@pytest.mark.slow
@examples(25)
@given(decodes_and_prompts(), st.sampled_from([0.012, 0.02, 0.05]))
def test_no_iteration_breaks_its_bound(workload, tpot):
    """Where the estimate is right, and the decodes alone keep it."""
    workload = replace(workload, slo_tpot_s=np.full(len(workload), tpot))
    steps, _ = run(workload, PLAIN)
    mixed = steps[(steps.prefill_tokens > 0) & (steps.decode_requests > 0)]
    assert len(mixed)
    assert (mixed.end_s - mixed.start_s).max() <= tpot + 1e-9


@pytest.mark.slow
@examples(10)
@given(st.floats(0.7, 1.4), st.integers(0, 100))
def test_an_estimate_that_is_off_is_corrected(error, seed):
    """Steps take `error` times as long as estimated: soon they keep the bound all the same, and use
    it."""
    rng = np.random.default_rng(seed)
    believed = FitModel(
        MODEL.beta / error, MODEL.alpha / error, MODEL.knee, MODEL.kappa / error,
        MODEL.delta0 / error, MODEL.delta1 / error,
    )  # fmt: skip
    n = 60
    workload = requests(
        np.sort(rng.uniform(0, 3, n)), rng.integers(300, 900, n), rng.integers(50, 90, n), tpot=0.03
    )
    steps, _ = run(workload, "bros:chunk=fit,kv=paged", believed=believed)
    mixed = steps[(steps.prefill_tokens > 0) & (steps.decode_requests > 0)]
    seconds = (mixed.end_s - mixed.start_s).to_numpy()[40:]
    assert len(seconds) > 20
    assert (seconds <= 0.03 * 1.005).all()
    assert np.median(seconds) > 0.03 * 0.9


def test_a_flood_of_real_time_requests_does_not_starve_a_best_effort_one():
    """More arrive than can be served. Without an age limit it waits for the end of the flood."""
    n, ends = 120, 3.0
    arrival = np.linspace(0.0, ends, n)
    flood = [*arrival, 0.5]
    order = np.argsort(flood, kind="stable")
    classes = np.append(np.zeros(n, np.int8), BE)[order]
    prompt = np.append(np.full(n, 300), 400)[order]
    output = np.append(np.full(n, 4), 5)[order]
    workload = requests(np.array(flood)[order], prompt, output, classes, ttft=0.4)
    told = {}
    for age in (0.5, 1e6):
        _, rows = run(workload, f"bros:chunk=fit,kv=paged,fit_age_s={age}")
        assert rows.finished.all()
        told[age] = float(rows[rows.service_class == "be"].last_token_s.iloc[0])
    assert told[0.5] < ends < told[1e6], told


def test_prefixes_in_the_cache_are_not_computed_again():
    text = np.arange(50)
    prefix = PrefixBlocks(np.concatenate([text, text]), np.array([0, 50, 100]), 4)
    workload = replace(requests([0.0, 1.0], [200, 200], [3, 3]), prefix=prefix)
    _, rows = run(workload, PLAIN)
    assert rows.hit_tokens.tolist() == [0, 196]


@pytest.mark.slow
@pytest.mark.parametrize("ledger", mostly_nightly(ledger_names(), "paged"))
def test_rules_are_kept_on_every_ledger(ledger):
    """Audited, asynchronous too, with clients that leave; runs of steps as single ones give
    them."""
    assert check_policy("bros:chunk=fit", kv=[ledger], seeds=[0]) > 300


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    mostly_nightly(
        ["fit_age_s=0.05", "fit_order=residual", "adaptive_batch=true"], "fit_order=residual"
    ),
)
def test_rules_are_kept_with_other_parts(options):
    for ledger in ("paged", "bidirectional"):
        assert check_policy(f"bros:chunk=fit,{options}", kv=[ledger], seeds=[1]) > 300


@pytest.mark.slow
def test_who_can_be_kept_is_found_behind_any_number_that_are_late():
    """A burst of 1,200 prompts takes 48 s. Small ones that come one by one in this time can be
    kept, and are."""
    burst, later = 1200, 40
    arrivals = [0.0] * burst + [5.0 + 0.25 * i for i in range(later)]
    workload = requests(arrivals, [400] * burst + [100] * later, [2] * (burst + later), ttft=1.0)
    _, rows = run(workload, PLAIN)
    rows = rows.sort_values("arrival_s", kind="stable")
    waited = (rows.first_token_s - rows.arrival_s).to_numpy()
    assert (waited[burst:] <= 1.0).mean() > 0.95
    assert (waited[:burst] > 1.0).mean() > 0.5 and rows.finished.all()
