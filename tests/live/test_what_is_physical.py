"""The table of docs/live.md that says what of LayerKV's, Echo's and BROS's memory is physical on a
live engine, and what is only accounted: every cell is worked out from a run under pressure and from
the engine that `twinserve replay` would build for it."""

from functools import cache
from pathlib import Path

import pytest

from tests.live.layer_labels import deep_profile, inputs_for
from tests.live.twin_workloads import inputs_of
from twinserve.backends.counts import not_made
from twinserve.policies.registry import policy_class
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation, run_policy
from twinserve.sim.twin.live import blank_settings, live_settings

PAGE = Path(__file__).parents[2] / "docs" / "live.md"
HEADING = "### The ledgers of LayerKV, Echo and BROS"
SYSTEMS = {"layerwise": "LayerKV", "task-aware": "Echo", "bidirectional": "BROS"}
POLICIES = {
    "layerwise": "layerkv:x=0,slo_aware=false",
    "task-aware": "echo",
    "bidirectional": "bros",
}
PHYSICAL, ACCOUNTED, NONE = "physical", "accounted", "none"


def shown() -> dict[str, dict[str, str]]:
    """Column -> row -> cell."""
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        name.replace("`", ""): {row[0]: row[1 + i] for row in rows}
        for i, name in enumerate(head[1:])
    }


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    return deep_profile(tmp_path_factory.mktemp("deep"))


def inputs(ledger: str, profile: str) -> Inputs:
    """A run in which all that the ledger can do happens."""
    if ledger == "task-aware":
        return inputs_of("documents", POLICIES[ledger])
    if ledger == "bidirectional":
        from tests.live.test_physical_layout import inputs_for as two_classes

        return two_classes(POLICIES[ledger])
    return inputs_for(profile, POLICIES[ledger], host_blocks=20, num_blocks=8)


class Run:
    def __init__(self, ledger: str, profile: str) -> None:
        self.inputs = inputs(ledger, profile)
        self.simulation = Simulation(self.inputs, self.inputs.policies[0])
        (engine,) = self.simulation.engines
        self.ledger, self.relocated = engine.core.ledger, 0
        execute = engine.backend.execute

        def executed(plan, *args):
            if hasattr(self.ledger, "relocations"):
                self.relocated += len(list(self.ledger.relocations()))
            return execute(plan, *args)

        engine.backend.execute = executed
        self.simulation.run()
        self.rows = self.simulation.rows().requests
        self.moved = engine.backend.moved


@cache
def run_of(ledger: str, profile: str) -> Run:
    return Run(ledger, profile)


def worked_out(ledger: str, physical: bool, profile: str) -> dict[str, str]:
    run = run_of(ledger, profile)
    settings = live_settings(run.inputs, run.inputs.policies[0], blank_settings(physical=physical))
    accounted = not_made(run.moved, physical)
    hits = run.rows["hit_tokens"].sum() > 0

    def size(engines: int, ledgers: int) -> str:
        return NONE if not ledgers else PHYSICAL if engines == ledgers else ACCOUNTED

    def moves(kind: str) -> str:
        return NONE if kind not in run.moved else ACCOUNTED if kind in accounted else PHYSICAL

    swaps = any(kind in run.moved for kind in ("requests", "layers", "parts"))
    return {
        "system": SYSTEMS[ledger],
        "size of the device's KV memory": size(settings.num_blocks, run.ledger.num_blocks),
        "size of the host's KV memory": size(
            settings.swap_blocks, run.ledger.host_blocks if swaps else 0
        ),
        "moves of requests": moves("requests"),
        "moves of layers": moves("layers"),
        "moves of parts": moves("parts"),
        "relocations within the device": NONE
        if not run.relocated
        else PHYSICAL
        if physical
        else ACCOUNTED,
        # a hit that vLLM's cache does not have is drift
        "prefix hits": PHYSICAL if settings.prefix_caching and hits else NONE,
        "which cached texts are given up": ACCOUNTED if settings.keeps_texts else NONE,
    }


@pytest.mark.slow
@pytest.mark.parametrize("column", shown())
def test_the_table_says_what_the_engine_makes(column, profile):
    ledger, _, flag = column.partition(", ")
    assert flag in ("", "--physical")
    assert policy_class(POLICIES[ledger].partition(":")[0]).default_kv == ledger
    assert shown()[column] == worked_out(ledger, bool(flag), profile)


def test_the_table_has_every_layout_there_is(profile):
    """A ledger without a column for --physical has no layout."""
    for ledger in SYSTEMS:
        given = inputs(ledger, profile)
        if f"{ledger}, --physical" in shown():
            live_settings(given, given.policies[0], blank_settings(physical=True))
            continue
        with pytest.raises(SettingsError, match="--physical lays KV out as"):
            live_settings(given, given.policies[0], blank_settings(physical=True))


@pytest.mark.slow
def test_a_log_says_the_same_as_the_run(profile):
    """What `twinserve replay` shows is what the table was worked out from."""
    given = inputs("layerwise", profile)
    log = parse_log(run_policy(given, given.policies[0], decisions=True).decisions)
    assert log.moved.keys() == run_of("layerwise", profile).moved.keys()
