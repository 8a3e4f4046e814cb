"""Every policy on every ledger keeps the rules of `sim.setup.audit`: each plan checked, every
request served, and runs of decode steps taken at once byte for byte what single steps give.
docs/results/matrices.md says which pairs there are."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parameters import SOME_POLICIES, mostly_nightly, mostly_nightly_pairs
from twinserve.policies.registry import ledger_names, parse_policy, policy_names
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.setup.audit import CROWDED, check_policy, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.sim.twin.stability import passed_over

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "matrices.md"


def allowed(heading: str) -> list[tuple[str, str]]:
    """Pairs (policy, ledger) with a yes in the first table below `heading` of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(heading)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    ledgers, *rows = (
        [cell.strip("*` ") for cell in line.strip("|").split("|")]
        for line in (table[0], *table[2:])
    )
    return [
        (row[0], ledger)
        for row in rows
        for ledger, cell in zip(ledgers[1:], row[1:], strict=True)
        if cell == "yes"
    ]


PLAIN = allowed("## Policy and KV ledger")
WITH_PREFIXES = allowed("With `--prefix-caching`:")


def test_the_page_allows_every_pair_and_prefixes_where_both_know_them():
    assert PLAIN == [(policy, ledger) for policy in policy_names() for ledger in ledger_names()]
    assert {policy for policy, _ in WITH_PREFIXES} == set(policy_names()) - {"bros", "bros-exact"}
    assert {ledger for _, ledger in WITH_PREFIXES} == {
        "checkpointed", "paged", "paged-rc", "task-aware",
    }  # fmt: skip


@pytest.mark.nightly
def test_one_that_waits_may_enter_blocks_of_others_once_they_are_full():
    """Found by the slow tests: policy vllm-v0, which admits before it decodes, promised that memory
    would keep it out."""
    assert check_policy("vllm-v0", kv=["bidirectional"], seeds=[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly_pairs(PLAIN, *SOME_POLICIES))
def test_rules_are_kept_on_every_ledger(policy, ledger):
    assert check_policy(policy, kv=[ledger], seeds=[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ledger"),
    mostly_nightly(WITH_PREFIXES, ("vllm", "checkpointed"), ("justitia", "paged")),
)
def test_rules_are_kept_where_prompts_share_prefixes(policy, ledger):
    config = CROWDED.model_copy(update={"prefix_caching": True})
    assert check_policy(policy, kv=[ledger], seeds=[2], config=config) > 300


RECOMMENDED = ("bros:chunk=fit", "echo", "justitia", "srjf", "vllm")  # docs/systems.md
# Few seats, and a large host: past saturation most requests lose their memory some time.
SHORT = CROWDED.model_copy(update={"max_num_seqs": 4, "host_blocks": 400, "exact": True})
SEATED_IN_CI = [(RECOMMENDED[0], ledger) for ledger in ledger_names()]
SEATED = [(policy, ledger) for policy in RECOMMENDED for ledger in ledger_names()]


def idle_beside_holders(core: EngineCore) -> list[list[int]]:
    """Filled as the engine plans: for each plan with an idle seat, the decodes without a token that
    hold their KV and a place for the next one, and for which the plan has time."""
    found: list[list[int]] = []
    usual, composed, policy = core.plan, [], core.policy
    if answer := getattr(policy, "_answer", None):  # of `bros:chunk=fit`, which bounds a step
        policy._answer = lambda step, *rest: composed.append(step) or answer(step, *rest)

    def plan(now):
        made = usual(now)
        rows = passed_over(core, made.rows).tolist()
        if composed:
            step = composed.pop()
            resident = core.requests.computed_tokens
            rows = [r for r in rows if step.cost.decodes(step.load, resident[[r]], step.bound)]
        if rows and len(made.rows) < SHORT.max_num_seqs:
            found.append(rows)
        return made

    core.plan = plan
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly(SEATED, *SEATED_IN_CI))
def test_no_seat_stays_idle_beside_a_decode_that_holds_its_memory(policy, ledger):
    spec = replace(parse_policy(policy), kv=ledger)
    hardware = resolve_hardware(SHORT)
    simulation = Simulation(Inputs(SHORT, crowd(2, 14), hardware, (spec,), ()), spec)
    core = simulation.engines[0].core
    idle = idle_beside_holders(core)
    simulation.run()
    assert not core.active and idle == []
