"""Each shipped policy plans with drafts, or says in one line why it does not."""

from itertools import product

import pytest

from tests.parameters import mostly_nightly
from tests.sim.test_speculation import SMALL, TIGHT, run, simulation
from twinserve.policies import registry
from twinserve.policies.errors import PolicyError
from twinserve.sim.setup.audit import CROWDED, check_policy
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_simulation

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
