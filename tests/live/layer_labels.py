"""Requests whose layers move, and a memory of labels to move them in: no engine needed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.live.followed import follow
from tests.live.pressure import pressed
from tests.live.twin_workloads import BLOCK, CROWDED
from twinserve.backends.live.engine.tiny_model import MODELS, config
from twinserve.backends.live.physical.layers import NULL_PAGES, LayerMemory
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.plan import StepPlan
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation

LAYERS = MODELS["deep"].layers
# A third of what the requests would take together.
SETTINGS = {**CROWDED, "requests": 16, "num_blocks": 12, "host_blocks": 60}
_LONGEST = 4096  # tokens; a request has fewer


def deep_profile(folder: Path) -> str:
    """A profile of the model `deep`, whose config.json is put into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config("deep")))
    return f"{folder}@h100"


def inputs_for(profile: str, policy: str = "layerkv:x=0", **changes) -> Inputs:
    settings = {**SETTINGS, "slo": "ttft=0.05,tpot=0.03", "profile": profile, **changes}
    return resolve(SimulationConfig(policy=(policy,), **settings))


def pressed_layers(profile: str, seed: int, policy: str, requests: int = 12) -> Inputs:
    """A workload drawn from `seed` that fights for memory, on a model of LAYERS layers."""
    inputs = pressed(seed, policy, requests)
    config = inputs.config.model_copy(update={"profile": profile, "host_time": "none"})
    return replace(inputs, config=config, hardware=resolve_hardware(config))


def expand(runs: list[tuple[int, int]]) -> np.ndarray:
    first, count = np.array(runs, np.int64).reshape(-1, 2).T
    return np.repeat(first + count - count.cumsum(), count) + np.arange(count.sum())


def label(row: int, layer: int, tokens: np.ndarray) -> np.ndarray:
    return (row * LAYERS + layer) * _LONGEST + tokens


class Labels:
    """A memory in which each slot of a page or of a host cell holds the row, layer and position of
    a token. Carries out what a worker is told, in vLLM's order: copies; then layer by layer new
    tokens are written, what is away comes, attention reads, what is new leaves. Staging pages are
    emptied after each layer, and pages that nobody holds after each step."""

    def __init__(self, ledger: LayerwiseLedger, staging: int = 1000) -> None:
        self.ledger = ledger
        self.memory = LayerMemory(ledger, staging)
        self.first_staging = (NULL_PAGES + ledger.pool.num_cells) * BLOCK
        self.device = np.full(self.first_staging + staging * BLOCK, -1)
        self.host = np.full(ledger.host_blocks * LAYERS * BLOCK, -1)

    def copy_out(self, orders) -> None:
        self.host[expand(orders.out.rows)] = self.device[expand(orders.out.slots)]

    def copy_back(self, orders) -> None:
        self.device[expand(orders.back.slots)] = self.host[expand(orders.back.rows)]

    def step(self, plan: StepPlan) -> None:
        computed = self.ledger.table.computed_tokens[plan.rows].tolist()
        layout = self.memory.step(plan)
        for stage in layout.stages:
            self.copy_out(stage)
            self.copy_back(stage)
        grants = list(zip(plan.rows.tolist(), computed, plan.tokens.tolist(), strict=True))
        for layer in range(LAYERS):
            places = {row: self.places(layout, row, layer, n + new) for row, n, new in grants}
            taken = np.concatenate([*places.values(), np.zeros(0, np.int64)])
            assert len(np.unique(taken)) == len(taken), "two requests of one step in one slot"
            assert not len(taken) or taken.min() >= BLOCK, "vLLM's null page is written to"
            for row, n, _ in grants:
                self.device[places[row][n:]] = label(row, layer, np.arange(n, len(places[row])))
            if layer in layout.streams:
                self.copy_back(layout.streams[layer])
            for row, where in places.items():
                expected = label(row, layer, np.arange(len(where)))
                assert np.array_equal(self.device[where], expected), (row, layer)
            if layer in layout.streams:
                self.copy_out(layout.streams[layer])
            self.device[self.first_staging :] = -1
        self.spoil()

    def places(self, layout, row: int, layer: int, tokens: int) -> np.ndarray:
        positions = np.arange(tokens)
        table = layout.tables[self.ledger.table.ids[row]][layer].astype(np.int64)
        return table[positions // BLOCK] * BLOCK + positions % BLOCK

    def spoil(self) -> None:
        held = [self.memory.held(row)[0].ravel() for row in self.memory.rows()]
        pages = np.concatenate([*held, np.zeros(0, np.int64)])
        kept = np.zeros(len(self.device) // BLOCK, bool)
        kept[pages[pages >= 0]] = True
        self.device.reshape(-1, BLOCK)[~kept] = -1


def carried_out(inputs: Inputs) -> tuple[Simulation, Labels]:
    """A simulation each of whose plans is carried out in a memory of labels."""
    simulation = Simulation(inputs, inputs.policies[0])
    (engine,) = simulation.engines
    engine.backend.fast = False
    labels = Labels(engine.core.ledger)
    follow(engine.backend, labels)
    simulation.run()
    return simulation, labels
