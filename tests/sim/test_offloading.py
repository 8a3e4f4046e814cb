"""KV offloaded to the host, in time: what is found there, what its transfers take, and what is
refused."""

import dataclasses

import numpy as np
import pytest

from tests.commands import status
from twinserve.policies.errors import PolicyError
from twinserve.sim.cli.main import main
from twinserve.sim.engine.host_tier import HostTier
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offloading import parse_offloading
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import PrefixBlocks, Workload

BLOCK, PAGES = 16, 40  # tokens; blocks of a document


def documents(
    asked: int = 120, texts: int = 20, gap_s: float = 0.05, seed: int = 0, pages: int = PAGES
) -> Workload:
    """Questions on documents in turn: each comes again when all others have been read."""
    rng = np.random.default_rng(seed)
    ids, offsets = [], [0]
    for i in range(asked):
        ids += [*((i % texts) * pages + np.arange(pages)), texts * pages + i]
        offsets.append(len(ids))
    return Workload.build(
        np.arange(asked) * gap_s,
        np.full(asked, (pages + 1) * BLOCK),
        rng.integers(2, 30, asked),
        prefix=PrefixBlocks(np.array(ids), np.array(offsets), BLOCK),
    )


def run(workload: Workload | None = None, **given) -> tuple[Simulation, dict, object]:
    config = SimulationConfig(
        trace="poisson", requests=2, duration=1.0, **{"num_blocks": 300, **given}
    )
    inputs = resolve(config)
    inputs = dataclasses.replace(inputs, workload=workload or documents())
    simulation = Simulation(inputs, inputs.policies[0])
    result = run_simulation(simulation)
    return simulation, result.summary, result.rows


@pytest.mark.slow
def test_what_the_device_has_evicted_is_found_on_the_host():
    _, without, plain = run()
    simulation, summary, rows = run(kv_offloading_size=4)
    assert without["kv"]["prefix_hit_rate"] < 0.1 and "host_hit_rate" not in without["kv"]
    assert summary["kv"]["host_hit_rate"] > 0.6
    found = rows.requests["host_tokens"].to_numpy()
    assert set(found[:20]) == {0} and found[60:].min() >= PAGES * BLOCK - BLOCK
    assert "host_tokens" not in plain.requests
    (engine,) = simulation.engines
    engine.core.ledger.check()
    assert not engine.tier.busy


@pytest.mark.slow
def test_loading_a_long_prompt_is_faster_than_computing_it():
    def ttft(**given):
        rows = run(documents(80, gap_s=0.5, pages=200), num_blocks=1_500, **given)[2].requests
        return (rows.first_token_s - rows.arrival_s)[40:].mean()

    assert ttft(kv_offloading_size=16) < 0.5 * ttft()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("lru", "arc"))
@pytest.mark.parametrize("asynchronous", (True, False))
def test_runs_of_steps_are_the_same_as_single_steps(kind, asynchronous):
    options = {"kv_offloading_options": f"eviction_policy={kind}", "async_scheduling": asynchronous}
    _, _, fast = run(kv_offloading_size=0.5, **options)
    simulation, _, exact = run(kv_offloading_size=0.5, exact=True, **options)
    assert simulation.engines[0].tier.offload.counts["evicted"]
    for table in ("requests", "steps"):
        a, b = getattr(fast, table), getattr(exact, table)
        assert a.equals(b)


@pytest.mark.slow
@pytest.mark.parametrize("options", (None, "shared=true,offload_prompt_only=false"))
def test_every_byte_that_is_queued_lands(options):
    simulation, _, _ = run(kv_offloading_size=1, kv_offloading_options=options, replicas=2)
    until = simulation.clock.now + 100
    for engine in simulation.engines:
        transfers, link = engine.tier.transfers, engine.backend.link
        for port, size in (
            (link.to_host, transfers.stored_bytes),
            (link.to_device, transfers.loaded_bytes),
        ):
            port.settle(until)
            assert port.queued_bytes == port.landed_bytes == size
        per_token = transfers.kv_bytes_per_token
        counts = engine.tier.offload.counts
        assert transfers.stored_bytes == counts["stored tokens"] * per_token > 0
        assert transfers.loaded_bytes == counts["loaded tokens"] * per_token
        assert not transfers.under_way and not engine.tier.busy


@pytest.mark.slow
def test_a_slow_link_makes_loads_late_and_nobody_else():
    def loaded(rate: float):
        inputs = resolve(
            SimulationConfig(
                trace="poisson", requests=2, duration=1.0, num_blocks=300, kv_offloading_size=4
            )
        )
        profile = inputs.hardware.profile.model_copy(update={"pcie_bytes_per_s": rate})
        hardware = dataclasses.replace(inputs.hardware, profile=profile)
        inputs = dataclasses.replace(inputs, workload=documents(gap_s=1.0), hardware=hardware)
        rows = run_simulation(Simulation(inputs, inputs.policies[0])).rows.requests
        assert rows["host_tokens"][60:].min() > 0
        return (rows.first_token_s - rows.arrival_s)[60:].mean(), rows["arrival_s"]

    fast, slow = loaded(50e9)[0], loaded(5e8)[0]
    size = PAGES * BLOCK
    per_token = resolve(SimulationConfig(trace="poisson", requests=2)).hardware.limits
    lower = (size - BLOCK) * per_token.kv_bytes_per_token * (1 / 5e8 - 1 / 50e9)
    assert slow - fast == pytest.approx(lower, rel=0.1)


def test_loads_begin_when_the_step_that_plans_them_has_ended(monkeypatch):
    """As in vLLM, whose copies wait for the stream of the forward pass."""
    begun: list[tuple[bool, float, float]] = []
    lands: list[tuple[float, float]] = []
    load = HostTier.load

    def noted(tier, plan, end):
        if plan.offload and plan.offload.loads:
            begun.append((bool(plan), tier.engine.clock.now, end))
        load(tier, plan, end)
        for job in plan.offload.loads if plan.offload else ():
            lands.append((end, tier.transfers._lands_s[job.number]))

    monkeypatch.setattr(HostTier, "load", noted)
    _, _, rows = run(documents(gap_s=0.01), kv_offloading_size=4)
    ends = dict(zip(rows.steps["start_s"], rows.steps["end_s"], strict=True))
    beside = [(now, end) for computes, now, end in begun if computes]
    assert len(beside) > 10 and all(ends[now] == end > now for now, end in beside)
    assert all(landing > end for end, landing in lands)


@pytest.mark.slow
def test_replicas_that_share_a_store_find_what_others_stored():
    own, apart, _ = run(kv_offloading_size=2, replicas=2, router="round-robin")
    shared = "shared=true"
    both, together, _ = run(
        documents(texts=21), kv_offloading_size=4, kv_offloading_options=shared, replicas=2,
        router="round-robin",
    )  # fmt: skip
    assert len({id(engine.tier.offload.store) for engine in own.engines}) == 2
    assert len({id(engine.tier.offload.store) for engine in both.engines}) == 1
    alone, _, _ = run(documents(texts=21), kv_offloading_size=4, replicas=2, router="round-robin")
    stored = sum(engine.tier.offload.counts["stored tokens"] for engine in both.engines)
    assert stored < sum(engine.tier.offload.counts["stored tokens"] for engine in alone.engines)
    assert together["kv"]["host_hit_rate"] > 0.6 and apart["kv"]["host_hit_rate"] > 0.6


def test_a_replica_that_dies_leaves_nothing_pinned_in_a_shared_store(tmp_path):
    file = tmp_path / "failures.yaml"
    file.write_text("- {replica: 1, kind: crash, at_s: 1.03}\n")
    simulation, summary, _ = run(
        documents(gap_s=0.01), kv_offloading_size=4, kv_offloading_options="shared=true",
        replicas=2, failures=str(file), on_failure="retry",
    )  # fmt: skip
    store = simulation.engines[0].tier.offload.store
    store.check()
    assert summary["completed"] == 120 and not store.busy


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ({"policy": ("sarathi",)}, "asks no host tier"),
        ({"kv": "bidirectional"}, "no host tier of KV blocks"),
        ({"prefix_caching": False}, "drop --no-prefix-caching"),
        ({"fleet": "1P1D"}, "drop it, or the roles"),
        ({"speculate": "k=3,acceptance=0.7"}, "drop --speculate"),
        ({"kv_offloading_size": 1e-6}, "less than one chunk"),
        ({"kv_offloading_backend": "lmcache"}, "is not simulated; use native"),
        ({"kv_offloading_size": None, "kv_offloading_options": "shared=true"}, "nothing is off"),
        ({"kv_offloading_options": "eviction=arc"}, "there is no option 'eviction'"),
        ({"kv_offloading_options": "eviction_policy=fifo"}, "eviction_policy: "),
        ({"kv_offloading_options": "shared"}, "with a value"),
    ),
)
def test_what_does_not_go_together_is_refused_in_a_line(given, said):
    with pytest.raises((SettingsError, PolicyError)) as caught:
        run(**{"kv_offloading_size": 1.0, **given})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_are_those_of_vllm():
    given = parse_offloading("eviction_policy=arc,store_threshold=2,offload_prompt_only=false")
    assert (given.eviction_policy, given.store_threshold, given.offload_prompt_only) == (
        "arc",
        2,
        False,
    )
    assert parse_offloading(None).offload_prompt_only


def test_the_command_shows_what_was_found_on_the_host(capsys, tmp_path):
    assert not status(
        main,
        "simulate --trace poisson --rate 2 --requests 5 --kv-offloading-size 1 "
        f"--kv-offloading-backend native --out {tmp_path / 'run'}".split(),
    )
    assert "found on the host" in capsys.readouterr().out
