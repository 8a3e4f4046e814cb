"""Each shipped policy plans with drafts, or says in one line why it does not."""

import json
from itertools import product

import pytest

from tests.parameters import mostly_nightly
from tests.sim.harness import same_rows
from tests.sim.test_speculation import SMALL, TIGHT, run, simulation
from twinserve.policies import registry
from twinserve.policies.errors import PolicyError
from twinserve.sim.cli.simulate import headline
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.audit import CROWDED, check_policy
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.fleet_file import SpeculateSettings, read_fleet
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import RunResult, Simulation, run_simulation
from twinserve.sim.setup.speculation import parse_speculation

# Said word for word: whoever has read why one of them cannot should not read it of another.
DRAFTING = ("bros", "kv-share", "parrot", "sarathi", "srjf", "vllm", "vllm-sjf", "vtc")
WHY_NOT = {
    "bros-exact": "solves an iteration as the paper's problem, in which each request computes one",
    "conserve": "copies blocks to the host as one-token steps fill them",
    "echo": "weighs offline work by estimates of steps in which a request decodes one token",
    "echo-bs": "weighs offline work by estimates of steps in which a request decodes one token",
    "echo-bs-e": "weighs offline work by estimates of steps in which a request decodes one token",
    "echo-bs-e-s": "weighs offline work by estimates of steps in which a request decodes one token",
    "justitia": "counts virtual time in iterations of one token a request",
    "layerkv": "moves layers of a prompt's KV by forecasts of one token a step",
    "mlfq": "fills each step anew with one token of each request that decodes, and swaps",
    "preemptive-wait": "fills each step anew with one token of each request that decodes",
    "round-robin": "fills the steps of a class, every second one, with one token",
    "tgi": "charges a request with all that it may generate",
    "vllm-v0": "is vLLM 0.x, whose speculation had a scheduler and workers of its own",
}


def test_every_shipped_policy_drafts_or_says_why_not():
    assert sorted([*DRAFTING, *WHY_NOT]) == sorted(registry._OWN) and len(registry._OWN) == 21


def on_paged(name: str) -> str:
    """Drafts are in paged memory alone."""
    return name if registry.policy_class(name).default_kv == "paged" else f"{name}:kv=paged"


DRAFTS = ("k=3,method=ngram,acceptance=0.6", "k=2,method=eagle,acceptance=0.9")
BY_TURNS = [(name, DRAFTS[turn % 2]) for turn, name in enumerate(DRAFTING)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "drafts"), mostly_nightly(product(DRAFTING, DRAFTS), *BY_TURNS[::3])
)
def test_a_policy_that_drafts_keeps_the_rules(name, drafts):
    """Every plan is audited, memory recounted, all tokens come, and a second run and the fast path
    give the same rows; with clients that leave, and asynchronously, too. `.ci/run` has three
    of the policies, and both kinds of drafts by turns."""
    crowded = CROWDED.model_copy(update={"speculate": drafts, "step_times": "roofline"})
    assert check_policy(name, kv=["paged"], seeds=range(1), config=crowded) > 150


# an iteration of bros may exceed the budget by a whole prompt: tests/policies/test_bros_drafts.py
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAFTING if name != "bros"])
def test_a_policy_with_a_draft_model_keeps_its_budget(name):
    """Each row of a step takes one more token of the budget (`Drafting.slots`)."""
    drafts = "k=3,acceptance=0.7,method=draft_model,draft=llama-3.1-8b@h100"
    made = simulation(policy=(name,), speculate=drafts, prefix_caching=False, **TIGHT)
    result = run_simulation(made)
    wanted = made.inputs.workload.output_tokens
    assert sorted(result.rows.requests["output_tokens"]) == sorted(wanted)
    steps = result.rows.steps
    rows = steps["prefill_requests"] + steps["decode_requests"]
    computed = steps["prefill_tokens"] + steps["decode_requests"] + steps["draft_tokens"]
    assert 60 < (computed + rows).max() <= 64


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_shorten_what_the_same_policy_does(name):
    settings = {"policy": (on_paged(name),), "requests": 40, "rate": 200.0, "num_blocks": 4000}
    plain, drafted = (
        run(**settings, speculate=text).summary
        for text in (None, "k=3,method=ngram,acceptance=0.8")
    )
    assert drafted["mean_tpot_ms"] < 0.6 * plain["mean_tpot_ms"]
    assert drafted["scheduler"]["steps"] < 0.6 * plain["scheduler"]["steps"]


@pytest.mark.parametrize("name", WHY_NOT)
def test_a_policy_that_does_not_draft_says_why(name):
    with pytest.raises(SettingsError) as said:
        resolve(SimulationConfig(**SMALL, policy=(name,), speculate="k=3,acceptance=0.7"))
    assert str(said.value).startswith(f"--speculate: policy {name} {WHY_NOT[name]}")
    assert "\n" not in str(said.value) and "use vllm" in str(said.value)


def test_of_a_policy_of_ones_own_no_reason_is_made_up(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from twinserve.policies.baselines.vllm import VllmPolicy\n"
        "class Mine(VllmPolicy):\n    name = 'mine'\n"
    )
    with pytest.raises(SettingsError, match="does not say how it plans with drafts"):
        resolve(SimulationConfig(**SMALL, policy=(f"{file}:Mine",), speculate="k=3,acceptance=0.7"))


def test_fairness_counts_tokens_and_not_steps():
    """A client of VTC pays for every token that a step gives it."""
    made = simulation(
        policy=("vtc:counter_lift=false",), speculate="k=3,method=ngram,acceptance=0.8"
    )
    workload, (engine,) = made.inputs.workload, made.engines
    engine.core.policy._forget = lambda client: None  # what ended clients paid counts here, too
    run_simulation(made)
    due = workload.prompt_tokens.sum() + 2 * workload.output_tokens.sum()
    assert sum(engine.core.policy.paid.values()) == due


def test_who_gives_way_cannot_swap_with_drafts():
    with pytest.raises(PolicyError, match="preemption_mode=swap: engines that speculate do not"):
        run(speculate="k=3,acceptance=0.7", policy=("vtc:preemption_mode=swap",))


def test_a_budget_of_a_draft_models_slots_alone_is_refused():
    model = "k=3,acceptance=0.7,method=draft_model,draft=llama-3.1-8b@h100"
    with pytest.raises(SettingsError) as said:
        resolve(SimulationConfig(**SMALL, speculate=model, max_num_batched_tokens=1))
    assert "--max-num-batched-tokens 1: a draft model takes 1 of them" in str(said.value)
    assert "\n" not in str(said.value) and "give 2 or more" in str(said.value)
    summary = run(speculate=model, max_num_batched_tokens=2, requests=3, cap_length=20).summary
    assert summary["completed"] == 3


# -- pools of a fleet file that speculate, beside pools that do not --------------------------------
FIELDS = {"k": 3, "method": "ngram", "acceptance": 0.7}
TEXT = "k=3,method=ngram,acceptance=0.7"
MIXED = [{"name": "fast", "replicas": 2, "speculate": FIELDS}, {"name": "plain"}]


def fleet(*pools: dict, **settings) -> RunResult:
    text = json.dumps({"pools": pools})
    inputs = resolve(SimulationConfig(**(SMALL | {"fleet": text} | settings)))
    return run_simulation(Simulation(inputs, inputs.policies[0]))


@pytest.mark.slow
def test_a_pool_that_speculates_is_what_the_flag_says():
    mine = fleet({"replicas": 2, "speculate": FIELDS})
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
    assert json.loads(said["config"]["fleet"])["pools"][0]["speculate"] == FIELDS
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
    (FIELDS | {"batches": "1-16:3,k=9"}, {}, r"pools\[0\].speculate.batches: has a comma"),
    (FIELDS | {"draft": "a@h100,cost=1"}, {}, r"pools\[0\].speculate.draft: has a comma"),
    (TEXT, {}, r"pools\[0\].speculate: write its parts as fields"),
    (FIELDS, {"policy": "echo"}, r"pools\[0\] \(pool-0\): --speculate: policy echo"),
    (FIELDS, {"policy": "bros"}, r"pools\[0\] \(pool-0\): .*bidirectional.* use kv=paged"),
    (FIELDS, {"kv": "paged-rc"}, r"pools\[0\] \(pool-0\): .*use kv=paged"),
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
        fleet(roles[0], {**roles[1], "speculate": FIELDS})
    with pytest.raises(SettingsError, match=r"pools\[0\] .*replicas of the role prefill are not"):
        fleet(*roles, speculate=TEXT)
