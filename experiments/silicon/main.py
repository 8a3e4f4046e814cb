"""The simulator against closed loops that others measured: `twinserve study silicon`.

The points ship with aiconfigurator-core. Each is simulated with both forms of step times, with
clients that start all at once and staggered. docs/validation.md has the results and what they mean.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.measured.points import DATA, Loop, read_loops
from twinserve.experiments.measured.scores import scores, sections
from twinserve.experiments.study import points as grid
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.output import table_lines
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.policies.registry import parse_policy
from twinserve.profiles.profile import Profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import StepTimes, choose
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Sources, resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import Provenance, Workload

# One measured closed loop, simulated: with either form of step times, and with clients that start
# all at once or one by one.
STARTS = ("all at once", "staggered")
FORMS: tuple[StepTimes, ...] = ("operators", "roofline")
FRONT_END = "vllm"  # clients measured, over HTTP
REQUESTS_EACH = 10  # requests for each that may be under way, as of InferenceMAX's README
COLUMNS = {name: name for name in ("model", "gpu", "tp", "ep")}
COLUMNS |= {"input": "isl", "output": "osl", "concurrency": "concurrency"}

_chosen = lru_cache(maxsize=64)(choose)


def settings(point: Loop, form: StepTimes) -> SimulationConfig:
    """The engine of a point as its server was started, as far as that is known."""
    return SimulationConfig(
        policy=("vllm",),
        trace=point.name,
        profile=point.profile,
        step_times=form,
        front_end=FRONT_END,
        async_scheduling=point.ahead,
        max_num_seqs=point.concurrency if point.limited else None,
        max_num_batched_tokens=point.budget,
        kv_cache_dtype="fp8" if point.fp8_kv else "auto",
        prefix_caching=False,
        slo="none",
    )


def workload(point: Loop, start: str, seed: int = 0, rounds: int = REQUESTS_EACH) -> Workload:
    """Its requests: all wait from the beginning, or the first ones come one by one over the time
    that a request took."""
    n = rounds * point.concurrency
    rng = np.random.default_rng(seed)
    lengths = [_lengths(of, point.shortest, n, rng) for of in (point.isl, point.osl)]
    arrival = np.zeros(n)
    if start == "staggered":
        took = point.ttft_s + point.seconds * point.osl
        arrival = np.minimum(np.arange(n), point.concurrency - 1) * (took / point.concurrency)
    return Workload.build(
        arrival, *lengths, concurrency=point.concurrency, provenance=Provenance(point.name)
    )


def _lengths(stated: int, shortest: float, n: int, rng: np.random.Generator) -> np.ndarray:
    least = max(int(stated * shortest), 2)  # an output of one token has no TPOT
    return rng.integers(min(least, stated), stated + 1, n)


@cache
def points_by_name() -> dict[str, Loop]:
    return {point.name: point for point in read_loops()}


def loop(
    point: str,
    data: str,
    form: StepTimes,
    start: str,
    seed: int = 0,
    rounds: int = REQUESTS_EACH,
    fewer: int = 1,
) -> dict[str, Any]:
    """The point with this id: times of the simulated loop and measured ones (s), and relative
    errors; `why` instead, if the form has no step times of this engine.

    data    version of the distribution that has the points: rows of another one are not its own
    rounds  requests for each that may be under way
    fewer   so many times fewer are under way than stated
    """
    of_it = points_by_name()[point]
    about = {name: getattr(of_it, attribute) for name, attribute in COLUMNS.items()}
    about |= {"scheduling": "asynchronous" if of_it.ahead else "synchronous"}
    named = {"data": data, "point": point, **about, "form": form, "start": start}
    run = replace(of_it, concurrency=max(of_it.concurrency // fewer, 1))
    config, spec = settings(run, form), parse_policy("vllm")
    try:
        hardware = resolve_hardware(config, Sources(profile=_chosen))
    except ProfileError as error:
        return named | {"why": str(error)}
    load = workload(run, start, seed, rounds)
    simulation = Simulation(Inputs(config, load, hardware, (spec,), ()), spec)
    simulation.run()
    return named | _errors(run, start, hardware.profile, simulation.rows())


def _errors(run: Loop, start: str, profile: Profile, rows: RunRows) -> dict[str, Any]:
    """Staggered: of what came after the first ones and not among the last, when all are under
    way."""
    done = rows.requests.sort_values("arrival_s", kind="stable")
    if start == "staggered":
        done = done.iloc[run.concurrency : -run.concurrency]
    ttft = done.first_token_s - done.arrival_s  # as clients saw it
    tpot = (done.last_token_s - done.first_token_s) / (done.output_tokens - 1)
    ours = {"TTFT": float(ttft.mean()), "TPOT": float(tpot.mean())}
    real = {"TTFT": run.ttft_s, "TPOT": run.seconds}
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


METRICS = ("TTFT", "TPOT", "throughput")
ENGINE = ("model", "gpu", "precision")
# of a loop: what it was, how it was simulated, and its errors
ERRORS = [*ENGINE, "tp", "ep", "input", "output", "concurrency", "form", "start", *METRICS]
KINDS = texts(__file__, "data.yaml").KINDS


def points(scale: Scale) -> list[grid.Point]:
    """Every measured loop; of the smallest grid each 90th, with few requests."""
    few = {"rounds": 3, "fewer": 8} if scale.quick else {}
    found = []
    for point in list(points_by_name().values())[:: 90 if scale.quick else 1]:
        work = {"point": point.name, "data": metadata.version(DATA), **few}
        named = {name: getattr(point, name) for name in ("model", "gpu", "concurrency")}
        for form, start, seed in product(FORMS, STARTS, scale.seeds):
            settings = {"form": form, "start": start, "seed": seed}
            found.append(grid.Point({**named, **settings}, work | settings))
    return found


def errors(loops: pd.DataFrame) -> pd.DataFrame:
    """Errors of every loop that has step times, to four digits."""
    good = loops[loops.why.isna()] if "why" in loops else loops
    found = good[ERRORS].sort_values(ERRORS)
    return found.assign(**{name: found[name].map(_short) for name in METRICS})


def _short(error: float) -> float:
    return float(f"{error:.4g}")


def table(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Lines of a Markdown table of `rows` (columns `ERRORS`): one for each of `keys` and start.
    "mean (size)" of each error, operators and roofline side by side."""
    by = [*keys, "start"]
    long = rows.melt([*by, "form"], [*METRICS], "metric", "off")
    found = scores(long, [*by, "metric", "form"])
    said = found["mean"].map("{:+.0f}".format) + found["size"].map(" ({:.0f}) %".format)
    columns = list(product(METRICS, FORMS))
    cells = found.assign(said=said).pivot(index=by, columns=["metric", "form"], values="said")
    points = found.groupby(by).points.max()
    lines = [
        [*key[:-1], points[key], key[-1], *row]
        for key, row in zip(
            cells.index, cells.reindex(columns=columns).fillna("-").to_numpy(), strict=True
        )
    ]
    return table_lines([*keys, "points", "start", *map(": ".join, columns)], lines)


def by_kind(rows: pd.DataFrame) -> str:
    """Tables of `KINDS`."""
    return sections({kind: table(rows, keys) for kind, keys in KINDS.items()})


STUDY = Study(
    "silicon",
    "",
    [Figure("errors", "Every measured loop", points, loop, errors, text=by_kind)],
    seeds=1,
    intro="Relative errors of simulated closed loops: the mean, and in brackets the mean size.",
)
