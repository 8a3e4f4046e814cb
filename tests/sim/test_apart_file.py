"""Fleet files with prefill apart from decode: from the file to the results, and what is refused."""

import json
import re

import pytest

from tests.sim.test_fleet_file import PAGE, SMALL, TRAFFIC, command
from twinserve.sim.cli.main import BAD_INPUT
from twinserve.sim.results.columns import TTFT_PARTS
from twinserve.sim.results.files import read_run, write_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Simulation, simulate

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
