"""Autoscaling of simulated fleets: start-up and drains, GPU-hours, Dynamo's oscillation and its
cure (docs/fleet.md)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.parameters import mostly_nightly
from twinserve.policies.names import RegistryError
from twinserve.policies.requests import End
from twinserve.sim.fleet.replica import Life
from twinserve.sim.fleet.scaling import SCALERS, Autoscaler, Bounds, Demand, Seen, parse_scaler
from twinserve.sim.results.recorder import Load
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.demand import demand_of
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.run import Simulation, run_simulation

STEADY = {
    "trace": "poisson", "profile": "llama-3.1-8b@a100-40g", "rate": 14.0,
    "slo": "ttft=0.4,tpot=0.03", "async_scheduling": False, "replicas": 2, "max_replicas": 6,
    "start_up": 20.0,
}  # fmt: skip
MODEL = resolve_hardware(SimulationConfig(profile=STEADY["profile"])).model


def scaled(scaler: str, **settings):
    inputs = resolve(SimulationConfig(**{**STEADY, "autoscale": scaler, **settings}))
    run = Simulation(inputs, inputs.policies[0])
    result = run_simulation(run)
    return run, result


def seen(loads: list[tuple[int, int, float]], now: float = 0.0, starting: int = 0) -> Seen:
    """loads: running, waiting, share of KV memory of each replica."""
    of = [Load(now, r, w, round(kv * 1000), 1000) for r, w, kv in loads]
    demand = Demand(lambda a, b: 0.0, lambda a, b: 200.0)
    return Seen(now, of, starting, [MODEL] * len(of), 16, 60.0, demand)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly(SCALERS, "fixed"))
def test_every_request_ends_however_replicas_come_and_go(name):
    moves = {"duration": 60.0, "start_up": 5.0, "grace": 1.0, "on_failure": "migrate"}
    run, result = scaled(name, **moves)
    assert result.summary["completed"] == len(run.fleet.requests)
    assert all(request.end is End.COMPLETED for request in run.fleet.requests)
    up = [r for r in run.fleet.replicas if Life.UP in r.since_s]
    for replica in up[2:]:
        assert replica.since_s[Life.UP] == replica.since_s[Life.WARMING] + 5.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wva", "dynamo:itl=0.03"])
def test_steps_taken_at_once_scale_like_single_ones(name):
    failing = {"mttf": 40.0, "mttr": 5.0, "on_failure": "retry", "detection": 1.0}
    moves = {"duration": 40.0, "start_up": 5.0, **failing}
    single, at_once = (scaled(name, exact=exact, **moves)[1].rows for exact in (True, False))
    for table in ("requests", "placements", "replicas", "failures", "steps"):
        assert getattr(single, table).equals(getattr(at_once, table)), table


@pytest.mark.slow
def test_fixed_is_as_many_as_there_are_and_takes_their_gpu_hours():
    run, result = scaled("fixed", duration=20.0)
    found = result.summary["autoscaling"]
    end_s = max(request.ended_s for request in run.fleet.requests)
    assert found["gpu_hours"] == pytest.approx(2 * end_s / 3600)
    assert (found["mean_replicas"], found["most_replicas"]) == (pytest.approx(2.0), 2)
    assert (found["started"], found["drained"], found["turns"]) == (0, 0, 0)
    plain = {k: value for k, value in STEADY.items() if k not in ("max_replicas", "start_up")}
    inputs = resolve(SimulationConfig(**plain, duration=20.0))
    without = run_simulation(Simulation(inputs, inputs.policies[0]))
    assert without.rows.requests.equals(result.rows.requests)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_nightly([0, 1, 2], 0))
def test_dynamo_oscillates_under_a_steady_load_and_consolidation_cures_it(seed):
    """dynamo#9294: with a flat share of the objective two replicas become one, which breaks it."""
    steady = {"duration": 240.0, "seed": seed, "trace": "sharegpt"}
    flat = scaled("dynamo:consolidate=false,long=0,itl=0.03", **steady)[1].summary
    cured = scaled("dynamo:long=0,itl=0.03", **steady)[1].summary
    assert flat["autoscaling"]["turns"] >= 6 and cured["autoscaling"]["turns"] <= 2
    attained = [run["classes"]["rt"]["slo_attainment"] for run in (flat, cured)]
    assert attained[1] > attained[0] + 0.2


def test_a_flat_threshold_gives_up_a_replica_that_the_rest_cannot_replace():
    calm = [(30, 0, 0.5), (30, 0, 0.5)]
    flat = parse_scaler("dynamo:consolidate=false,long=0")
    cured = parse_scaler("dynamo:long=0")
    assert flat.wants(seen(calm)) == 1 and cured.wants(seen(calm)) == 2  # 0.5 x 2 / 1 >= 0.8
    assert cured.wants(seen([(5, 0, 0.1), (5, 0, 0.1)])) == 1
    crowded = [(30, 40, 0.9), (30, 40, 0.9)]
    assert cured.wants(seen(crowded)) == 3
    assert cured.wants(seen(crowded, starting=1)) == 3  # that one may be enough
    assert cured.wants(seen([crowded[0], calm[0]])) == 2  # not all of them


def test_a_replica_with_stages_takes_the_gpus_of_all_of_them():
    profile = "llama-3.1-8b@h100:tp2:pp2"
    _, result = scaled("fixed", profile=profile, requests=20)
    end_s = result.rows.requests["last_token_s"].max()
    assert result.summary["autoscaling"]["gpu_hours"] == pytest.approx(2 * 4 * end_s / 3600)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([(9, 0, 0.75), (9, 0, 0.75)], 3),  # 0.05 to spare
        ([(9, 3, 0.2), (9, 3, 0.2)], 3),  # 2 requests to spare
        ([(9, 0, 0.9), (9, 0, 0.2)], 2),  # the saturated one does not count, the other has room
        ([(9, 9, 0.9), (9, 6, 0.2)], 3),  # all are saturated
        ([(9, 0, 0.4), (9, 0, 0.4)], 2),  # one could not carry both
        ([(9, 0, 0.3), (9, 0, 0.3)], 1),
    ],
)
def test_the_variant_autoscaler_goes_by_what_is_to_spare(loads, wanted):
    scaler = parse_scaler("wva:settle=0")
    assert scaler.wants(seen(loads)) == wanted


def test_a_replica_that_an_autoscaler_starts_crashes_like_those_of_the_beginning():
    _, result = scaled("perfect:busy=0.3", duration=30.0, start_up=1.0, mttf=5.0, mttr=1.0)
    assert (result.rows.failures["of"] >= STEADY["replicas"]).any()


def test_one_that_takes_a_place_at_once_is_no_further_replica():
    failing = {"mttf": 5.0, "mttr": 0.0, "start_up": 0.0, "on_failure": "retry"}
    _, result = scaled("fixed", duration=20.0, **failing)
    assert result.summary["failures"]["crashes"] > 0
    assert result.summary["autoscaling"]["most_replicas"] == 2


def test_the_variant_autoscaler_waits_before_it_gives_up_a_replica():
    scaler = parse_scaler("wva")
    calm, busy = [(9, 0, 0.3), (9, 0, 0.3)], [(9, 0, 0.75), (9, 0, 0.75)]
    assert scaler.wants(seen(busy, 0.0)) == 3
    wanted = {t: scaler.wants(seen(calm, float(t))) for t in range(15, 420, 15)}
    first = min(t for t, n in wanted.items() if n == 1)
    # the largest values of a minute, then 300 s of calm
    assert 60 + 300 <= first <= 60 + 300 + 30
    assert wanted[15] == 3 and wanted[75] == wanted[first - 15] == 2


def test_dynamo_has_no_fewer_than_throughput_needs():
    demand = Demand(lambda a, b: 2.5 * (b - a), lambda a, b: 200.0)
    calm = replace(seen([(1, 0, 0.1)], 200.0), demand=demand)
    assert parse_scaler("dynamo").wants(calm) == 3
    assert parse_scaler("dynamo:long=0").wants(calm) == 1


@pytest.mark.parametrize(
    ("wanted", "drained", "started"), [(1, [3, 2], 0), (0, [3, 2], 0), (2, [3], 0), (9, [], 2)]
)
def test_the_latest_goes_first_and_bounds_hold(wanted, drained, started):
    """Two serve, one drains and one starts up; one to five are allowed."""
    lives = [Life.UP, Life.DRAINING, Life.UP, Life.WARMING]
    core = SimpleNamespace(ledger=SimpleNamespace(block_tokens=16))
    engine = SimpleNamespace(core=core, load=lambda now: Load(now, 1, 0, 1, 10))
    replicas = [
        SimpleNamespace(life=life, index=i, engine=engine, model=None)
        for i, life in enumerate(lives)
    ]
    gone, come = [], []
    fleet = SimpleNamespace(replicas=replicas, drain=lambda index, grace_s: gone.append(index))
    scaler = SimpleNamespace(wants=lambda seen: wanted)
    clock = SimpleNamespace(now=0.0, process=lambda life: life.close())
    bounds, demand = Bounds(1, 5, 20.0), Demand(lambda a, b: 0.0, lambda a, b: 1.0)
    Autoscaler(clock, fleet, scaler, bounds, demand, come.append, lambda: False)._decide()
    assert (gone, len(come)) == (drained, started)


def test_demand_is_the_work_of_what_arrives():
    config = SimulationConfig(**STEADY, duration=60.0, autoscale="fixed")
    inputs = resolve(config)
    demand, whole = demand_of(inputs), inputs.workload
    everything = demand.seconds(0.0, 1e9)
    assert everything == pytest.approx(service_seconds(whole, inputs.hardware))
    halves = demand.seconds(0.0, 30.0) + demand.seconds(30.0, 1e9)
    assert halves == pytest.approx(everything)
    assert demand.prompt_tokens(0.0, 1e9) == pytest.approx(whole.prompt_tokens.mean())
    assert demand.seconds(1e6, 2e6) == demand.prompt_tokens(1e6, 2e6) == 0.0


def test_who_knows_the_future_starts_before_the_rush():
    demand = Demand(lambda a, b: 40.0 if a <= 100.0 < b else 1.0, lambda a, b: 1.0)
    before = replace(seen([(1, 0, 0.1)], 50.0), demand=demand, start_up_s=60.0)
    scaler = parse_scaler("perfect:every=10,busy=1")
    assert scaler.wants(before) == 4
    assert scaler.wants(replace(before, now=20.0)) == 1
    assert scaler.wants(replace(before, now=120.0)) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"autoscale": "wva", "fleet": "2P2D"}, "drop --fleet"),
        ({"autoscale": "wva", "replicas": 20}, "--replicas 20"),
        ({"autoscale": "wva", "replicas": 1, "min_replicas": 2}, "--replicas 1"),
    ],
)
def test_what_cannot_be_scaled_is_refused(settings, said):
    with pytest.raises(SettingsError, match=said):
        resolve(SimulationConfig(trace="poisson", duration=5.0, **settings))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wav", "no autoscaler 'wav'.*wva"),
        ("wva:kw=1", "kw"),
        ("dynamo:down=2", "down"),
        ("perfect:every=1e-9", "every.*at least 0.1"),  # nobody would see the end
    ],
)
def test_an_autoscaler_that_there_is_not_is_refused(text, said):
    with pytest.raises(RegistryError, match=said):
        parse_scaler(text)
