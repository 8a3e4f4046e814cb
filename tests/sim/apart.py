"""Fleets with prefill apart from decode, in trouble: clients leave, replicas of both roles come,
drain and fail at random."""

from collections import Counter

import numpy as np
import pytest

from tests.sim.troubled import Audited, conserving, trouble
from twinserve.policies.registry import PolicySpec, parse_policy
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.connector import Connector, Push, parse_rule
from twinserve.sim.fleet.replica import Role
from twinserve.sim.results.columns import TTFT_PARTS
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.pools import HandOver
from twinserve.sim.setup.replicas import Description
from twinserve.traces.workload import Workload

SLOW_NETWORK = (2e8, 1e-3)  # bytes/s, seconds: a prompt takes up to a tenth of a second
VLLM = parse_policy("vllm")


def hand_over(
    rule: str = "none",
    lease_s: float = 30.0,
    recompute: bool = False,
    router: str = "least-requests",
    push: Push | None = None,
) -> HandOver:
    return HandOver(Connector(lease_s, recompute, parse_rule(rule), push), router)


class Apart(Audited):
    """`prefill` and `decode` replicas."""

    def __init__(
        self,
        inputs: Inputs,
        prefill: int = 1,
        decode: int = 1,
        prefill_policy: PolicySpec = VLLM,
        network: tuple[float, float] = SLOW_NETWORK,
        **more,
    ) -> None:
        hardware = inputs.hardware
        self.kinds = {
            Role.PREFILL: Description(hardware, prefill_policy, Role.PREFILL, network=network),
            Role.DECODE: Description(hardware, VLLM, Role.DECODE, network=network),
        }
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        super().__init__(inputs, VLLM, made_of=[self.kinds[role] for role in roles], **more)


class Troubled(Apart):
    """troubles  how many things happen"""

    def __init__(self, inputs: Inputs, seed: int, troubles: int, **more) -> None:
        self.happened: Counter[str] = Counter()
        super().__init__(inputs, **more)
        rng = np.random.default_rng([seed, 12])
        self.clock.process(self._trouble(np.sort(rng.exponential(0.25, troubles)), rng))

    def _trouble(self, times, rng):
        for time in times.tolist():
            yield self.clock.at(time, BEFORE_STEPS)
            what = str(rng.choice(["leave", "leave", "leave", "add", "drain", "grace", "fail"]))
            which, delay, decodes = rng.random(), rng.exponential(0.1), rng.random() < 0.5
            fleet = self.fleet
            if what == "add":
                kind = self.kinds[Role.DECODE if decodes else Role.PREFILL]
                self.add(kind, delay * (which < 0.5))
            elif not trouble(fleet, what, which, delay):
                continue
            self.happened[what] += 1


def inputs_of(
    workload: Workload, connector: HandOver, config: SimulationConfig = CROWDED, **settings
) -> Inputs:
    config = config.model_copy(update=settings)
    hardware = resolve_hardware(config)
    return Inputs(config, workload, hardware, (VLLM,), (), hand_over=connector)


def troubled(
    seed: int, troubles: int, connector: HandOver, *, asynchronous: bool = False, **more
) -> tuple[Troubled, RunRows]:
    """A run as `conserving` makes it. Both sides have the same kind of router."""
    settings = {"exact": True, "async_scheduling": asynchronous, "router": connector.router}
    inputs = inputs_of(crowd(seed), connector, **settings)
    run, rows = conserving(lambda given: Troubled(given, seed, troubles, **more), inputs)
    handed_over_once(run, rows)
    parts_add_up(rows)
    return run, rows


def handed_over_once(run: Apart, rows: RunRows) -> None:
    """What prefill replicas kept was given back once, or lost with them; what was charged at each
    port has landed or was lost; who is fetched from still has it."""
    fleet, stays = run.fleet, rows.placements
    handed = stays["outcome"] == "handed_over"
    assert (stays.loc[handed, "role"] == "prefill").all()
    assert (stays.loc[stays["role"] == "prefill", "output_tokens"] == 0).all()
    failed = np.array([replica.failed for replica in fleet.replicas])[stays["replica"]]
    assert stays.loc[handed & ~failed, "released_s"].notna().all()
    kept = stays["released_s"].notna()
    assert (stays.loc[kept, "released_s"] >= stays.loc[kept, "ended_s"] - 1e-12).all()
    for replica in fleet.replicas:
        first_steps = replica.engine.backend._fetched  # that are still to come
        assert replica.failed or not first_steps
        for port in (replica.network.out, replica.network.into):
            port.settle(np.inf)
            assert port.queued_bytes == port.landed_bytes + port.lost_bytes
    sent = sum(replica.network.out.queued_bytes for replica in fleet.replicas)
    came = sum(replica.network.into.queued_bytes for replica in fleet.replicas)
    assert sent == came
    assert not fleet.active


def parts_add_up(rows: RunRows) -> None:
    requests = rows.requests
    ttft = requests["first_token_s"] - requests["arrival_s"]
    parts = requests[[f"{part}_s" for part in TTFT_PARTS]].to_numpy()
    has_one = ttft.notna().to_numpy()
    assert np.isnan(parts[~has_one]).all() and (parts[has_one] >= 0).all()
    assert parts[has_one].sum(axis=1) == pytest.approx(ttft[has_one].to_numpy(), abs=1e-9)
