"""Fleet files: pools of replicas that differ, from the file to the results, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.commands import status
from twinserve.sim.cli.main import BAD_INPUT, simulate_main
from twinserve.sim.results.files import read_run, write_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.fleet_file import PoolSettings, read_fleet
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import offered_load, offered_load_of
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Simulation, simulate
from twinserve.sim.sweep.combinations import Run
from twinserve.sim.sweep.sweep import Sweep, contents_of

TRAFFIC = "-t poisson --rate 8 --requests 80 --no-async-scheduling --quiet"
SMALL = {"trace": "poisson", "rate": 8.0, "requests": 80, "async_scheduling": False}
TWO = """
pools:
  - name: big
    replicas: 2
    profile: llama-3.1-8b@h100
  - name: small   # older machines
    profile: llama-3.1-8b@a100-40g
    policy: sarathi
    max_num_seqs: 32
    ports: {pcie_gb_per_s: 20}
router: spread
"""


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(TWO)
    return path


def command(text: str, capsys) -> tuple[int, str]:
    return status(simulate_main, text.split()), "".join(capsys.readouterr())


def test_each_pool_runs_what_the_file_says(two):
    inputs = resolve(SimulationConfig(fleet=str(two), **SMALL))
    run = Simulation(inputs, inputs.policies[0])
    policies = [engine.core.policy for engine in run.engines]
    assert [policy.name for policy in policies] == ["vllm", "vllm", "sarathi"]
    assert [policy.limits.max_num_seqs for policy in policies] == [1024, 1024, 32]
    rates = [engine.backend.link.to_host.bytes_per_s for engine in run.engines]
    assert rates[2] == 20e9 and rates[0] == rates[1] != 20e9
    assert run.fleet.router.name == "spread"


def test_each_pool_plans_ahead_if_its_release_does():
    fleet = json.dumps({"pools": [{"engine_version": "0.11"}, {"engine_version": "0.19"}, {}]})

    def ahead(**settings):
        settings |= {"trace": "fixed:8,2", "requests": 1, "rate": 1.0}
        inputs = resolve(SimulationConfig(fleet=fleet, **settings))
        return [pool.config.async_scheduling for pool in inputs.pools]

    assert ahead() == [False, True, True]
    assert ahead(engine_version="0.12") == [False, True, False]
    assert ahead(async_scheduling=False) == [False, False, False]


@pytest.mark.slow
def test_a_run_is_repeated_from_its_run_json_without_the_file(two, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    code, said = command(f"--fleet {two} {TRAFFIC} --out {first}", capsys)
    assert code == 0 and "Pools, vllm" in said and "hits" in said
    two.unlink()
    assert command(f"--config {first}/run.json --quiet --out {second}", capsys)[0] == 0
    for file in sorted(first.iterdir()):
        if file.name != "timing.json":
            assert file.read_bytes() == (second / file.name).read_bytes(), file.name


MINE = """
from twinserve.policies.baselines.vllm import VllmPolicy

class Mine(VllmPolicy):
    name = "mine"
"""


@pytest.mark.parametrize(("first", "second"), [("{mine}", None), (None, "{mine}")])
def test_a_run_whose_pool_has_a_policy_from_a_file_is_repeated(first, second, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    named = [text and text.format(mine=f"{tmp_path}/mine.py:Mine") for text in (first, second)]
    fleet = json.dumps({"pools": [{"policy": text} if text else {} for text in named]})
    (result,) = simulate(SimulationConfig(fleet=fleet, **SMALL)).values()
    write_run(tmp_path / "run", result)
    again = resolve(SimulationConfig(**from_file(tmp_path / "run" / "run.json")))
    ran = [pool.policy(again.policies[0]).policy.name for pool in again.pools]
    assert ran == ["mine" if text else "vllm" for text in named]


@pytest.mark.slow
def test_a_repeat_with_a_changed_policy_of_a_pool_is_refused(tmp_path, capsys):
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(MINE)
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"pools:\n - policy: {mine}:Mine\n - {{}}\n")
    assert command(f"--fleet {fleet} {TRAFFIC} --out {run}", capsys)[0] == 0
    mine.write_text(MINE + "# better now\n")
    again = f"--config {run}/run.json --quiet --out {tmp_path}/again"
    code, said = command(again, capsys)
    assert code == BAD_INPUT and said.count("\n") == 1
    assert f"{mine}:Mine: its file has changed since that run" in said and "--fleet" in said
    assert command(f"{again} --fleet {fleet}", capsys)[0] == 0  # it is meant


@pytest.mark.parametrize("router", ["least-requests", "random"])  # the first: the default's name
def test_a_router_beside_that_of_the_file_is_refused(two, router, capsys):
    code, said = command(f"--fleet {two} {TRAFFIC} --router {router}", capsys)
    assert code == BAD_INPUT and "router: 'spread'" in said and "keep one of them" in said
    assert command(f"--fleet {two} {TRAFFIC} --router spread", capsys)[0] == 0


@pytest.mark.parametrize("policies", [("vllm", "bros"), ("bros", "vllm")])
def test_settings_that_any_pool_makes_use_of_are_kept_for_repeating(policies):
    fleet = json.dumps({"pools": [{"policy": policy} for policy in policies]})
    flags = SMALL | {"estimator": "perfect", "prefix_caching": True, "requests": 5}
    (result,) = simulate(SimulationConfig(fleet=fleet, **flags)).values()
    kept = result.config["config"]
    assert (kept["estimator"], kept["prefix_caching"]) == ("perfect", True)


@pytest.mark.parametrize("policies", [("vllm", "bros-exact"), ("bros-exact", "vllm")])
def test_what_policies_count_is_of_the_pools_that_count_it(policies):
    fleet = json.dumps({"pools": [{"policy": policy} for policy in policies]})
    (result,) = simulate(SimulationConfig(fleet=fleet, **SMALL | {"requests": 5})).values()
    counted = result.config["policy"]["counters"]
    steps = result.rows.steps.groupby("replica").size()
    assert sum(counted.values()) == steps[policies.index("bros-exact")]


@pytest.mark.slow
def test_flags_win_over_what_a_former_run_had(two, tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    assert command(f"--fleet {two} {TRAFFIC} --out {first}", capsys)[0] == 0
    assert read_run(first).config["fleet"]["router"] == "spread"
    flags = f"--config {first}/run.json --quiet --overwrite --out {again}"
    assert command(f"{flags} --router round-robin", capsys)[0] == 0
    run = read_run(again)
    assert run.config["fleet"]["router"] == "round-robin" and len(run.rows.replicas) == 3
    assert command(f"{flags} --replicas 5", capsys)[0] == 0
    assert len(read_run(again).rows.replicas) == 5
    flags = f"--config {again}/run.json --quiet --out {tmp_path}/third"
    assert command(f"{flags} --fleet {two}", capsys)[0] == 0
    third = read_run(tmp_path / "third")
    assert len(third.rows.replicas) == 3 and third.config["fleet"]["router"] == "spread"


def test_a_sweep_knows_when_what_a_file_names_has_changed(tmp_path):
    policy, fleet = tmp_path / "mine.py", tmp_path / "fleet.yaml"
    policy.write_text("")
    fleet.write_text(f"pools:\n - policy: {policy}:Mine\n")
    before = contents_of({"fleet": str(fleet)})
    assert set(before) == {str(fleet), str(policy)}
    policy.write_text("x = 1\n")
    after = contents_of({"fleet": str(fleet)})
    assert before[str(fleet)] == after[str(fleet)] and before[str(policy)] != after[str(policy)]


def test_a_sweep_knows_when_the_config_of_a_model_has_changed(tmp_path):
    (tmp_path / "nemo").mkdir()
    file, folder = tmp_path / "nemo.json", tmp_path / "nemo"
    for path in (file, folder / "config.json"):
        path.write_text("{}")
    assert [*contents_of({"profile": f"{file}@h100:tp2"})] == [str(file)]
    fleet = {"fleet": json.dumps({"pools": [{"profile": f"{folder}@h100/operators"}]})}
    before = contents_of(fleet)
    assert [*before] == [str(folder / "config.json")]
    (folder / "config.json").write_text('{"x": 1}')
    assert contents_of(fleet) != before


def test_a_sweep_of_fleets_has_no_error_bars(two, tmp_path):
    runs = [Run({}, SimulationConfig(fleet=str(two), **SMALL), "here")]
    with pytest.raises(SettingsError, match="drop --fleet"):
        Sweep(runs, tmp_path / "out", error_bars=True)


def test_results_are_by_replica_pool_and_fleet(two, tmp_path, capsys):
    assert command(f"--fleet {two} {TRAFFIC} --out {tmp_path}/run", capsys)[0] == 0
    run = read_run(tmp_path / "run")
    pools, replicas = run.summary["pools"], run.summary["replicas"]
    assert run.rows.replicas["pool"].tolist() == ["big", "big", "small"]
    assert {name: pool["replicas"] for name, pool in pools.items()} == {"big": 2, "small": 1}
    for name in ("requests", "completed", "output_tokens", "steps"):
        of_pools = [pool[name] for pool in pools.values()]
        of_replicas = [replica[name] for replica in replicas]
        assert of_pools == [of_replicas[0] + of_replicas[1], of_replicas[2]]
    assert sum(replica["completed"] for replica in replicas) == run.summary["completed"] == 80
    big = run.rows.requests[run.rows.requests.replica < 2]
    mean_ms = (big.first_token_s - big.arrival_s).mean() * 1000
    assert pools["big"]["mean_ttft_ms"] == pytest.approx(mean_ms)
    described = run.config["fleet"]["pools"]
    assert [(p["name"], p["policy"], p["profile"]["name"]) for p in described] == [
        ("big", "vllm", "llama-3.1-8b@h100"),
        ("small", "sarathi", "llama-3.1-8b@a100-40g"),
    ]


def test_one_pool_of_what_the_flags_say_is_the_run_with_these_flags():
    flags = SMALL | {"profile": "llama-3.1-8b@a100-40g", "max_num_seqs": 16}
    fleet = '{"pools": [{"replicas": 3, "max_num_seqs": 16, "profile": "llama-3.1-8b@a100-40g"}]}'
    plain = simulate(SimulationConfig(replicas=3, **flags))["vllm"]
    pooled = simulate(SimulationConfig(fleet=fleet, **SMALL))["vllm"]
    assert plain.rows.requests.equals(pooled.rows.requests)
    assert plain.rows.steps.equals(pooled.rows.steps)
    assert plain.summary["replicas"] == pooled.summary["replicas"]


@pytest.mark.slow
def test_a_pool_without_a_policy_has_that_of_each_run(two):
    results = simulate(SimulationConfig(fleet=str(two), policy=("vllm", "bros"), **SMALL))
    ran = {label: result.rows.replicas["policy"].tolist() for label, result in results.items()}
    assert ran == {"vllm": ["vllm", "vllm", "sarathi"], "bros": ["bros", "bros", "sarathi"]}


def test_pools_with_policies_of_their_own_are_one_run_with_their_names():
    fleet = json.dumps({"pools": [{"policy": "vllm"}, {"policy": "sarathi"}]})
    ((label, result),) = simulate(SimulationConfig(fleet=fleet, **SMALL)).items()
    assert label == "vllm + sarathi"
    again = resolve(SimulationConfig(**result.config["config"]))
    assert again.policies[0].label == label
    with pytest.raises(SettingsError, match="every pool of --fleet has a policy of its own"):
        resolve(SimulationConfig(fleet=fleet, policy=("bros", "echo"), **SMALL))


def test_the_capacity_of_pools_adds_up():
    """A load of 1 brings what both pools serve together."""
    pools = [{"replicas": 2}, {"profile": "llama-3.1-8b@a100-40g"}]
    more = {k: v for k, v in SMALL.items() if k != "rate"} | {"load": 1.0}
    inputs = resolve(SimulationConfig(fleet=json.dumps({"pools": pools}), **more))
    assert offered_load_of(inputs.workload, inputs.machines) == pytest.approx(1.0, rel=0.2)
    shares = [1 / offered_load(inputs.workload, *machine) for machine in inputs.machines]
    together = 1 / offered_load_of(inputs.workload, inputs.machines)
    assert together == pytest.approx(sum(shares))


# -- what is refused -------------------------------------------------------------------------------
WRONG = {
    "pools:\n - replcas: 2": (
        r"pools\[0\].replcas: there is no such field \(did you mean 'replicas'\?\); there are"
    ),
    "pool:\n - replicas: 2": r"pool: there is no such field \(did you mean 'pools'\?\)",
    "router: spread": "pools: is missing; give it",
    "pools: []": "pools: the list is empty; write at least one pool",
    "pools:\n - replicas: two": r"pools\[0\].replicas: .*integer \(given: 'two'\)",
    "pools:\n - replicas: 0": r"pools\[0\].replicas: .*greater than or equal to 1 \(given: 0\)",
    "pools:\n - {}\n - replicas: 4096": "pools: 4,097 replicas; at most 4,096",
    "pools:\n - name: a\n - name: a": r"pools\[1\].name: another pool is called 'a'",
    "pools:\n - role: prefill": ("pools: no pool has the role decode; add one"),
    "pools:\n - role: agregated": r"pools\[0\].role: there is no such role; write prefill",
    "pools:\n - ports: {pcie: 3}": (
        r"pools\[0\].ports.pcie: there is no such field; there are network_gb_per_s"
    ),
    "pools:\n - policy: vlm": r"pools\[0\] \(pool-0\): no policy 'vlm' \(did you mean 'vllm'\?\)",
    "pools:\n - kv: pagd": r"pools\[0\] \(pool-0\): no KV ledger 'pagd' \(did you mean 'paged'\?\)",
    "pools:\n - profile: llama-3.1-70b@a100-40g": (
        r"pools\[0\] \(pool-0\): llama-3.1-70b \(141.1 GB of weights\) leaves no KV memory"
    ),
    "pools:\n - num_blocks: 4": (
        r"pools\[0\] \(pool-0\): a replica holds requests of 64 tokens at most, and the longest "
        r"has [\d,]+; give the pool more memory, or cut requests with --cap-length 64"
    ),
    "pools:\n - role: x\n   role: y": "line 3: role is given twice; keep one of them",
    "pools:\n - &a {}\n - *a": r"line 3: refers to another part \(\*\); write it out",
    "pools:\n - {}\nrouter: sprad": r"router: no router 'sprad' \(did you mean 'spread'\?\)",
    "pools:\n - {}\nrouter: spread:x=1": "router: router 'spread' has no option 'x'",
    "pools:\n - prefix_caching: !!bool maybe": "line 2: has a tag",
    "pools: !!map [1]": "line 1: has a tag",
    "pools: [": "line 1: this is not YAML",
    "3: 4": "line 1: 3 is no name of a field",
    "- 1": "holds no settings; write pools:",
    "": "holds no settings; write pools:",
    "[" * 2000: "levels within each other",
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "said"), WRONG.items(), ids=lambda text: text[:30])
def test_what_is_wrong_is_one_line_with_file_and_field(text, said, tmp_path, capsys):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    code, line = command(f"--fleet {path} {TRAFFIC}", capsys)
    assert code == BAD_INPUT and line.count("\n") == 1
    with pytest.raises(SettingsError, match=said) as error:
        resolve(SimulationConfig(fleet=str(path), **SMALL))
    assert str(error.value).startswith(f"--fleet {path}: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fleet nowhere.yaml", "--fleet nowhere.yaml: there is no such file; check the path"),
        ("--fleet {two} --replicas 2", "--fleet and --replicas both say how many"),
        ("--fleet {two} --decisions --out x", "plans of one engine; drop --fleet"),
        ("--fleet {two} --error-bars", "drop --fleet"),
        ("--fleet {two} -r spread:x=1", "router: 'spread', and --router 'spread:x=1'"),
    ],
)
def test_flags_that_do_not_go_with_a_fleet_file(flags, said, two, capsys):
    code, line = command(f"{flags.format(two=two)} {TRAFFIC}", capsys)
    assert code == BAD_INPUT and said in line and line.count("\n") == 1


def test_a_file_is_kept_as_the_settings_that_it_gives():
    text = read_fleet('{"pools": [{"replicas": 2}]}').text
    assert read_fleet(text).text == text
    assert yaml.safe_load(text) == {"pools": [{"replicas": 2}]}


# -- the page --------------------------------------------------------------------------------------
PAGE = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text("utf-8")


def test_the_file_of_the_page_runs(tmp_path):
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "fleet.yaml").write_text(text)
    (result,) = simulate(SimulationConfig(fleet=str(tmp_path / "fleet.yaml"), **SMALL)).values()
    assert list(result.summary["pools"]) == ["new", "old"] and result.summary["completed"] == 80


def test_the_page_names_every_field_of_a_pool():
    (table,) = re.findall(r"^\| field of a pool.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    assert set(PoolSettings.model_fields) <= set(re.findall(r"`(\w+)`", table))
