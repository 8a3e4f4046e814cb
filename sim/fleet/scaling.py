"""Autoscalers (docs/fleet.md): small objects that say how many replicas there shall be; llm-d's,
Dynamo's, one that knows the future; and what asks them at their times."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options
from twinserve.policies.names import built
from twinserve.profiles.composition import StepComposition, StepTimeModel, isolated_prefill_seconds
from twinserve.sim.engine.clock import PLANS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.results.recorder import Load

ScalerOptions = TypeVar("ScalerOptions", bound="Ticking")


class Ticking(Options):
    """every  seconds from one decision to the next"""

    every: float = Field(30.0, ge=0.1, le=86_400)


@dataclass(frozen=True)
class Demand:
    """Work of the requests that arrive in an interval, in seconds of one replica, and their mean
    prompt in tokens."""

    seconds: Callable[[float, float], float]
    prompt_tokens: Callable[[float, float], float]


@dataclass(frozen=True)
class Seen:
    """What an autoscaler sees.

    now       seconds
    loads     of each replica that takes requests; its KV memory is that of `block_tokens` a block
    starting  replicas that start up
    models    of those replicas' step times
    start_up_s  how long a start takes
    """

    now: float
    loads: list[Load]
    starting: int
    models: list[StepTimeModel]
    block_tokens: int
    start_up_s: float
    demand: Demand

    @property
    def replicas(self) -> int:
        return len(self.loads) + self.starting


class Scaler(ABC, Generic[ScalerOptions]):
    """Decides how many replicas there should be. It may remember what it saw."""

    name: ClassVar[str]
    Options: type[ScalerOptions] = Ticking  # type: ignore[assignment]

    def __init__(self, options: ScalerOptions | None = None) -> None:
        self.options: ScalerOptions = options or self.Options()
        self.setup()

    def setup(self) -> None:
        """Create the state of a new scaler. Its options are already set."""

    @abstractmethod
    def wants(self, seen: Seen) -> int:
        """Return how many replicas there should be, those that start up included."""


class Fixed(Scaler[Ticking]):
    """Keep the present number of replicas."""

    name = "fixed"

    def wants(self, seen: Seen) -> int:
        return seen.replicas


class VariantOptions(Ticking):
    """kv, queue  a replica with so large a share of its KV memory in use, or so many requests
                waiting, is saturated
    spare_kv, spare_queue  one more where unsaturated replicas have less than this to spare, on the
                mean
    window    seconds of which the largest values count
    settle    seconds for which fewer must have been wanted
    """

    every: float = Field(15.0, ge=0.1, le=86_400)
    kv: float = Field(0.8, gt=0, le=1)
    queue: float = Field(5.0, gt=0)
    spare_kv: float = Field(0.1, ge=0, le=1)
    spare_queue: float = Field(3.0, ge=0)
    window: float = Field(60.0, ge=0, le=86_400)
    settle: float = Field(300.0, ge=0, le=86_400)


class WorkloadVariant(Scaler[VariantOptions]):
    """llm-d's workload variant autoscaler, its analyser of saturation. One replica more or less at
    a time, and none while one starts.

    Source: llm-d-workload-variant-autoscaler 0.7, `deploy/configmap-saturation-scaling.yaml` for
    the thresholds. How often it decides is ours.
    """

    name = "wva"
    Options = VariantOptions

    def setup(self) -> None:
        self._seen: deque[tuple[float, list[tuple[float, float]]]] = deque()
        self._more_s = -math.inf  # when fewer were last not wanted

    def wants(self, seen: Seen) -> int:
        options, n = self.options, len(seen.loads)
        self._seen.append((seen.now, [(_kv(load), float(load.waiting)) for load in seen.loads]))
        while self._seen[0][0] < seen.now - options.window:
            self._seen.popleft()
        same = [loads for _, loads in self._seen if len(loads) == n]
        largest = np.array(same).max(axis=0) if n else np.zeros((0, 2))
        if seen.starting or not n:
            self._more_s = seen.now
            return max(seen.replicas, 1)
        limits = np.array([options.kv, options.queue])
        calm = largest[(largest < limits).all(axis=1)]
        spare = np.array([options.spare_kv, options.spare_queue])
        if not len(calm) or ((limits - calm).mean(axis=0) < spare).any():
            self._more_s = seen.now
            return n + 1
        # what the others would have, if this one's went to them
        fewer = n > 1 and ((limits - largest.sum(axis=0) / (n - 1)) >= spare).all()
        if not fewer or len(calm) < n:
            self._more_s = seen.now
            return n
        if seen.now - self._more_s < options.settle:
            return n
        self._more_s = seen.now
        return n - 1


class PlannerOptions(Ticking):
    """ttft, itl  objectives, seconds
    down      fewer where every replica is below this share of both
    consolidate  reckon with what the rest would have to take over, as since dynamo#9294
    long      seconds between two looks at throughput, which set the least number; 0: none
    busy      share of a replica that throughput may fill
    """

    every: float = Field(5.0, ge=0.1, le=86_400)
    ttft: float = Field(0.4, gt=0)
    itl: float = Field(0.2, gt=0)
    down: float = Field(0.8, ge=0, le=1)
    consolidate: bool = True
    long: float = Field(180.0, ge=0, le=86_400)
    busy: float = Field(1.0, gt=0, le=1)


class DynamoPlanner(Scaler[PlannerOptions]):
    """Dynamo's planner in its SLA mode, for replicas that prefill and decode.

    Every `long` seconds throughput sets a floor: the replicas that the work of the last interval
    would keep busy. Every `every` seconds load moves the number by one, unless a replica starts. It
    goes up if all replicas are predicted to break an objective, down if all are below `down` of
    both. Predictions: TTFT of a further mean prompt behind the queue; ITL of a step with all
    requests.

    Source: Dynamo, planner guide and design (two loops, intervals, sensitivity 80 %). After its
    pull request 9294, with N replicas less one the queue and the KV in use grow by N / (N - 1). The
    predictions are by the step-time model; Dynamo fits one to what it observes.
    """

    name = "dynamo"
    Options = PlannerOptions

    def setup(self) -> None:
        self._floor, self._next_s = 1, 0.0
        self._prompt = 0.0

    def wants(self, seen: Seen) -> int:
        options, n = self.options, len(seen.loads)
        begin_s = max(0.0, seen.now - (options.long or 180.0))
        self._prompt = seen.demand.prompt_tokens(begin_s, seen.now) or self._prompt
        if options.long and seen.now >= self._next_s and seen.now > 0:
            self._next_s = seen.now + options.long
            work = seen.demand.seconds(begin_s, seen.now) / (seen.now - begin_s)
            self._floor = max(1, math.ceil(work / options.busy))
        if seen.starting or not n:
            return max(seen.replicas, self._floor)
        return max(self._by_load(seen, n), self._floor)

    def _by_load(self, seen: Seen, n: int) -> int:
        options = self.options
        pairs = list(zip(seen.loads, seen.models, strict=True))
        now = [self._predicted(load, model, seen.block_tokens, 1.0) for load, model in pairs]
        if all(ttft > options.ttft or itl > options.itl for ttft, itl in now):
            return n + 1
        if n == 1:
            return n
        grows = n / (n - 1) if options.consolidate else 1.0
        then = [self._predicted(load, model, seen.block_tokens, grows) for load, model in pairs]
        low = all(
            ttft < options.down * options.ttft and itl < options.down * options.itl
            for ttft, itl in then
        )
        if options.consolidate:
            low &= all(_kv(load) * grows < options.down for load in seen.loads)
        return n - 1 if low else n

    def _predicted(
        self, load: Load, model: StepTimeModel, block_tokens: int, grows: float
    ) -> tuple[float, float]:
        """TTFT and ITL, seconds, with `grows` times the queue, the batch and the KV."""
        queued = round((1 + load.waiting * grows) * self._prompt)
        running = math.ceil(load.running * grows)
        context = round(load.used * block_tokens * grows)
        itl = 0.0
        if running:
            work = StepComposition(running, context, -(-context // running))
            itl = model.step_seconds(work)
        ttft = isolated_prefill_seconds(model, queued, _CHUNK) if queued else 0.0
        return ttft + itl, itl


_CHUNK = 8192  # tokens of a prompt in a step, for predictions


class PerfectOptions(Ticking):
    """busy  share of a replica that work may fill"""

    every: float = Field(15.0, ge=0.1, le=86_400)
    busy: float = Field(0.8, gt=0, le=1)


class Perfect(Scaler[PerfectOptions]):
    """Knows all requests beforehand: as many replicas as the work that arrives from now until a
    replica that starts now could have helped for one interval. What others are measured by."""

    name = "perfect"
    Options = PerfectOptions

    def wants(self, seen: Seen) -> int:
        every, most = self.options.every, 0.0
        begins = np.arange(seen.now, seen.now + seen.start_up_s + every, every)
        for begin_s in begins.tolist():
            most = max(most, seen.demand.seconds(begin_s, begin_s + every) / every)
        return max(1, math.ceil(most / self.options.busy))


def _kv(load: Load) -> float:
    """Share of KV memory that requests hold."""
    return load.used / load.total if load.total else 0.0


SCALERS: dict[str, type[Scaler]] = {
    kind.name: kind for kind in (Fixed, WorkloadVariant, DynamoPlanner, Perfect)
}


_STUCK = 1000  # decisions in a row while nothing happens and requests wait


@dataclass(frozen=True)
class Bounds:
    """least, most  replicas
    start_up_s   from a start to taking requests
    grace_s      after which a drained replica's requests are taken from it; None: never
    """

    least: int
    most: int
    start_up_s: float
    grace_s: float | None = None


class Autoscaler:
    """start  called with seconds: a further replica starts up, and takes requests then
    over   whether all requests have been sent

    Of several replicas the latest goes first: one that starts up before one that serves.
    """

    def __init__(
        self,
        clock: Clock,
        fleet: Fleet,
        scaler: Scaler,
        bounds: Bounds,
        demand: Demand,
        start: Callable[[float], Replica],
        over: Callable[[], bool],
    ) -> None:
        self.clock, self.fleet, self.scaler, self.bounds = clock, fleet, scaler, bounds
        self.demand = demand
        self._start, self._over = start, over
        clock.process(self._life())

    def _life(self):
        idle, tick = 0, 0
        while True:
            tick += 1
            self.clock.idle_events += 1
            # after what arrives and ends at this instant, before any replica plans
            yield self.clock.at(tick * self.scaler.options.every, PLANS - 2)
            self.clock.idle_events -= 1
            idle = idle + 1 if self.clock.empty else 0
            if idle > _STUCK or not self.fleet.active and self._over():
                return
            self._decide()

    def _of(self, *lives: Life) -> list[Replica]:
        return [replica for replica in self.fleet.replicas if replica.life in lives]

    def _decide(self) -> None:
        up, starting = self._of(Life.UP), self._of(Life.WARMING)
        now = self.clock.now
        seen = Seen(
            now,
            [replica.engine.load(now) for replica in up],
            len(starting),
            [replica.model for replica in up if replica.model is not None],
            up[0].engine.core.ledger.block_tokens if up else 1,
            self.bounds.start_up_s,
            self.demand,
        )
        wanted = min(max(self.scaler.wants(seen), self.bounds.least), self.bounds.most)
        change = wanted - seen.replicas
        if not change:
            return
        for _ in range(change):
            self._start(self.bounds.start_up_s)
        for replica in [*reversed(starting), *reversed(up)][: max(-change, 0)]:
            self.fleet.drain(replica.index, self.bounds.grace_s)


def parse_scaler(text: str) -> Scaler:
    """Read `wva`, or `dynamo:ttft=0.3`. Raises RegistryError."""
    return built("autoscaler {}", "autoscaler", SCALERS, text)
