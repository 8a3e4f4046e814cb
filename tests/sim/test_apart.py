"""Prefill apart from decode: the hand-over of single requests, by the clock."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.apart import Apart, hand_over, inputs_of, parts_add_up
from tests.sim.test_fleet_file import PAGE, SMALL, TRAFFIC, command
from tests.sim.troubled import TABLES
from twinserve.policies.requests import End
from twinserve.sim.cli.main import BAD_INPUT
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.connector import Heartbeats, Lease, Push, parse_rule
from twinserve.sim.fleet.recovery import Recovery
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.results.columns import TTFT_PARTS
from twinserve.sim.results.files import read_run, write_run
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Simulation, simulate
from twinserve.traces.workload import Workload

ROOMY = CROWDED.model_copy(update={"num_blocks": 400, "exact": True})
BYTES = 131_072  # of a token's KV
RATE, LATENCY = 1e8, 2e-3
NETWORK = (RATE, LATENCY)


def some(prompts, outputs=None, arrival=None) -> Workload:
    n = len(prompts)
    arrival = np.zeros(n) if arrival is None else np.array(arrival, float)
    outputs = np.full(n, 5) if outputs is None else np.array(outputs)
    return Workload.build(arrival, np.array(prompts), outputs)


def run_of(workload, connector=None, config=ROOMY, events=(), network=NETWORK, **more):
    """events: (seconds, what to call with the run)."""
    run = Apart(inputs_of(workload, connector or hand_over(), config), network=network, **more)

    def happen():
        for at_s, what in events:
            yield run.clock.at(at_s, BEFORE_STEPS)
            what(run)

    run.clock.process(happen())
    run.run()
    rows = run.rows()
    parts_add_up(rows)
    return run, rows


def stays_of(rows, role):
    return rows.placements[rows.placements["role"] == role].reset_index(drop=True)


def sent_s(tokens: int) -> float:
    return LATENCY + -(-tokens // 8) * 8 * BYTES / RATE


def test_the_clients_first_token_comes_from_the_decode_replica():
    _, rows = run_of(some([100]))
    (request,) = rows.requests.itertuples()
    prefill, decode = rows.placements.itertuples()
    assert (prefill.role, prefill.outcome, prefill.output_tokens) == ("prefill", "handed_over", 0)
    assert (decode.role, decode.outcome, decode.output_tokens) == ("decode", "completed", 5)
    assert request.first_token_s > decode.load_end_s > prefill.ended_s
    assert request.transfer_s == pytest.approx(sent_s(100), rel=1e-9)
    assert request.prefill_s == prefill.ended_s and request.replica == 1
    assert rows.gaps["count"].sum() == 4


def test_a_prefill_replica_keeps_the_blocks_until_they_have_been_fetched():
    run, rows = run_of(some([100, 8], arrival=[0.0, 0.05]))
    kept, fetched = stays_of(rows, "prefill"), stays_of(rows, "decode")
    assert kept["released_s"].tolist() == fetched["load_end_s"].tolist()
    later = rows.steps[(rows.steps["replica"] == 0) & (rows.steps["start_s"] == 0.05)]
    assert later["kv_used_blocks"].tolist() == [13 + 1]  # the first one's are still there
    assert run.engines[0].core.ledger.usage().free == 400


def test_the_conductor_chooses_both_replicas_when_a_request_arrives():
    """So three that come together go to three decode replicas, though their prompts are computed
    one after another; and who would get tokens too late is rejected before its prompt is."""
    config = ROOMY.model_copy(update={"router": "conductor"})
    workload = some([100] * 3, outputs=[2, 2, 2])
    _, rows = run_of(workload, hand_over(router="conductor"), config, decode=3)
    assert sorted(stays_of(rows, "decode")["replica"]) == [1, 2, 3]
    workload = replace(workload, slo_tpot_s=np.array([np.nan, np.nan, 1e-9]))
    _, rows = run_of(workload, hand_over(router="conductor"), config, decode=3)
    assert rows.requests["outcome"].tolist() == ["completed", "completed", "rejected"]
    assert len(stays_of(rows, "prefill")) == 2


# -- leases ----------------------------------------------------------------------------------------
def late_decode(lease_s: float, recompute: bool, at_s: float):
    """The only decode replica fails before the prompt is computed; another comes at `at_s`."""
    events = [
        (1e-4, lambda run: run.fleet.fail(1)),
        (at_s, lambda run: run.add(run.kinds[Role.DECODE])),
    ]
    return run_of(some([100]), hand_over("none", lease_s, recompute), events=events)


def test_a_load_that_fails_fails_the_request_by_default():
    _, rows = late_decode(0.5, recompute=False, at_s=1.0)
    assert rows.requests["outcome"].tolist() == ["failed"]


# -- failures --------------------------------------------------------------------------------------
def test_prompts_are_computed_by_decode_replicas_while_no_prefill_replica_is_up():
    events = [(1e-4, lambda run: run.fleet.fail(0))]
    _, rows = run_of(some([100, 100], arrival=[0.1, 0.2]), events=events)
    assert rows.placements["role"].tolist() == ["decode"] * 2
    assert rows.requests["finished"].all() and rows.requests["queue_s"].notna().all()


# -- local prefill ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "prompt", "cached", "least", "local"),
    [
        ("none", 10, 9, 99, False),
        ("llm-d", 10, 10, 0, False),
        ("llm-d:threshold=512", 1000, 488, 0, False),
        ("llm-d:threshold=512", 1000, 489, 0, True),
        ("dynamo", 4000, 2000, 0, True),
        ("dynamo", 4000, 1952, 0, False),
        ("dynamo", 1000, 300, 0, False),
        ("dynamo", 1000, 301, 0, True),
        ("dynamo:busy=4", 9000, 0, 3, False),
        ("dynamo:busy=4", 9000, 0, 4, True),
    ],
)
def test_rules_of_local_prefill(rule, prompt, cached, least, local):
    assert parse_rule(rule).local(prompt, cached, least) is local


# -- draining --------------------------------------------------------------------------------------
def test_a_router_that_sends_a_computed_prompt_to_be_computed_again_is_stopped():
    class Always(LeastRequests):
        def place(self, request, stage, view):
            return 0

    with pytest.raises(ValueError, match="replica 0, which is up for prefill; give one of view.up"):
        run_of(some([60]), router=Always())


def test_a_prefill_replica_that_drains_is_down_when_all_has_been_fetched():
    run, rows = run_of(some([100]), events=[(1e-3, lambda run: run.fleet.drain(0))])
    (kept,) = stays_of(rows, "prefill").itertuples()
    assert rows.replicas["down_s"][0] == kept.released_s > kept.ended_s
    assert rows.requests["finished"].all() and run.engines[0].core.ledger.usage().free == 400


# Prefill apart from decode, where the prefill replica writes: beside the pull, and alone. Leases
# of KV that was handed over, and their heartbeats.
AT_ONCE = Push(poll_s=0.0, timeout_s=1.0)
LIMITLESS = (math.inf, 0.0)  # bytes/s, seconds of latency


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", mostly_nightly(range(4), 0))
def test_over_a_limitless_link_a_push_is_a_pull(seed, asynchronous):
    """Whoever begins, nothing takes time: every row of every table is the same, with memory that
    runs short, preemptions and several replicas of each role."""
    config = ROOMY.model_copy(update={"num_blocks": 60, "async_scheduling": asynchronous})
    pulled, pushed = (
        run_of(crowd(seed), hand_over(push=p), config, network=LIMITLESS, prefill=2, decode=2)[1]
        for p in (None, AT_ONCE)
    )
    assert pulled.placements["recomputes"].sum() > 0
    assert stays_of(pulled, "decode")["load_tokens"].sum() > 0
    for table in TABLES:
        assert getattr(pulled, table).equals(getattr(pushed, table)), table


def test_a_push_alone_takes_one_message_more_than_a_pull():
    (pulled, pushed) = (run_of(some([100]), hand_over(push=p))[1] for p in (None, AT_ONCE))
    assert pulled.requests["transfer_s"][0] == pytest.approx(sent_s(100), rel=1e-9)
    assert pushed.requests["transfer_s"][0] == pytest.approx(sent_s(100) + LATENCY, rel=1e-9)
    same = ["router_s", "queue_s", "prefill_s"]
    assert pulled.requests[same].equals(pushed.requests[same])


@pytest.mark.slow
@pytest.mark.parametrize("push", [None, AT_ONCE, Push()], ids=["pull", "push", "polled"])
def test_each_byte_is_sent_once(push):
    """What was asked for passes one port of each side, whoever begins the transfers."""
    run, rows = run_of(crowd(1), hand_over(push=push), prefill=2, decode=3)
    asked = stays_of(rows, "decode")["load_tokens"].sum() * BYTES
    for side, port in ((Role.PREFILL, "out"), (Role.DECODE, "into")):
        ports = [getattr(r.network, port) for r in run.fleet.replicas if r.role is side]
        for one in ports:
            one.settle(np.inf)
        assert sum(one.landed_bytes for one in ports) == asked > 0
        assert sum(one.lost_bytes for one in ports) == 0


# -- what is lost ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("recompute", "end"), [(False, "failed"), (True, "completed")])
def test_nobody_says_that_a_write_will_not_come(recompute, end):
    """A pull from a replica that fails is known to have failed at that time; a push is waited for
    until its time is over."""
    fails = [(0.1, lambda run: run.fleet.fail(0))]
    for push, known_s in ((None, 0.1), (AT_ONCE, None)):
        _, rows = run_of(some([160]), hand_over(recompute=recompute, push=push), events=fails)
        (decode,) = stays_of(rows, "decode").itertuples()
        assert decode.load_begin_s < 0.1 and decode.load_failed
        assert decode.load_end_s == (known_s or decode.load_begin_s + AT_ONCE.timeout_s)
        assert rows.requests["outcome"].tolist() == [end]


def test_who_asks_after_the_lease_waits_in_vain():
    """The only decode replica fails, and another comes when the lease has run out."""
    events = [
        (1e-4, lambda run: run.fleet.fail(1)),
        (1.0, lambda run: run.add(run.kinds[Role.DECODE])),
    ]
    connector = hand_over(lease_s=0.5, recompute=True, push=AT_ONCE)
    run, rows = run_of(some([100]), connector, events=events)
    (decode,) = stays_of(rows, "decode").itertuples()
    assert decode.load_begin_s == 1.0 and decode.load_end_s == 1.0 + AT_ONCE.timeout_s
    assert rows.requests["outcome"].tolist() == ["completed"]
    assert rows.requests["transfer_s"][0] == pytest.approx(AT_ONCE.timeout_s)
    assert run.fleet.replicas[0].network.out.queued_bytes == 0


def test_a_decode_replica_that_fails_before_the_write_gets_none():
    """The prefill replica keeps the prompt until its lease is over."""
    fails = [(0.03, lambda run: run.fleet.fail(1))]
    connector = hand_over(lease_s=0.3, push=Push(poll_s=0.04))
    run, rows = run_of(some([160]), connector, events=fails)
    (kept,), (decode,) = (stays_of(rows, role).itertuples() for role in ("prefill", "decode"))
    assert kept.ended_s < 0.03 < kept.ended_s + 0.04  # asked for, and not seen
    assert math.isnan(decode.load_end_s)
    assert kept.lease_expired and run.fleet.replicas[0].network.out.queued_bytes == 0


@pytest.mark.parametrize("push", [None, Push(poll_s=0.04)], ids=["pull", "push"])
def test_nothing_lands_on_a_replica_that_is_not_yet_known_to_be_dead(push):
    """The router learns of it only after the KV would have come."""

    def fail(run):
        run.fleet.recovery = Recovery(detection_s=0.5)
        run.fleet.fail(1)

    connector = hand_over(lease_s=0.3, push=push)
    run, rows = run_of(some([160]), connector, events=[(0.03, fail)])
    (kept,), (decode,) = (stays_of(rows, role).itertuples() for role in ("prefill", "decode"))
    assert decode.load_begin_s < 0.03 and decode.load_failed and math.isnan(decode.load_end_s)
    assert kept.lease_expired
    (port,) = (replica.network.into for replica in run.fleet.replicas[1:])
    port.settle(np.inf)
    assert port.landed_bytes == 0


def test_a_decode_replica_that_fails_while_it_waits_in_vain_learns_nothing():
    """First the prefill replica fails, then the one that waits for it."""
    fails = [(0.1, lambda run: run.fleet.fail(0)), (0.2, lambda run: run.fleet.fail(1))]
    _, rows = run_of(some([160]), hand_over(push=AT_ONCE), events=fails)
    (decode,) = stays_of(rows, "decode").itertuples()
    assert decode.ended_s == 0.2 and decode.load_failed and math.isnan(decode.load_end_s)
    assert rows.requests["outcome"].tolist() == ["failed"]


def test_memory_of_who_left_and_failed_is_kept_until_the_lease_is_over():
    """Nobody is left to say that the KV has come, and the prefill replica drains all the same."""
    events = [
        (0.025, lambda run: run.fleet.withdraw(run.fleet.requests[0], End.DISCONNECTED)),
        (0.03, lambda run: run.fleet.fail(1)),
    ]
    connector = hand_over(lease_s=0.3, push=Push(poll_s=0.04))
    run, rows = run_of(some([160]), connector, events=events)
    (kept,) = stays_of(rows, "prefill").itertuples()
    assert kept.lease_expired and run.fleet.replicas[0].network.out.queued_bytes == 0
    assert run.engines[0].core.ledger.usage().free == 400


EVERY, LONG = 5.0, 20.0


def test_one_heartbeat_goes_out_for_all_that_are_waited_for():
    """The second prompt's lease is renewed when the first one's is, and not five seconds after it
    was asked for."""
    beats, first, second = Heartbeats(EVERY), Lease(30.0, LONG), Lease(30.0, LONG)
    first.track(beats, 11.0)
    second.track(beats, 14.0)
    assert second.renew(15.9) == 30.0
    assert second.renew(16.0) == first.renew(16.0) == 36.0


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6))
def test_heartbeats_are_those_of_an_engine_that_looks_every_second(stays):
    """stays: when a prompt is asked for, and for how long it is waited for."""
    beats, leases = Heartbeats(EVERY), [Lease(0.0, LONG) for _ in stays]
    last, expected = -math.inf, [0.0] * len(stays)
    for now in range(90):
        for lease, (since, length) in zip(leases, stays, strict=True):
            if now == since + length:
                lease.let_go(now)
        for lease, (since, _) in zip(leases, stays, strict=True):
            if now == since:
                lease.track(beats, now)
        waited = [i for i, (since, length) in enumerate(stays) if since <= now < since + length]
        if waited and now - last >= EVERY:
            last = float(now)
            for i in waited:
                expected[i] = max(expected[i], now + LONG)
        assert [lease.renew(now) for lease in leases] == expected


# Fleet files with prefill apart from decode: from the file to the results, and what is refused.
P, D = {"role": "prefill"}, {"role": "decode"}


def apart(**more) -> str:
    return json.dumps({"pools": [{**P, "replicas": 2}, {**D, "name": "d"}], **more})


def test_the_parts_of_the_summary_add_up_to_its_ttft():
    (result,) = simulate(SimulationConfig(fleet=apart(), front_end="vllm", **SMALL)).values()
    parts, handed = result.summary["ttft_parts"], result.summary["hand_over"]
    assert list(parts) == ["front_end", *TTFT_PARTS]
    together = sum(part["mean_ms"] for part in parts.values())
    assert together == pytest.approx(result.summary["mean_ttft_ms"], rel=1e-9)
    assert handed["prefilled_apart"] == handed["loads"] == 80 and not handed["failed_loads"]
    assert handed["load"]["mean_ms"] == pytest.approx(parts["transfer"]["mean_ms"])


@pytest.mark.slow
def test_it_is_repeated_from_its_run_json(tmp_path):
    more = {"local_prefill": "llm-d:threshold=99", "connector": {"load_failures": "recompute"}}
    (result,) = simulate(SimulationConfig(fleet=apart(**more), **SMALL)).values()
    write_run(tmp_path / "run", result)
    told = read_run(tmp_path / "run").config["fleet"]
    assert told["local_prefill_options"] == {"threshold": 99}
    assert told["connector"]["load_failures"] == "recompute"
    again = SimulationConfig(**from_file(tmp_path / "run" / "run.json"))
    assert resolve(again).hand_over == resolve(SimulationConfig(fleet=apart(**more))).hand_over


def test_a_prefill_router_whose_file_has_changed_is_no_repetition(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from twinserve.sim.fleet.routers.plain import LeastRequests\n"
        "class Mine(LeastRequests):\n    name = 'mine'\n"
    )
    fleet = apart(prefill_router=f"{file}:Mine")
    (result,) = simulate(SimulationConfig(fleet=fleet, **SMALL)).values()
    write_run(tmp_path / "run", result)
    from_file(tmp_path / "run" / "run.json")
    file.write_text(file.read_text() + "# another one\n")
    with pytest.raises(SettingsError, match="mine.py:Mine: its file has changed since that run"):
        from_file(tmp_path / "run" / "run.json")


def test_ports_have_the_rate_of_the_file_or_of_one_nic_a_gpu():
    pools = [
        {**P, "ports": {"network_gb_per_s": 3, "network_latency_us": 40}},
        {**D, "profile": "llama-3.1-70b@h100:tp4"},
    ]
    pools[0]["profile"] = "llama-3.1-70b@h100:tp8"
    inputs = resolve(SimulationConfig(fleet=json.dumps({"pools": pools}), **SMALL))
    given, default = (r.network for r in Simulation(inputs, inputs.policies[0]).fleet.replicas)
    assert (given.out.bytes_per_s, default.into.bytes_per_s) == (3e9, 200e9)
    assert given.out.latency_s + given.into.latency_s == pytest.approx(40e-6)


def test_each_side_has_a_router_of_its_own():
    fleet = apart(router="round-robin", prefill_router="llm-d:age=0.1")
    inputs = resolve(SimulationConfig(fleet=fleet, **SMALL))
    run = Simulation(inputs, inputs.policies[0])
    assert (run.fleet.router.name, run.fleet.prefill_router.name) == ("round-robin", "llm-d")


@pytest.mark.slow
@pytest.mark.parametrize("router", ["conductor", "dynamo-kv", "sglang", "vllm-dp", "session"])
def test_any_router_serves_both_sides(router):
    fleet = apart(router=router, pools=[{**P, "replicas": 2}, {**D, "replicas": 2}])
    (result,) = simulate(SimulationConfig(fleet=fleet, **SMALL | {"requests": 40})).values()
    ends = result.rows.requests["outcome"].value_counts().to_dict()
    assert ends.get("completed", 0) + ends.get("rejected", 0) == 40


WRONG = {
    apart(pools=[P]): "pools: no pool has the role decode; add one",
    apart(pools=[P, D, {}]): r"pools\[2\].role: a fleet with prefill and decode pools",
    apart(pools=[{}], connector={}): "connector: no pool has the role prefill; give roles",
    apart(pools=[{}], local_prefill="dynamo"): "local_prefill: no pool has the role prefill",
    apart(pools=[{"ports": {"network_gb_per_s": 1}}]): "replicas send nothing over a network",
    apart(connector={"transfer": "shove"}): "connector.transfer: input should be 'pull' or 'push'",
    apart(connector={"push_poll_ms": 2}): "connector: push_poll_ms: nothing is pushed; write tr",
    apart(connector={"lease": 3}): r"connector.lease: there is no such field",
    apart(local_prefill="dynmo"): r"no rule 'dynmo' for local prefill \(did you mean 'dynamo'",
    apart(local_prefill="llm-d:tokens=3"): "local prefill 'llm-d' has no option 'tokens'",
    apart(prefill_router="sprad"): r"prefill_router: no router 'sprad' \(did you mean 'spread'",
    apart(pools=[P, {**D, "profile": "llama-3.1-70b@h100:tp4"}]): "model: llama-3.1-70b, and llama",
    apart(pools=[P, {**D, "block_tokens": 32}]): "block_tokens: 32, and 16 in pool-0; KV that is",
    "0P2D": r"pools\[0\].replicas: .*greater than or equal to 1",
    "9" * 5000 + "P1D": "cannot be read",
}


@pytest.mark.parametrize(("fleet", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_one_line(fleet, said):
    with pytest.raises(SettingsError, match=said) as error:
        resolve(SimulationConfig(fleet=fleet, **SMALL))
    assert "\n" not in str(error.value) and str(error.value).startswith("--fleet")


@pytest.mark.parametrize(
    ("fleet", "flags", "said"),
    [
        (apart(pools=[P, {**D, "policy": "sarathi"}]), "", "policy sarathi has no decode side"),
        (
            apart(pools=[{**P, "policy": "bros"}, D]),
            "",
            "the bidirectional ledger hands no KV over",
        ),
        (apart(pools=[{**P, "policy": "vtc"}, D]), "", "accounts for applications as a whole"),
        ("1P1D", "--load 0.5", "--load 0.5: the capacity of separate prefill and decode pools"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_run(fleet, flags, said, tmp_path, capsys):
    path = tmp_path / "fleet.json"
    path.write_text(fleet)
    given = path if fleet.startswith("{") else fleet
    traffic = TRAFFIC.replace("--rate 8", "") if flags else TRAFFIC
    code, line = command(f"--fleet {given} {traffic} {flags}", capsys)
    assert code == BAD_INPUT and said in line and line.count("\n") == 1


def test_the_file_of_the_page_runs():
    _, text, *_ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (result,) = simulate(SimulationConfig(fleet=_as_json(text), **SMALL)).values()
    assert list(result.summary["pools"]) == ["prefill", "decode"]
    assert result.summary["completed"] == 80


def _as_json(text: str) -> str:
    import yaml

    return json.dumps(yaml.safe_load(text))
