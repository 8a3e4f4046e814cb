"""All-reduces and KV transfers on one PCIe link: what each of them waits for the other."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.moves import IN, OUT
from tests.parameters import mostly_nightly
from tests.sim.harness import Affine, Toy, hybrid, same_rows, simulate
from twinserve.backends.links import PcieLink, allreduces_of, evenly
from twinserve.policies.base import EngineLimits, Traits
from twinserve.policies.layerkv.policy import beside_allreduce
from twinserve.policies.plan import Hold, KvMove
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import load_profile
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate as run
from twinserve.traces.workload import Workload

LOOKING = partial(beside_allreduce, wait=0.5, unit=0.25)
HASTY = partial(beside_allreduce, wait=0.5, unit=2.0)


def four_second_step(sharing, *works, step_waits=True):
    """When each transfer to the host lands beside a step of 4 s, 1 s of it all-reduces, and when
    the step has computed."""
    link = PcieLink(1.0, latency_s=0.0, sharing=sharing)
    step = link.computing(10.0, 4.0, 1.0)
    landings = [link.transfer(10.0, work, *OUT, step, step_waits) for work in works]
    return landings, 10.0 + link.computing_seconds(10.0, 4.0, 1.0)


@pytest.mark.parametrize(
    "sharing, works, landings, computed",
    [
        # Half the rate while both go on: in 2.5 s the transfer gets 2 s of the link, and
        # all-reduces of 0.5 s take 1 s.
        (evenly, [2], [12.5], 14.5),
        (evenly, [1, 1], [11.25, 12.5], 14.5),
        # For all of the step: it takes 5 s, in which 4 s are sent; the other 4 s have the link to
        # themselves.
        (evenly, [8], [19.0], 15.0),
        # Between two all-reduces fit 12 sub-units of a quarter of one, so nobody delays them: 2 s
        # in 3/4 of the time.
        (LOOKING, [2], [10 + 2 / 0.75], 14.0),
        (LOOKING, [3], [14.0], 14.0),
        (LOOKING, [5], [16.0], 14.0),
        # Two sub-units of two all-reduces' length in a gap of three: each all-reduce waits for one
        # length, and 4/5 are KV's.
        (HASTY, [2], [12.5], 14.5),
        (HASTY, [8], [19.0], 15.0),
    ],
)
def test_by_hand(sharing, works, landings, computed):
    assert four_second_step(sharing, *works) == (pytest.approx(landings), pytest.approx(computed))


def test_what_outlives_a_step_goes_on_at_its_rate():
    """Nobody knows the next steps when it is queued. They find the link in use until it lands."""
    assert four_second_step(evenly, 8, step_waits=False) == (
        pytest.approx([20.0]),
        pytest.approx(15.0),
    )
    link = PcieLink(1.0, latency_s=0.0)
    link.transfer(10.0, 8, *OUT, link.computing(10.0, 4.0, 1.0))
    assert link.computing_seconds(15.0, 4.0, 1.0) == 5.0
    assert link.computing_seconds(20.0, 4.0, 1.0) == 4.0
    assert link.computing_seconds(18.0, 4.0, 0.0) == 4.0


# -- against the mechanism, one sub-unit after another ---------------------------------------------
def played(seconds, allreduce, operations, work, wait, unit):
    """(when `work` has been sent, when the step has computed): all-reduces evenly spread over a
    step from 0, after each stretch of computing one. `wait`, `unit`: seconds."""
    one, between = allreduce / operations, (seconds - allreduce) / operations
    now = look = 0.0
    landed = None
    for _ in range(operations):
        due = now + between
        while landed is None and look < due:
            look += min(unit, work)
            work -= min(unit, work)
            landed = look if work <= 0 else None
        now = max(due, look)
        end = now + one
        while landed is None and look < end:
            look += wait
        now = end
    return (landed if landed is not None else max(look, now) + work), now


@examples()
@given(st.floats(0.05, 0.45), st.floats(0.05, 1.0), st.floats(0.1, 2.0), st.floats(0.01, 3.0))
def test_rates_are_those_of_the_mechanism_played_out(share, wait, unit, work):
    gap = 1 / share - math.ceil(1 / wait) * wait
    # no sums that rounding decides about
    assume(all(1e-6 < ratio % 1 < 1 - 1e-6 for ratio in (1 / wait, gap / unit)))
    operations, seconds = 200, 1.0
    one = share * seconds / operations
    link = PcieLink(1.0, latency_s=0.0, sharing=partial(beside_allreduce, wait=wait, unit=unit))
    landing = link.transfer(0.0, work, *OUT, link.computing(0.0, seconds, share * seconds), True)
    computed = link.computing_seconds(0.0, seconds, share * seconds)
    sent, done = played(seconds, share * seconds, operations, work, wait * one, unit * one)
    period = one * (1 / share + wait + unit)
    assert landing == pytest.approx(sent, abs=3 * period)
    assert computed == pytest.approx(done, abs=3 * period)


sharings = st.one_of(
    st.just(evenly),
    st.builds(
        lambda wait, unit: partial(beside_allreduce, wait=wait, unit=unit),
        st.floats(0.05, 3),
        st.floats(0.05, 3),
    ),
)
queued = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.sampled_from([OUT, IN]), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(sharings, st.floats(0.01, 0.95), st.floats(0.0, 2.0), queued)
def test_nothing_ends_earlier_and_the_order_is_kept(sharing, share, start, transfers):
    shared, alone = PcieLink(1.0, sharing=sharing), PcieLink(1.0)
    step = shared.computing(start, 1.0, share)
    last = {OUT: 0.0, IN: 0.0}
    for work, way, waits in transfers:
        end = shared.transfer(0.0, work, *way, step, waits)
        assert end >= alone.transfer(0.0, work, *way) * (1 - 1e-12)
        assert end >= last[way]
        last[way] = end
    for port, other in ((shared.to_host, alone.to_host), (shared.to_device, alone.to_device)):
        assert port.queued_bytes == other.queued_bytes
    assert 1.0 <= shared.computing_seconds(start, 1.0, share) <= (step.until - start) * (1 + 1e-12)


@given(sharings, st.floats(0.01, 0.95), st.floats(0.01, 3.0))
def test_the_link_is_busy_for_as_long_as_without_each_other(sharing, share, work):
    """Transfer and all-reduces take `work` and `share` seconds of the link, however they share it:
    with half of the rate each, the time that both are there is the sum of both; who looks and waits
    leaves the link idle besides."""
    link = PcieLink(1.0, latency_s=0.0, sharing=sharing)
    landing = link.transfer(0.0, work, *OUT, link.computing(0.0, 1.0, share), True)
    computed = link.computing_seconds(0.0, 1.0, share)
    both = min(landing, computed)
    rate, delay = sharing(share)
    reduced = share * both / (1.0 + delay * share)  # of the all-reduces, until then
    sent = work if landing <= computed else work - (landing - computed)
    assert sent == pytest.approx(rate * both, abs=1e-9)
    assert sent + reduced <= both * (1 + 1e-9)
    if sharing is evenly:
        assert sent + reduced == pytest.approx(both)
    assert max(landing, computed) <= 1.0 + share * delay + work + 1e-9


# -- in a run --------------------------------------------------------------------------------------
STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)  # every step takes a second
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=10_000, kv_bytes_per_token=1000)


def quarter(work) -> float:
    return 0.25


def ends_with(move, **more):
    toy = type("Scripted", (Toy,), {"script": {2: [move]}, "traits": Traits(link_sharing=evenly)})
    sim = simulate(
        Workload.build([0.0], [8], [6]), toy, model=STEP, limits=LIMITS, bytes_per_s=1e6, **more
    )
    return sim.steps.end_s.tolist()


@pytest.mark.parametrize(
    "hold, ends",
    [
        # 1 s beside 1.25 s of computing, then half a second alone
        (Hold.STEP, [1, 2, 3.25 + (1.5 - 1), 4.75, 5.75, 6.75]),
        (Hold.BEFORE_STEP, [1, 2, 2 + 1.5 + 1, 5.5, 6.5, 7.5]),  # nothing computes meanwhile
        # 1.5 s at four fifths: it lands at 3.875, half through the fourth step, which loses as much
        # for as long
        (Hold.NOTHING, [1, 2, 3.25, 4.25 + 0.25 * 0.625 / 1.25, 5.375, 6.375]),
    ],
)
def test_steps_with_a_quarter_of_all_reduce(hold, ends):
    move = KvMove(0, *OUT, 1500, hold)
    assert ends_with(move, allreduces=quarter) == pytest.approx(ends, abs=1e-4)


SWAPPING = (
    "vllm-v0:preemption_mode=swap",
    "conserve",
    "mlfq:quantum=0.004,min_free_blocks=8",
    "bros",
    "layerkv",
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(SWAPPING, "conserve", "layerkv"))
@pytest.mark.parametrize("overhead", [0.0, 0.001])
def test_runs_at_once_are_single_steps(policy, overhead):
    model = Affine()
    given = dict(
        model=model, blocks=60, host_blocks=200, bytes_per_s=2e7, overhead=overhead, audit=False
    )
    given["limits"] = EngineLimits(
        max_num_seqs=16, max_num_batched_tokens=2048, kv_bytes_per_token=100
    )
    work = hybrid(3, 40, prefix_block=None)
    shared = [
        simulate(work, policy, fast=fast, allreduces=lambda w: 0.4 * model.step_seconds(w), **given)
        for fast in (True, False)
    ]
    same_rows(shared[0].rows, shared[1].rows)
    alone = simulate(work, policy, **given)
    assert shared[0].requests.finished.all() and shared[0].steps.to_host_bytes.sum() > 0
    if not policy.startswith("mlfq"):  # which may do the one or the other
        # whoever swaps while nothing computes meets no all-reduce
        assert shared[0].steps.equals(alone.steps) == policy.startswith("vllm-v0")


# -- whose all-reduces go over PCIe ----------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["yi-34b-200k@l20:tp2", "llama-3.1-70b@l40s:tp8", "qwen3-32b@rtxpro6000:tp2"]
)
def test_the_part_of_all_reduces_is_the_models_term(name):
    profile = load_profile(name)
    model = profile.model()
    seconds = allreduces_of(profile.gpu, model)
    for work in (
        StepComposition(8, 4000, 700),
        StepComposition(3, 900, 400, np.array([500]), np.array([64])),
    ):
        terms = model.terms(work)
        assert seconds(work) == terms.get("allreduce", terms.get("comm")) > 0
        scaled = profile.scaled(decode=2.0, host=0.5).model()
        part = allreduces_of(profile.gpu, scaled)(work) / scaled.step_seconds(work)
        assert part == pytest.approx(seconds(work) / model.step_seconds(work))


@pytest.mark.parametrize("name", ["llama-3.1-70b@h100:tp4", "llama-2-7b@l20", "qwen3-8b@l40s"])
def test_with_nvlink_or_on_one_gpu_there_are_none(name):
    profile = load_profile(name)
    assert allreduces_of(profile.gpu, profile.model()) is None


def test_the_switch():
    """Two L20 with memory for a few prompts: LayerKV's layers and the all-reduces are on one
    link."""
    same = dict(
        profile="yi-34b-200k@l20:tp2", trace="fixed:1024,64", rate=4.0, requests=12,
        num_blocks=150, slo="none",
    )  # fmt: skip
    policy = "layerkv:slo_aware=false,x=0"
    ends = {}
    for on in (True, False):
        result = run(
            SimulationConfig(policy=(policy,), host_blocks=4000, pcie_contention=on, **same)
        )[policy]
        assert result.config["config"]["pcie_contention"] is on
        ends[on] = result.rows.requests.last_token_s.max()
        assert math.isfinite(ends[on])
    assert ends[True] > ends[False]
