"""From settings to runs: what is refused before anything runs, and what a run says about itself."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.harness import Toy
from twinserve.policies.base import EngineLimits, Policy, Traits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import PolicySpec, ledger_class, parse_policy
from twinserve.sim.cli.simulate import headline
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.replicas import make_policy
from twinserve.sim.setup.run import Simulation, run_each, run_policy, simulate
from twinserve.traces.transform import with_pool
from twinserve.traces.workload import BestEffortPool, Workload
from twinserve.traces.write import write_trace

SMALL = {"trace": "fixed:90,10", "rate": 5.0, "requests": 6}


@pytest.fixture(scope="module")
def inputs():
    return resolve(SimulationConfig(**SMALL))


class Plain(Toy):
    name = "plain"
    uses_estimator = False


# -- load and rate ---------------------------------------------------------------------------------
def test_the_load_of_a_trace_does_not_depend_on_when_it_starts(tmp_path):
    """Two files whose clocks differ: the same factor, the same rate shown."""
    arrival = np.sort(np.random.default_rng(0).uniform(0, 60, 200))
    arrival[0] = 0.0
    shown = []
    for start in (0.0, 5000.0):
        w = Workload.build(arrival + start, np.full(200, 900), np.full(200, 50))
        path = write_trace(w, tmp_path / "shifted.jsonl")
        given = resolve(SimulationConfig(trace=str(path), load=0.5))
        shown.append((headline(given), given.notices))
    assert shown[0] == shown[1]
    assert "rate scale" in shown[0][1][-1] and "200 requests over " in shown[0][0]


# -- policies that cannot serve the requests -------------------------------------------------------
class Whole(Plain):
    """Prompts whole, within a step's tokens."""

    name = "whole"

    def setup(self):
        super().setup()
        self.traits = Traits(
            prompt_limit=(self.limits.max_num_batched_tokens, "--max-num-batched-tokens")
        )


@pytest.mark.parametrize(
    "spec", [PolicySpec("whole", own=Whole), parse_policy("vllm-v0:max_num_batched_tokens=128")]
)
def test_whole_prompts_are_judged_by_the_longest_request(inputs, spec):
    """Not by the model's limit, which is 131,072 here."""
    assert inputs.hardware.limits.max_model_len > 100_000
    given = replace(
        inputs, hardware=replace(inputs.hardware, limits=EngineLimits(100, 128, 131_072))
    )
    assert make_policy(given, spec).traits.prompt_limit[0] == 128
    longer = replace(inputs.workload, prompt_tokens=inputs.workload.prompt_tokens + 29)
    with pytest.raises(
        SettingsError,
        match="at most 128 tokens.*, and the longest request has 129; .*--cap-length 128",
    ):
        make_policy(replace(given, workload=longer), spec)
    with pytest.raises(SettingsError, match="has 1152"):
        make_policy(replace(given, workload=with_pool(inputs.workload, BestEffortPool(2))), spec)


def test_every_policy_is_made_before_the_first_one_runs(inputs):
    class Refuses(Plain):
        name = "refuses"

        def __init__(self, *given):
            raise SettingsError("no")

    begun = []
    several = replace(
        inputs, policies=(PolicySpec("plain", own=Plain), PolicySpec("refuses", own=Refuses))
    )
    with pytest.raises(SettingsError):
        list(run_each(several, begin=begun.append))
    assert not begun


# -- settings that nobody uses ---------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["vllm", "vllm-v0", "round-robin", "preemptive-wait"])
def test_policies_without_an_estimator_get_none(inputs, policy):
    spec = parse_policy(policy)
    with pytest.raises(SettingsError, match="--estimator perfect: no step times are estimated by"):
        resolve(SimulationConfig(**SMALL, policy=(policy,), estimator="perfect"))
    assert Simulation(inputs, spec).engines[0].core.policy.estimator is None
    assert resolve(SimulationConfig(**SMALL, policy=(policy, "bros"), estimator="perfect"))


def test_a_policy_that_looks_up_no_prefix_gets_no_prefix_cache():
    bros = ("bros", "bros:kv=paged")
    with pytest.raises(
        SettingsError, match="--prefix-caching: no prefix is looked up by bros, bros:kv=paged"
    ):
        resolve(SimulationConfig(**SMALL, policy=bros, prefix_caching=True))
    inputs = resolve(SimulationConfig(**SMALL, policy=("round-robin", *bros), prefix_caching=True))
    told = [run_policy(inputs, spec).config for spec in inputs.policies]
    assert [run["kv"]["prefix_caching"] for run in told] == [True, False, False]
    assert [run["config"]["prefix_caching"] for run in told] == [True, None, None]
    with pytest.raises(SettingsError, match="ledger of policy vllm:kv=bidirectional has none"):
        simulate(SimulationConfig(**SMALL, policy=("vllm:kv=bidirectional",), prefix_caching=True))


def test_a_ledger_says_itself_whether_it_caches_prefixes(inputs, monkeypatch):
    """Not its name: a paged ledger under another name gets the same options."""
    import twinserve.sim.setup.replicas as replicas

    class Other(PagedLedger):
        name = "other"

    monkeypatch.setattr(
        replicas, "ledger_class", lambda name: Other if name == "other" else ledger_class(name)
    )
    ledger = Simulation(inputs, PolicySpec("vllm", kv="other")).engines[0].core.ledger
    assert isinstance(ledger, Other) and ledger.prefix_caching
    assert issubclass(PagedLedger, KvLedger)


# -- what a run says of itself ---------------------------------------------------------------------
def test_a_policy_without_a_registered_name_runs_like_others(inputs):
    spec = PolicySpec("plain", own=Plain)
    result = run_policy(inputs, spec)
    assert result.summary["completed"] == 6
    assert result.config["label"] == "plain" and result.config["config"]["policy"] == ["plain"]
    assert issubclass(Plain, Policy)


def test_the_ledger_of_a_policy_is_its_own_unless_a_setting_says_otherwise():
    def ledgers(**settings):
        given = resolve(
            SimulationConfig(**SMALL, policy=("bros", "bros:kv=paged", "vllm"), **settings)
        )
        return [Simulation(given, spec).engines[0].core.ledger.name for spec in given.policies]

    assert ledgers() == ["bidirectional", "paged", "paged"]
    assert ledgers(kv="bidirectional") == ["bidirectional", "paged", "bidirectional"]
