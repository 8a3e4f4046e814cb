"""`twinserve.limit`: the largest load at which servers keep their objectives."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Unpack

import pandas as pd

from twinserve.sim.api.html import Printed, printed
from twinserve.sim.api.plots import Plot
from twinserve.sim.api.settings import Settings, check_names, config_of, in_pythons_words
from twinserve.sim.api.sweeps import sources_of
from twinserve.sim.plan.limit import Limits as Found
from twinserve.sim.plan.limit import find_limits
from twinserve.sim.plan.limit_show import described, print_limits
from twinserve.sim.plan.waves import WAVE
from twinserve.sim.report.limit_part import limit_charts
from twinserve.sim.report.static import drawn
from twinserve.sim.results.files import plain
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep import combinations as of
from twinserve.sim.sweep.executors import at_work, check_count, local
from twinserve.sim.sweep.repeats import Repeat


@dataclass(frozen=True, eq=False, repr=False)
class Limits(Printed):
    """The limit of each server. `document` is limit.json (docs/plan.md)."""

    found: Found

    @cached_property
    def document(self) -> dict[str, Any]:
        return plain(described(self.found))

    @property
    def load(self) -> float | None:
        """Requests/s, or clients, of the first server; None: not even the least load."""
        return self.found.limits[0].load

    @property
    def table(self) -> pd.DataFrame:
        """A row a load that was run: setting, load, kept, answer, and its numbers."""
        rows = [
            {"setting": one["setting"]} | {k: v for k, v in point.items() if k != "attained"}
            for one in self.document["limits"]
            for point in one["points"]
        ]
        return pd.DataFrame(rows)

    def plot(self, what: str = "front") -> Plot:
        """what: a metric of the objectives (ttft, tpot, e2el) over load, or `front`: tokens of a
        GPU against those of a user. Raises SettingsError."""
        charts = {c.key.removeprefix("limit-"): c for c in limit_charts(self.document)}
        if what not in charts:
            raise SettingsError(f"no chart {what!r}; there are {', '.join(charts)}")
        return Plot(drawn(charts[what]), charts[what].alt)

    def __repr__(self) -> str:
        unit = self.document["unit"]
        ends = (f"{one['setting']}: {one['load']} {unit}" for one in self.document["limits"])
        return f"<Limits {', '.join(ends)}>"

    def __str__(self) -> str:
        return printed(partial(print_limits, self.found), soft_wrap=True, highlight=False)


@in_pythons_words
def limit(
    slo: str,
    *,
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] = (),
    concurrency: bool = False,
    seeds: int = 1,
    workers: int | None = 1,
    config: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] = lambda done, left: None,
    policy: str | None = None,
    trace: str | os.PathLike | None = None,
    **settings: Unpack[Settings],
) -> Limits:
    """Find the largest request rate, or number of clients, at which servers keep their objectives.

    slo       with percentiles: "ttft p90 < 1 s, tpot p90 < 50 ms"
    grid      as of `sweep`: a limit for each combination
    concurrency  look for clients at once, each sending its next request when the last has ended
    seeds     draws of the requests, judged together: the interval gets narrower
    workers   processes; 1: this one. A script that is run as a file needs
              `if __name__ == "__main__":` around a call with more. None: one for each core
    config    run.json whose settings are taken; those given here win
    progress  called with (runs so far, searches left)

    Other arguments are those of `simulate` (docs/plan.md). Raises TwinserveError.
    """
    check_count("seeds", seeds)
    check_count("workers", workers)
    fixed: dict[str, Any] = {**settings, "slo": slo}
    fixed |= {} if policy is None else {"policy": (policy,)}
    fixed |= {} if trace is None else {"trace": trace}
    check_names(fixed)
    runs = of.runs_of(
        of.crossed(sources_of(grid) if grid else []),
        Repeat(),
        lambda varied: config_of(None, config, {**fixed, **varied}),
    )
    with at_work(local(workers, WAVE)) as processes:
        configs = [(run.axes, run.config) for run in runs]
        return Limits(find_limits(configs, seeds, concurrency, processes, progress))
