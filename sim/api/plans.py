"""`twinserve.plan`: which GPUs, and how many, for a trace and its objectives."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from twinserve.sim.api.html import Printed, printed
from twinserve.sim.api.plots import Plot
from twinserve.sim.api.settings import EngineSettings, check_names, in_pythons_words, several
from twinserve.sim.plan.candidates import GPUS, TP
from twinserve.sim.plan.document import described
from twinserve.sim.plan.planner import Plan as Found
from twinserve.sim.plan.planner import make_plan
from twinserve.sim.plan.prices import Prices, load_prices
from twinserve.sim.plan.question import LEAD_S, MOST_GPUS, PEAK_S, question_of
from twinserve.sim.plan.show import print_plan
from twinserve.sim.plan.waves import WAVE
from twinserve.sim.report.plan_part import plan_charts
from twinserve.sim.report.static import drawn
from twinserve.sim.results.files import plain
from twinserve.sim.setup.config import DEFAULT_ROUTER, SettingsError
from twinserve.sim.sweep.executors import at_work, check_count, local

_SHOWN = (
    *("gpu", "tp", "policy", "router", "status", "replicas", "gpus", "usd_per_hour"),
    *("usd_per_million_tokens", "answer", "binds", "reason"),
)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Printed):
    """Candidates, the cheapest that is enough first. `document` is plan.json (docs/plan.md)."""

    found: Found
    prices: Prices

    @cached_property
    def document(self) -> dict[str, Any]:
        return plain(described(self.found, self.prices))

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the first row of `document` that is enough; None if nothing is."""
        rows = [row for row in self.document["rows"] if row["status"] == "enough"]
        return rows[0] if rows else None

    @property
    def table(self) -> pd.DataFrame:
        """A row a candidate, in their order."""
        rows = []
        for row in self.document["rows"]:
            answer = None if row["sized"] is None else row["sized"]["answer"]
            rows.append(row | {"answer": answer, "binds": ", ".join(row["binds"])})
        return pd.DataFrame(rows, columns=list(_SHOWN))

    def plot(self) -> Plot:
        """Draw cost against slack. Raises SettingsError if nothing is enough."""
        for chart in plan_charts(self.document):
            if chart.key == "plan-front":
                return Plot(drawn(chart), chart.alt)
        raise SettingsError("nothing in this plan keeps the objectives: there is no front to draw")

    def __repr__(self) -> str:
        best = self.best
        if best is None:
            return f"<Plan for {self.found.question.model}: nothing is enough>"
        cost = best["usd_per_hour"]
        money = "" if cost is None else f", ${cost:,.2f} an hour"
        size = f"{best['replicas']} x {best['gpu']} tp{best['tp']}"
        return f"<Plan for {self.found.question.model}: {size}{money}, {best['sized']['answer']}>"

    def __str__(self) -> str:
        show = partial(print_plan, self.found, self.prices)
        return printed(show, soft_wrap=True, highlight=False)


@in_pythons_words
def plan(
    model: str | os.PathLike | None = None,
    trace: str | os.PathLike | Sequence[str | os.PathLike] = (),
    slo: str = "",
    *,
    from_vllm: str | os.PathLike | None = None,
    gpus: Sequence[str] = GPUS,
    tp: Sequence[int] = TP,
    policy: str | Sequence[str] = "vllm",
    router: str | Sequence[str] = DEFAULT_ROUTER,
    prices: str | os.PathLike | None = None,
    grow: float = 1.0,
    rate: float | None = None,
    peak: float = PEAK_S,
    lead: float = LEAD_S,
    seeds: int = 1,
    most_gpus: int = MOST_GPUS,
    pool: int = 0,
    survive: int = 0,
    on_failure: str = "error",
    detection: float = 0.0,
    prefill_decode: bool = False,
    all_sizes: bool = False,
    workers: int | None = 1,
    progress: Callable[[int, int], None] = lambda trials, left: None,
    **engine: Unpack[EngineSettings],
) -> Plan:
    """Find the cheapest GPUs that meet objectives at the peak of a recorded trace.

    from_vllm  as of `simulate`: model and limits of that server, if it states them
    slo       with percentiles: "ttft p90 < 1 s, tpot p90 < 50 ms"
    gpus, tp  kinds of GPUs, and tensor-parallel degrees, to choose from
    prices    CSV with columns gpu and usd_per_hour, instead of the table that ships
    peak, lead  seconds that are judged, and seconds before them that fill the engines
    seeds     draws of the peak for each sized row
    rate      requests/s of a generated trace
    pool      offline requests in each batch of a closed loop, for step 2; 0: none
    survive   replicas that fail as the peak begins, and stay down; on_failure, detection: what
              becomes of their requests ("error", "retry", "migrate"), and seconds until it is known
    prefill_decode  for each row also try prefill apart from decode on the same GPUs
    workers   processes; 1: this one. A script that is run as a file needs
              `if __name__ == "__main__":` around a call with more. None: one for each core
    progress  called with (trials so far, candidates left)
    engine    format, columns, step_times, front_end, kv_cache_dtype, gpu_memory_utilization,
              engine_version, enforce_eager, max_model_len, max_num_seqs, max_num_batched_tokens,
              async_scheduling: as of `simulate`

    Everything else as `twinserve plan` has it (docs/plan.md). Raises TwinserveError.
    """
    given = dict(locals())
    check_count("workers", workers)
    _check_kinds("a name or a path", (str, os.PathLike), model=model or "", trace=trace)
    _check_kinds("a name", str, gpus=gpus, policy=policy, router=router, slo=slo)
    _check_kinds("a whole number", Integral, tp=tp, seeds=seeds, most_gpus=most_gpus, pool=pool)
    _check_kinds("a number", Real, grow=grow, peak=peak, lead=lead)
    check_names(engine, EngineSettings.__annotations__)
    for name in ("model", "from_vllm", "prices"):
        given[name] = None if given[name] is None else os.fspath(given[name])
    for name in ("gpus", "tp", "policy", "router"):
        given[name] = several(given[name])
    given["trace"] = [os.fspath(one) for one in several(trace)]
    question, _ = question_of(given, engine)
    table = load_prices(None if prices is None else Path(prices))
    with at_work(local(workers, WAVE)) as processes:
        found = make_plan(question, table, processes, progress)
    return Plan(found, table)


def _check_kinds(wanted: str, kind: type | tuple[type, ...], **given: Any) -> None:
    """Raises SettingsError for an argument, one or each of many, that is not of its kind."""
    for name, value in given.items():
        for one in several(value):
            if not isinstance(one, kind) or isinstance(one, bool):
                raise SettingsError(f"{name} {one!r}: give {wanted}, or several in a list")
