"""`twinserve.simulate`: runs in Python, and how to look at them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import pandas as pd

from twinserve.policies.base import Policy
from twinserve.policies.registry import PolicySpec, parse_policy
from twinserve.sim.api.html import table_html, text_html
from twinserve.sim.api.plots import Plots
from twinserve.sim.api.settings import Settings, config_of, in_pythons_words, measured_with, several
from twinserve.sim.report.fleet import notes_of, render_pools
from twinserve.sim.report.run_charts import run_charts
from twinserve.sim.report.seen import look
from twinserve.sim.report.table import number, percent, queue, render_table
from twinserve.sim.results.files import RunResult, find_runs, read_run, write_run
from twinserve.sim.results.metrics import latencies
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.error_bars import (
    add_beside,
    add_error_bars,
    check_beside,
    check_error_bars,
)
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Progress, run_each

PolicyLike = str | type[Policy]
_WIDTH = 110  # of a table as text
_LATENCIES = ("ttft_s", "tpot_s", "e2el_s")


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One policy over a request list.

    label    the policy as it was given: tells runs of a comparison apart
    result   rows, configuration, metrics and timing, as `simulate --out` writes them
    notices  remarks on the requests and the hardware
    """

    label: str
    result: RunResult
    notices: tuple[str, ...] = ()

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request that was sent (docs/metrics.md), with ttft_s, tpot_s and e2el_s in
        seconds; NaN if it has none."""
        rows = self.result.rows.requests
        found = latencies(rows)
        return rows.assign(**{name: found[name] for name in _LATENCIES if name not in rows})

    @property
    def steps(self) -> pd.DataFrame:
        """A row an engine step."""
        return self.result.rows.steps

    @property
    def gaps(self) -> pd.DataFrame:
        """Times between tokens, in seconds, pooled over requests."""
        return self.result.rows.gaps

    @property
    def summary(self) -> dict[str, Any]:
        """The metrics, as `simulate --json` prints them (docs/metrics.md)."""
        return self.result.summary

    @property
    def config(self) -> dict[str, Any]:
        """run.json: all that is needed to understand the run and to repeat it."""
        return self.result.config

    @property
    def plot(self) -> Plots:
        return Plots(lambda: run_charts([look(self.label, Path(), self.result)]))

    def save(self, out: str | os.PathLike, overwrite: bool = False, timeline: bool = False) -> Path:
        """Write the run as `simulate --out` does. Raises ResultsError."""
        return write_run(out, self.result, overwrite, timeline)

    def __repr__(self) -> str:
        return f"<Run {self.label}: {', '.join(_said(self.summary))}>"

    def __str__(self) -> str:
        return str(Runs([self]))

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(Mapping[str, Run]):
    """Runs side by side, by label."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.label: run for run in runs}
        if len(self._runs) < len(runs):
            raise SettingsError("two of these runs have one label; give them labels of their own")

    def __getitem__(self, label: str) -> Run:
        try:
            return self._runs[label]
        except KeyError:
            raise KeyError(f"no run {label!r}; there are {', '.join(self._runs)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def notices(self) -> list[str]:
        """Of all runs, each once, and what the table does not show."""
        said = dict.fromkeys(line for run in self._runs.values() for line in run.notices)
        return [*said, *notes_of(self._results)]

    @property
    def frame(self) -> pd.DataFrame:
        """A row a run, and every number of its summary by its dotted name."""
        rows = [_flat(run.summary) for run in self._runs.values()]
        return pd.DataFrame(rows, index=pd.Index(self._runs, name="policy"))

    @property
    def plot(self) -> Plots:
        return Plots(
            lambda: run_charts([look(run.label, Path(), run.result) for run in self._runs.values()])
        )

    def save(
        self, out: str | os.PathLike, overwrite: bool = False, timeline: bool = False
    ) -> list[Path]:
        """Write each run into its own folder in `out`, as `simulate --out`. Raises ResultsError."""
        from twinserve.sim.results.folders import folders

        names = folders(self._runs)
        return [
            run.save(Path(out) / names[label], overwrite, timeline)
            for label, run in self._runs.items()
        ]

    @property
    def _results(self) -> dict[str, RunResult]:
        return {label: run.result for label, run in self._runs.items()}

    def __repr__(self) -> str:
        return f"<Runs: {', '.join(self._runs)}>"

    def __str__(self) -> str:
        table = render_table(self._results, self.notices, _WIDTH).rstrip("\n")
        pools = render_pools(self._results, _WIDTH)
        return f"{table}\n\n{pools}" if pools else table

    def _repr_html_(self) -> str:
        pools = render_pools(self._results, _WIDTH)
        table = table_html(self._results, self.notices)
        return table + (text_html(pools.splitlines()) if pools else "")


def _said(summary: Mapping[str, Any]) -> list[str]:
    """The few numbers that tell most."""
    said = [f"{summary['completed']:,} requests"]
    rt, be = (summary.get("classes", {}).get(name) for name in ("rt", "be"))
    main = rt or be or {}
    for name in ("ttft", "tpot"):
        if main.get(f"mean_{name}_ms") is not None:
            said.append(f"{name.upper()} {number(main[f'mean_{name}_ms'])} ms")
    if main.get("slo_attainment") is not None:
        said.append(f"objectives kept {percent(main['slo_attainment'])}")
    if rt and rt.get("saturation"):
        said.append(f"queue {queue(rt['saturation'])}")
    if rt and be and be.get("window_total_token_throughput") is not None:
        said.append(f"best-effort {number(be['window_total_token_throughput'])} tokens/s")
    return said


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Numbers and texts of a nested object, by dotted names; lists are left out."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= _flat(inner, f"{before}{name}.")
        elif not isinstance(inner, list):
            found[f"{before}{name}"] = inner
    return found


# -- running ---------------------------------------------------------------------------------------
class _Asked(Settings, total=False):
    """What `simulate` takes by name."""

    preset: str | None
    config: str | os.PathLike | None
    goodput: Mapping[str, float] | Sequence[str] | None
    warmup: str | int | None
    metrics_every: float | None
    percentiles: Sequence[float] | str | None
    error_bars: bool
    spare: bool
    decisions: bool
    progress: Callable[[Progress], None] | None


@overload
def simulate(
    policy: PolicyLike = ..., trace: str | os.PathLike | None = ..., **asked: Unpack[_Asked]
) -> Run: ...


@overload
def simulate(
    policy: list[PolicyLike] | list[str] | tuple[PolicyLike, ...],
    trace: str | os.PathLike | None = ...,
    **asked: Unpack[_Asked],
) -> Runs: ...


@in_pythons_words
def simulate(
    policy: PolicyLike | list[PolicyLike] | list[str] | tuple[PolicyLike, ...] | None = None,
    trace: str | os.PathLike | None = None,
    *,
    preset: str | None = None,
    config: str | os.PathLike | None = None,
    goodput: Mapping[str, float] | Sequence[str] | None = None,
    warmup: str | int | None = None,
    metrics_every: float | None = None,
    percentiles: Sequence[float] | str | None = None,
    error_bars: bool = False,
    spare: bool = False,
    decisions: bool = False,
    progress: Callable[[Progress], None] | None = None,
    **settings: Unpack[Settings],
) -> Run | Runs:
    """Simulate a policy on a trace; several policies run over the same requests.

    policy      a name with options, "bros:chunk=fit", one of your own as "FILE.py:Class" or as the
                class itself; or a list of such. [default: vllm, or what `config` says]
    trace       name or file. [default: mooncake, or what `preset` or `config` says]
    preset      a published setting, which other arguments modify: bros-hybrid
    config      run.json of a former run; arguments given here win
    goodput     objectives for goodput in milliseconds: {"ttft": 500, "tpot": 50}
    warmup      leave out of the metrics the first requests (500) or seconds ("60s")
    metrics_every  also metrics of each window of so many seconds
    percentiles of the latencies: (50, 90, 99.9)
    error_bars  run four times more with step times off by their expected error
    spare       of fleets in which replicas fail: run twice more, without failures and with one more
                replica; `summary["failures"]["beside"]` compares
    decisions   keep every plan, for `twinserve replay`; of one replica
    progress    called with a `Progress` as the run goes on
    settings    the flags of `simulate`, with underscores: rate=10.0, load=0.8, seed=1

    Returns a Run for one policy, Runs for a list of them. Nothing is written. Raises
    TwinserveError, one line that says what is wrong and what to do.
    """
    options = measured_with(goodput, warmup, metrics_every, percentiles)
    given: dict[str, Any] = {**settings}
    if trace is not None:
        given["trace"] = trace
    if isinstance(policy, str):
        given["policy"] = (policy,)
    found = config_of(preset, config, given)
    if error_bars and found.fleet is not None:
        raise SettingsError("error_bars changes the step times of one profile; drop fleet")
    if decisions and (found.replicas > 1 or found.fleet is not None):
        raise SettingsError("decisions keeps the plans of one engine; drop replicas or fleet")
    if decisions and (changing := found.changes_replicas):
        raise SettingsError(f"decisions keeps the plans of one engine; drop {changing[2:]}")
    specs = None if policy is None or isinstance(policy, str) else _specs(several(policy))
    inputs = resolve(found, policies=specs)
    if error_bars:
        check_error_bars(inputs)
    if spare:
        check_beside(inputs)
    runs = []
    for spec, result in run_each(inputs, progress, options, decisions):
        if error_bars:
            add_error_bars(inputs, spec, result, progress, options, lambda label: None)
        if spare:
            add_beside(inputs, spec, result, progress, options)
        runs.append(Run(spec.label, result, tuple(result.config["notices"])))
    one = isinstance(policy, (str, type)) or (policy is None and len(runs) == 1)
    return runs[0] if one else Runs(runs)


def _specs(policies: Sequence[PolicyLike]) -> list[PolicySpec]:
    """Of names and classes. Raises SettingsError, RegistryError."""
    if not policies:
        raise SettingsError("policy: the list is empty; name at least one")
    specs = []
    for one in policies:
        if isinstance(one, str):
            specs.append(parse_policy(one))
        elif isinstance(one, type) and issubclass(one, Policy):
            specs.append(PolicySpec(one.name, own=one))
        else:
            raise SettingsError(
                f"policy: {one!r} is no policy; give a name, FILE.py:Class, or a class of Policy"
            )
    return specs


# -- reading ---------------------------------------------------------------------------------------
def read_runs(*folders: str | os.PathLike) -> Runs:
    """Return saved runs in the order given; a folder of runs stands for its runs. Raises
    ResultsError."""
    paths = find_runs(folders)
    results = {path: read_run(path) for path in paths}
    labels = [results[path].config.get("label", path.name) for path in paths]
    return Runs(
        [
            Run(
                label if labels.count(label) == 1 else str(path),
                results[path],
                tuple(results[path].config.get("notices", ())),
            )
            for path, label in zip(paths, labels, strict=True)
        ]
    )
