"""Which policy runs on which KV ledger and on which backend: `python -m tests.matrices` writes
docs/results/matrices.md.

Every cell is tried: the run of the cell is made of a small crowded workload, every plan of it is
checked, and all requests must end. A "no" is the one line with which the command refuses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from twinserve.backends.links import PcieLink
from twinserve.backends.live.serving.attributes import read_attributes
from twinserve.backends.live.serving.decider import Decider
from twinserve.backends.live.serving.options import EngineFacts, build_core, read_options
from twinserve.backends.live.versions import LiveEngineError
from twinserve.backends.simulated import SimulatedBackend
from twinserve.experiments.study.output import markdown_table
from twinserve.policies.base import EngineLimits, Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import ledger_names, parse_policy, policy_class, policy_names
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.source import RequestSource
from twinserve.sim.results.recorder import StepRecorder
from twinserve.sim.setup.audit import CROWDED, Auditor, crowd
from twinserve.sim.setup.config import DEFAULT_PROFILE, SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, describe
from twinserve.sim.twin.live import blank_settings, live_settings, owns_pool
from twinserve.traces.apps.classes import KINDS

REFUSALS = (PolicyError, RegistryError, SettingsError, LiveEngineError)
REQUESTS = 10
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "matrices.md"


@dataclass(frozen=True)
class Cell:
    """text: how it runs; refusal: why it does not, the command's own line; empty where it does."""

    text: str
    refusal: str = ""


# Where predictions are wrong at random by default, the order of applications is that of the dice.
WITHOUT_NOISE = {"vllm-sjf": "vllm-sjf:error=0"}


def tried(attempt: Callable[[], str]) -> Cell:
    """What `attempt` says, or why it was refused. Anything else that goes wrong is a defect, and
    raised."""
    try:
        return Cell(attempt())
    except REFUSALS as error:
        return Cell("no", " ".join(str(error).split()))


# -- what is tried ---------------------------------------------------------------------------------
def inputs_for(policy: str, **settings) -> Inputs:
    """What `simulate -p POLICY` would run, with a crowd in place of a trace. Raises what the
    command would report."""
    small = {name: getattr(CROWDED, name) for name in CROWDED.model_fields_set}
    trace = {"trace": "poisson", "requests": 2, "rate": 1.0, "cap_length": 64}
    config = SimulationConfig(**{**small, **trace, "policy": (policy,), **settings})
    return replace(resolve(config), workload=crowd(0, REQUESTS))


def simulated(policy: str, **settings) -> Simulation:
    """The finished run, every plan of it checked."""
    inputs = inputs_for(policy, **settings)
    run = Simulation(inputs, inputs.policies[0])
    Auditor(run.engines[0].core, inputs.workload.longest)
    run.run()
    _all_ended(run.engines[0].core)
    return run


def on_ledger(policy: str, ledger: str) -> str:
    simulated(f"{policy}:kv={ledger}")
    return "yes"


def with_prefixes(policy: str, ledger: str) -> str:
    run = simulated(f"{policy}:kv={ledger}", prefix_caching=True)
    assert (run.engines[0].core.requests.hit_tokens > 0).any(), "no prefix was found"
    return "yes"


def live(policy: str, physical: bool = False) -> str:
    """On an engine in this process: the engine that `twinserve replay` and `validate` would start,
    not started here."""
    inputs = inputs_for(policy)
    settings = live_settings(inputs, inputs.policies[0], blank_settings(physical=physical))
    run = describe(inputs, inputs.policies[0], Simulation(inputs, inputs.policies[0]).engines[0])
    if physical:
        return "physical"
    enough = settings.num_blocks >= run["kv"]["num_blocks"]
    assert enough and settings.max_step_tokens >= 1, "an engine smaller than the ledger"
    return "vLLM's pool" if owns_pool(run) else "accounted"


def served(policy: str, asynchronous: bool = False) -> str:
    """The core that `vllm serve` would build, on simulated steps; and whether it makes use of what
    clients say of their applications, if it does of what traces say."""
    spec, pool = parse_policy(policy), CROWDED.num_blocks
    facts = EngineFacts(
        num_blocks=pool if spec.name == "vllm" else 2 * pool + CROWDED.max_num_seqs,
        block_tokens=CROWDED.block_tokens,
        max_num_seqs=CROWDED.max_num_seqs,
        max_step_tokens=CROWDED.max_num_batched_tokens,
        max_model_len=CROWDED.num_blocks * CROWDED.block_tokens - CROWDED.block_tokens * 2,
        kv_bytes_per_token=131_072,
        prefix_caching=True,
        host_blocks=CROWDED.host_blocks,
    )
    profile = {"profile": DEFAULT_PROFILE} if spec.uses_estimator else {}
    options = read_options({"policy": policy} | profile)
    if spec.policy.on_application is not Policy.on_application:
        told = read_options({"policy": WITHOUT_NOISE.get(policy, policy)} | profile)
        _serve_applications(Decider(build_core(told, replace(facts, max_num_seqs=1), asynchronous)))
    core = build_core(options, facts, asynchronous)
    limits = EngineLimits(
        facts.max_num_seqs, facts.max_step_tokens, facts.max_model_len, facts.kv_bytes_per_token
    )
    _drive(core, limits)
    return "yes"


def _serve_applications(decider: Decider) -> None:
    """Two requests of each of two applications come in turns, and there is one seat: those of one
    application must be served one after the other."""
    for i in range(4):
        said = read_attributes({"app": f"a{i % 2}", "app_class": KINDS[-1 if i % 2 else 0]})
        assert not (refusal := decider.refusal(said)), refusal
        decider.submit(f"{said.app}-{i}", 8, said, float(i), most_tokens=9)
    order, now = [], 4.0
    while decider.rows:
        names = set(decider.plan(now).grants)
        assert names, "requests wait for ever"
        decider.complete(now + 0.5, names, names, {})  # a prompt and its one token
        order += [name[:2] for name in names]
        now += 1.0
    assert order in (["a0", "a0", "a1", "a1"], ["a1", "a1", "a0", "a0"]), (
        f"applications are ignored: {order}"
    )


def _drive(core: EngineCore, limits: EngineLimits) -> None:
    """To the end of a crowd without named prefixes: a server names texts itself."""
    workload = replace(crowd(0, REQUESTS), prefix=None)
    clock = Clock()
    model = resolve_hardware(CROWDED).model
    backend = SimulatedBackend(core.requests, model, PcieLink(25e9), limits, fast=False)
    Auditor(core, workload.longest)
    engine = Engine(clock, core, backend, StepRecorder(0))
    source = RequestSource(clock, workload, Fleet(clock, [Replica(engine)]))
    clock.run()
    assert source.submitted >= len(workload)
    _all_ended(core)


def _all_ended(core: EngineCore) -> None:
    if core.active:
        raise AssertionError(f"{core.active} requests did not end")


BACKENDS: dict[str, Callable[[str], str]] = {
    "`simulate`": lambda policy: simulated(policy, async_scheduling=True) and "yes",
    "`simulate --no-async-scheduling`": lambda policy: (
        simulated(policy, async_scheduling=False) and "yes"
    ),
    "`replay`, `validate`": live,
    "`replay --physical`": partial(live, physical=True),
    "the same, `kv=bidirectional`": lambda policy: live(
        f"{policy}:kv=bidirectional", physical=True
    ),
    "`vllm serve`": served,
    "`vllm serve`, asynchronous": partial(served, asynchronous=True),
}


def rows(policy: str) -> tuple[dict[str, Cell], dict[str, Cell], dict[str, Cell]]:
    """Of a policy: ledgers, ledgers with prefix caching, and backends."""
    ledgers = ledger_names()
    return (
        {kv: tried(partial(on_ledger, policy, kv)) for kv in ledgers},
        {kv: tried(partial(with_prefixes, policy, kv)) for kv in ledgers},
        {name: tried(partial(attempt, policy)) for name, attempt in BACKENDS.items()},
    )


# -- the page --------------------------------------------------------------------------------------
def page(policies: Sequence[str]) -> str:
    """docs/results/matrices.md."""
    notes: list[str] = []
    found = [rows(policy) for policy in policies]
    own = {policy: policy_class(policy).default_kv for policy in policies}
    of_ledgers, with_caches, of_backends = (
        _table(dict(zip(policies, table, strict=True)), notes, own if i == 0 else {})
        for i, table in enumerate(zip(*found, strict=True))
    )
    why = "".join(f"{number}. {text}\n" for number, text in enumerate(notes, start=1))
    return _PAGE.format(of_ledgers, with_caches, of_backends, why)


def general(policy: str, refusal: str) -> str:
    """A refusal as it would be said of any policy NAME on any such ledger KV."""
    for label in (f"{policy}:kv=", f"policy {policy} ", f"policy {policy!r} ", f"policy {policy}:"):
        refusal = refusal.replace(label, label.replace(policy, "NAME"))
    for ledger in ledger_names():
        for label in (
            f"NAME:kv={ledger};",
            f"NAME:kv={ledger} ",
            f"runs on {ledger}:",
            f"the {ledger} ledger",
        ):
            refusal = refusal.replace(label, label.replace(ledger, "KV"))
    return refusal


def _table(table: dict[str, dict[str, Cell]], notes: list[str], own: dict[str, str]) -> str:
    """notes: the refusals so far, each once; the policy's name stands as NAME."""
    lines = []
    for policy, cells in table.items():
        shown = []
        for column, cell in cells.items():
            text = cell.text
            if cell.refusal:
                note = general(policy, cell.refusal)
                notes += [note] if note not in notes else []
                text = f"no ({notes.index(note) + 1})"
            shown.append(f"**{text}**" if own.get(policy) == column else text)
        lines.append([f"`{policy}`", *shown])
    return markdown_table(["policy", *next(iter(table.values()))], lines)


_PAGE = """# Matrices

What runs where. `python -m tests.matrices` writes
this page, and tries every cell: a small workload with too little memory runs to its end, and every
plan is checked (`twinserve.sim.setup.audit`). If something is refused, the command
says the line below. Policies of other packages are listed where they are installed.

## Policy and KV ledger

In bold the policy's own ledger.

{}
With `--prefix-caching`:

{}
## Policy and backend

On its own ledger. For an engine in this process (`replay`, `validate`) the
column says what the KV memory of the live run is. "vLLM's pool" has exactly the ledger's
blocks. "accounted": the ledger decides, and all it holds fits vLLM's own pool. "physical": KV
lies in the ledger's own slots or cells (`docs/live.md`). Only settings and limits of that
engine are worked out here. For every policy on every ledger `tests/live/test_twin.py` shows
that the engine does what was planned. `vllm serve` is tried without vLLM: policy, ledger and
limits are built as in the server, with an engine that has host memory, and run on simulated
steps. A policy that orders by application (`justitia`, `srjf`, `vllm-sjf`, `parrot`) must also
serve two applications named by clients (`docs/serving.md`), one after the other.

{}
## Why not

{}"""

if __name__ == "__main__":
    PAGE.write_text(page(policy_names()), encoding="utf-8")
