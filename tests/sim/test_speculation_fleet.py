"""Pools of a fleet file that speculate, beside pools that do not."""

import json

import pytest

from tests.sim.harness import same_rows
from tests.sim.test_speculation import SMALL
from twinserve.sim.cli.simulate import headline
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.fleet_file import SpeculateSettings, read_fleet
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import RunResult, Simulation, run_simulation
from twinserve.sim.setup.speculation import parse_speculation

DRAFTS = {"k": 3, "method": "ngram", "acceptance": 0.7}
TEXT = "k=3,method=ngram,acceptance=0.7"
MIXED = [{"name": "fast", "replicas": 2, "speculate": DRAFTS}, {"name": "plain"}]


def fleet(*pools: dict, **settings) -> RunResult:
    text = json.dumps({"pools": pools})
    inputs = resolve(SimulationConfig(**(SMALL | {"fleet": text} | settings)))
    return run_simulation(Simulation(inputs, inputs.policies[0]))


@pytest.mark.slow
def test_a_pool_that_speculates_is_what_the_flag_says():
    mine = fleet({"replicas": 2, "speculate": DRAFTS})
    same_rows(mine.rows, fleet({"replicas": 2}, speculate=TEXT).rows)
    without = fleet({"replicas": 2, "speculate": None}, speculate=TEXT)
    assert "draft_tokens" not in without.rows.steps


@pytest.mark.slow
def test_the_fast_path_is_exact_in_a_mixed_fleet():
    same_rows(fleet(*MIXED).rows, fleet(*MIXED, exact=True).rows)


@pytest.mark.slow
def test_run_json_says_which_pools_speculate_and_repeats_them(tmp_path):
    result = fleet(*MIXED)
    write_run(tmp_path / "out", result)
    said = json.loads((tmp_path / "out" / "run.json").read_text())
    fast, plain = said["fleet"]["pools"]
    assert fast["speculate"] == TEXT and fast["limits"]["drafting"]["tokens"] == 3
    assert "speculate" not in plain and "drafting" not in plain["limits"]
    assert json.loads(said["config"]["fleet"])["pools"][0]["speculate"] == DRAFTS
    again = resolve(SimulationConfig(**said["config"]))
    same_rows(result.rows, run_simulation(Simulation(again, again.policies[0])).rows)


def test_the_banner_names_the_pools_that_speculate():
    text = json.dumps({"pools": MIXED})
    said = headline(resolve(SimulationConfig(**(SMALL | {"fleet": text}))))
    assert "fast: speculation: 3 drafts a request by ngram" in said and "plain: spec" not in said


def test_fields_say_what_the_flag_says():
    given = {"k": 2, "method": "mtp", "rates": [0.8, 0.6], "batches": "1-8:2/9-9:1", "cost": 0.0}
    text = SpeculateSettings.model_validate(given).text
    assert text == "k=2,method=mtp,rates=0.8/0.6,batches=1-8:2/9-9:1,cost=0.0"
    assert parse_speculation(text).accepted_rates == [0.8, 0.6]


def test_small_numbers_are_read_again_as_run_json_has_them():
    """JSON writes them with an exponent."""
    pool = {"speculate": {"k": 2, "rates": [0.5, 0.00001]}, "ports": {"pcie_gb_per_s": 1e-5}}
    read = read_fleet(json.dumps({"pools": [pool]}))
    (again,) = read_fleet(read.text).settings.pools
    assert "1e-05" in read.text and again.speculate and again.ports
    assert again.speculate.rates == [0.5, 1e-5] and again.ports.pcie_gb_per_s == 1e-5


WRONG = [
    ({"k": 3}, {}, r"pools\[0\] \(pool-0\): --speculate: give one of acceptance=0.7"),
    ({"k": 0, "acceptance": 0.7}, {}, r"pools\[0\].speculate.k: .*greater than or equal to 1"),
    ({"k": 33, "length": 2}, {}, r"pools\[0\].speculate.k: .*less than or equal to 32"),
    ({"acceptance": 0.7}, {}, r"pools\[0\].speculate.k: is missing; give it"),
    ({"k": 3, "acceptance": 2}, {}, r"pools\[0\].speculate.acceptance: .*less than or equal to 1"),
    ({"k": 3, "method": "medusa"}, {}, r"pools\[0\].speculate.method: .*'ngram'"),
    ({"k": 3, "methd": "ngram"}, {}, r"pools\[0\].speculate.methd: .*did you mean 'method'"),
    ({"k": 2, "rates": [0.5, 0.6]}, {}, "none above the one before it"),
    (DRAFTS | {"batches": "1-16:3,k=9"}, {}, r"pools\[0\].speculate.batches: has a comma"),
    (DRAFTS | {"draft": "a@h100,cost=1"}, {}, r"pools\[0\].speculate.draft: has a comma"),
    (TEXT, {}, r"pools\[0\].speculate: write its parts as fields"),
    (DRAFTS, {"policy": "echo"}, r"pools\[0\] \(pool-0\): --speculate: policy echo"),
    (DRAFTS, {"policy": "bros"}, r"pools\[0\] \(pool-0\): .*bidirectional.* use kv=paged"),
    (DRAFTS, {"kv": "paged-rc"}, r"pools\[0\] \(pool-0\): .*use kv=paged"),
]


@pytest.mark.parametrize(("drafts", "more", "said"), WRONG)
def test_what_is_wrong_with_a_pools_drafts_is_one_line(drafts, more, said):
    with pytest.raises(SettingsError, match=said) as error:
        fleet({"speculate": drafts, **more})
    assert "\n" not in str(error.value) and str(error.value).startswith("--fleet: ")


def test_pools_with_roles_have_no_drafts():
    roles = [{"role": "prefill"}, {"role": "decode"}]
    with pytest.raises(
        SettingsError, match=r"pools\[1\].speculate: drafts on replicas of the role decode"
    ):
        fleet(roles[0], {**roles[1], "speculate": DRAFTS})
    with pytest.raises(SettingsError, match=r"pools\[0\] .*replicas of the role prefill are not"):
        fleet(*roles, speculate=TEXT)
