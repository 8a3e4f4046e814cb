"""One measured closed loop, simulated: with either form of step times, and with clients that start
all at once or one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from twinserve.experiments.silicon.points import REQUESTS_EACH, Point, read_points
from twinserve.policies.registry import parse_policy
from twinserve.profiles.profile import Profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import Choice, StepTimes, choose
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Sources, resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import Provenance, Workload

STARTS = ("all at once", "staggered")
FORMS: tuple[StepTimes, ...] = ("operators", "roofline")
FRONT_END = "vllm"  # clients measured, over HTTP

_chosen = lru_cache(maxsize=64)(choose)


def settings(point: Point, form: StepTimes) -> SimulationConfig:
    """The engine of a point as its server was started, as far as that is known."""
    return SimulationConfig(
        policy=("vllm",),
        trace=point.name,
        profile=point.profile,
        step_times=form,
        front_end=FRONT_END,
        async_scheduling=point.asynchronous,
        max_num_seqs=point.concurrency if point.client.limited else None,
        max_num_batched_tokens=point.client.budget,
        kv_cache_dtype="fp8" if point.kv_is_fp8 else "auto",
        prefix_caching=False,
        slo="none",
    )


def workload(point: Point, start: str, seed: int = 0, rounds: int = REQUESTS_EACH) -> Workload:
    """Its requests: all wait from the beginning, or the first ones come one by one over the time
    that a request took."""
    n = rounds * point.concurrency
    rng = np.random.default_rng(seed)
    lengths = [_lengths(of, point.client.shortest, n, rng) for of in (point.input, point.output)]
    arrival = np.zeros(n)
    if start == "staggered":
        whole = point.ttft_s + point.tpot_s * point.output
        arrival = np.minimum(np.arange(n), point.concurrency - 1) * (whole / point.concurrency)
    return Workload.build(
        arrival, *lengths, concurrency=point.concurrency, provenance=Provenance(point.name)
    )


def _lengths(stated: int, shortest: float, n: int, rng: np.random.Generator) -> np.ndarray:
    least = max(int(stated * shortest), 2)  # an output of one token has no TPOT
    return rng.integers(min(least, stated), stated + 1, n)


def loop(
    point: str,
    data: str,
    form: StepTimes,
    start: str,
    seed: int,
    rounds: int = REQUESTS_EACH,
    fewer: int = 1,
) -> dict[str, Any]:
    """`simulate` of the point with this id, for a grid. data: version of the distribution that has
    the points, so that rows of another one are not taken for its own; rounds, fewer: as of
    `simulate`. A form that has no step times of the engine gives a row that says why."""
    of_it = _points_by_name()[point]
    try:
        return {"data": data, **simulate(of_it, form, start, seed, rounds, fewer)}
    except ProfileError as error:
        return {"data": data, **_named(of_it, form, start), "why": str(error)}


@cache
def _points_by_name() -> dict[str, Point]:
    return {point.name: point for point in read_points()}


def simulate(
    point: Point,
    form: StepTimes,
    start: str,
    seed: int = 0,
    rounds: int = REQUESTS_EACH,
    fewer: int = 1,
) -> dict[str, Any]:
    """Times of the simulated loop and measured ones (s), and relative errors. rounds: requests for
    each that may be under way; fewer: so many times fewer are under way than stated. ProfileError
    if the form has no step times of this engine."""
    run = replace(point, concurrency=max(point.concurrency // fewer, 1))
    config = settings(run, form)
    hardware = resolve_hardware(config, Sources(profile=_choice))
    spec = parse_policy("vllm")
    load = workload(run, start, seed, rounds)
    simulation = Simulation(Inputs(config, load, hardware, (spec,), ()), spec)
    simulation.run()
    named = _named(point, form, start)
    return {**named, **_errors(run, start, hardware.profile, simulation.rows())}


def _choice(name: str, form: StepTimes) -> Choice:
    return _chosen(name, form)


def _named(point: Point, form: str, start: str) -> dict[str, Any]:
    """The point as it was published, and how it is simulated."""
    names = ("model", "gpu", "tp", "ep", "input", "output", "concurrency")
    return {
        "point": point.name,
        **{name: getattr(point, name) for name in names},
        "scheduling": "asynchronous" if point.asynchronous else "synchronous",
        "form": form,
        "start": start,
    }


def _errors(run: Point, start: str, profile: Profile, rows: RunRows) -> dict[str, Any]:
    """Staggered: of what came after the first ones and not among the last, when all are under
    way."""
    done = rows.requests.sort_values("arrival_s", kind="stable")
    if start == "staggered":
        done = done.iloc[run.concurrency : -run.concurrency]
    ttft = done.first_token_s - done.arrival_s  # as clients saw it
    tpot = (done.last_token_s - done.first_token_s) / (done.output_tokens - 1)
    ours = {"TTFT": float(ttft.mean()), "TPOT": float(tpot.mean())}
    real = {"TTFT": run.ttft_s, "TPOT": run.tpot_s}
    tokens = float(done.output_tokens.mean())
    for times in (ours, real):  # Little's law: what a request takes, and how many there are
        times["throughput"] = (
            run.concurrency * tokens / (times["TTFT"] + times["TPOT"] * (tokens - 1))
        )
    return {
        "precision": profile.llm.weights.name if profile.llm.weights else "bf16",
        "under_way": run.concurrency,
        "preemptions": int(rows.requests.recomputes.sum()),
        "median_ttft_s": float(ttft.median()),
        **{f"ours_{name}": value for name, value in ours.items()},
        **{f"real_{name}": value for name, value in real.items()},
        **{name: ours[name] / real[name] - 1.0 for name in ours},
    }
