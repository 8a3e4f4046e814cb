"""Files of a sweep.

    runs.parquet   one row a completed run: what its combination names, seed, every number of its
                   summary (docs/metrics.md) by dotted name
    table.csv      one row a combination: means over seeds, and half widths of their 95 % intervals
                   (NAME_ci); means of error bars' ends (NAME.low, NAME.high)
    failures.csv   one row a failed run: what its combination names, seed, the error
    sweep.json     settings that all runs have in common, and versions
    plot.png, plot.svg, plot.pdf

The same results give the same bytes under the same versions of pyarrow and matplotlib.
"""

import functools
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from twinserve.errors import worded
from twinserve.own_code import label
from twinserve.policies.registry import POLICIES
from twinserve.sim.fleet.routers.registry import ROUTERS
from twinserve.sim.report.over import names_of, queues, with_digits
from twinserve.sim.results.files import dump_json, printed_runs
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.results.paths import text_of
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.sweep.combinations import NAME, Run
from twinserve.sim.sweep.one import HALF, HIGH, LOW, NOTICES, REQUESTS
from twinserve.sim.sweep.points import KEPT, Kept
from twinserve.sim.sweep.repeats import Repeat
from twinserve.sim.sweep.statistics import over_seeds
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_together

# Shown if there is one, in this order: name in the summary, and as a heading. As in the table that
# simulate prints.
COLUMNS = {
    "classes.rt.mean_ttft_ms": "TTFT ms",
    "classes.rt.mean_tpot_ms": "TPOT ms",
    "classes.rt.slo_attainment": "attained",
    "classes.be.window_total_token_throughput": "best-effort tok/s",
    "total_token_throughput": "tok/s",
}
VERDICT = "classes.rt.saturation.verdict"  # of each run; shown as `queue`, as simulate does
_MOST_NOTICES = 8
COPIES = "same_requests"  # column of table.csv
COPIED = (
    "requests are recorded, the same for each seed, so there is no interval; --repeat windows=5 "
    "takes other windows of the trace, --repeat blocks=20 parts of one run"
)
_WHY = {  # a difference has no test
    "one run": " of each; give --seeds 5",
    "requests are the same": " under each seed; --repeat windows=5 takes others",
}
_FILES = (
    *("sweep.json", "runs.parquet", "table.csv", "failures.csv", "differences.csv"),
    *("plot.png", "plot.svg", "plot.pdf"),
)
_BARS = "[low, high]: step times off by the expected error, means over seeds (docs/profiles.md)"
_WIDEST = 160  # of the printed table where it goes into a file


def axes_of(runs: Sequence[Run]) -> list[str]:
    """Return the settings that combinations name, in order of appearance, without the seed."""
    return list(dict.fromkeys(name for run in runs for name in run.axes))


def runs_frame(results: Sequence[tuple[Run, Kept]], axes: Sequence[str]) -> pd.DataFrame:
    """Return runs.parquet: a row for each completed run, in the order of the runs."""
    own = own_names([run for run, _ in results])
    rows = [
        {**_axis_values(run, axes, own), **_copy(run), **row}
        for run, kept in results
        for row in kept.rows
    ]
    return pd.DataFrame(rows)


def failures_frame(results: Sequence[tuple[Run, Kept]], axes: Sequence[str]) -> pd.DataFrame:
    """Return failures.csv, in the order of the runs."""
    own = own_names([run for run, _ in results])
    rows = [
        {**_axis_values(run, axes, own), **_copy(run), "error": kept.failed}
        for run, kept in results
        if kept.failed is not None
    ]
    told_by = {name: None for run, _ in results for name in run.copy}
    return pd.DataFrame(rows, columns=[*axes, *({"seed": None} | told_by), "error"])


def _copy(run: Run) -> dict[str, Any]:
    return {name: value if name == "seed" else text_of(value) for name, value in run.copy.items()}


def own_names(runs: Sequence[Run]) -> dict[str, str]:
    """Return text -> class name of policies and routers from files, unless two would be equal."""
    found = {}
    for kind, names in (("policy", POLICIES), ("router", ROUTERS)):
        texts = {text_of(getattr(run.config, kind)) for run in runs}
        labels = {text: label(names, text) for text in texts if ".py:" in text}
        if len({*labels.values(), *(texts - labels.keys())}) == len(texts):
            found |= labels
    return found


def _axis_values(run: Run, axes: Sequence[str], own: Mapping[str, str]) -> dict[str, Any]:
    """Return this run's values of all axes: numbers unchanged, others as on the command line."""

    def plain(value: Any) -> Any:
        if value is None or type(value) in (bool, int, float):
            return value
        return own.get(text_of(value), text_of(value))

    return {name: plain(_value(run, name)) for name in axes}


def _value(run: Run, name: str) -> Any:
    """Return a setting of the run; ranks, which are now in the profile's name, as given."""
    found = getattr(run.config, name, None)
    return run.axes.get(name) if found is None else found


def seed_table(frame: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """Return table.csv: means over seeds, NAME_ci; of saturation, seeds with each verdict."""
    values = [
        name
        for name in frame.columns
        if name not in (*axes, "seed") and pd.api.types.is_numeric_dtype(frame[name])
    ]
    values = [name for name in values if not name.endswith(HALF)]
    by = axes or ["all"]
    frame = frame if axes else frame.assign(all="all")
    table = over_seeds(frame, by, values)
    ends = [f"{name}_ci" for name in values if name.endswith((LOW, HIGH))]
    table = table.drop(columns=ends).copy()  # of many columns, one by one: in one piece
    copied = [_copied(found) for _, found in frame.groupby(list(by), sort=False, dropna=False)]
    if any(copied):  # an interval would say how sure the copies are of each other
        table.loc[copied, [name for name in table if name.endswith("_ci")]] = np.nan
        table[COPIES] = copied
    for name in frame.columns:
        if name.endswith(HALF):  # of one run a combination
            table[f"{name.removesuffix(HALF)}_ci"] = frame[name].to_numpy()
    for name in frame.columns:
        if name.endswith(".saturation.verdict"):
            grouped = frame.groupby(list(by), sort=False, dropna=False)[name]
            table[name] = [_counted(found) for _, found in grouped]
    return table if axes else table.drop(columns="all")


def _copied(runs: pd.DataFrame) -> bool:
    """Return whether several runs have the same requests."""
    if len(runs) < 2 or REQUESTS not in runs:
        return False
    return bool(runs[REQUESTS].notna().all() and runs[REQUESTS].nunique() == 1)


def _counted(verdicts: pd.Series) -> str | None:
    """Return `saturated` if all seeds agree, else `saturated 2, unclear 1`; None: no verdict."""
    counts = verdicts.dropna().value_counts(sort=False)
    if len(counts) < 2:
        return next(iter(counts.index), None)
    return ", ".join(f"{verdict} {count}" for verdict, count in counts.items())


def write_results(
    out: Path, frame: pd.DataFrame, table: pd.DataFrame, failures: pd.DataFrame, about: dict
) -> None:
    """Write all files but differences.csv and the plots. Then remove what an earlier sweep wrote
    and this one does not. If all runs failed, an earlier sweep's results stay, and failures.csv is
    all that is written. Raises WorkloadError."""
    stays = not len(frame) and (out / "table.csv").is_file()
    files = {} if stays else {"sweep.json": dump_json(about).encode()}
    if len(frame):
        sink = io.BytesIO()
        try:
            columns = pa.Table.from_pandas(frame, preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError) as error:  # kept by an earlier version
            raise WorkloadError(
                f"{out / KEPT}: kept rows do not fit each other ({worded(error)[:120]}); remove "
                "that folder, or name another --out"
            ) from None
        pq.write_table(columns.replace_schema_metadata(None), sink)
        files["runs.parquet"] = sink.getvalue()
        files["table.csv"] = table.to_csv(index=False).encode()
    if len(failures):
        files["failures.csv"] = failures.to_csv(index=False).encode()
    write_together([(out / name, content) for name, content in files.items()])
    for name in () if stays else _FILES:
        if name not in files:
            (out / name).unlink(missing_ok=True)


def about(runs: Sequence[Run], options: MetricsOptions, error_bars: bool, repeat: Repeat) -> dict:
    """Return sweep.json: the settings common to all runs, and those that repeat the sweep."""
    first = runs[0].config.model_dump(mode="json")
    others = [run.config.model_dump(mode="json") for run in runs[1:]]
    common = {
        name: value
        for name, value in first.items()
        if name != "seed" and all(other[name] == value for other in others)
    }
    axes = axes_of(runs)
    own = runs[0].config.model_dump(mode="json", exclude_defaults=True)
    given = {
        name: value for name, value in own.items() if name not in (*axes, "seed", repeat.told_by)
    }
    if repeat.windows:
        given["window"] = runs[0].config.window[0], runs[-1].config.window[1]
    firsts = [next(found) for _, found in groupby(runs, key=lambda run: run.where)]
    return {
        "runs": len(runs),
        "seeds": sorted({run.config.seed for run in runs}),
        "seeds_of_each": repeat.seeds,
        "repeat": str(repeat) if repeat.windows or repeat.blocks else None,
        "given": given,
        "objectives": [*map(str, parse_objectives(common["slo"]))] if "slo" in common else [],
        "combinations": [_entry(run, axes) for run in firsts],
        "metrics": options.described(),
        "error_bars": error_bars,
        "common": common,
        "versions": {name: version(name) for name in ("twinserve", "numpy", "pandas")},
    }


def _entry(run: Run, axes: Sequence[str]) -> dict[str, Any]:
    """Return a combination for a --params file, with the first of its seeds."""
    found = {NAME if n == "name" else n: _value(run, n) for n in axes}
    found |= {"policy": run.config.policy[0]} if "policy" in axes else {}
    return {**found, "seed": run.config.seed}


def printed(
    frame: pd.DataFrame,
    table: pd.DataFrame,
    axes: Sequence[str],
    compared: pd.DataFrame,
    objectives: Sequence[str],
) -> str:
    """Return the output of `--json`: table.csv and differences.csv as lists, and the notices."""
    rows = table.to_dict("records")
    labels = names_of(table, axes) if len(table) else []
    more = {"differences": compared.to_dict("records"), "objectives": objectives}
    more["notices"] = [f"{of} {text}".lstrip() for of, text in _notes(frame, table)]
    return printed_runs(zip(labels, rows, strict=True), **more)


def print_all(
    frame: pd.DataFrame,
    table: pd.DataFrame,
    axes: Sequence[str],
    names: Sequence[str] = (),
    compared: pd.DataFrame | None = None,
    objectives: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Print the table of the main numbers and of `names`, its notes, and differences."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDEST)
    said = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if objectives:
        said(f"objectives: {', '.join(objectives)}")
    console.print(_seed_table(table, axes, names))
    if any(name.endswith(LOW) for name in table):
        said(_BARS)
    for of, text in _notes(frame, table):
        said(f"note {of} {text}" if of else f"note: {text}")
    if compared is None or not len(compared):
        return
    pairs = f"{compared['runs'].iloc[0]} pairs of runs with the same requests"
    said(f"differences to {compared['baseline'].iloc[0]}, {pairs}:")
    console.print(_differences(compared, vary(table, axes)))
    untested = _WHY.keys() & set(compared["verdict"])
    for reason in sorted(untested):
        said(f"note: differences are not tested: {reason}{_WHY.get(reason, '')}")
    if not untested:
        said("* significant: its 95 % interval leaves out 0")


def _notes(frame: pd.DataFrame, table: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield a note if copies have no interval, and the runs' notices, with counts if not of all."""
    if COPIES in table and table[COPIES].any():
        yield "", COPIED
    said = frame[NOTICES].fillna("") if NOTICES in frame else ()
    counts = Counter(notice for text in said for notice in filter(None, text.split("\n")))
    for notice, count in [*counts.items()][:_MOST_NOTICES]:
        yield f"({count} of {len(frame)} runs):" if count < len(frame) else "", notice
    if (more := len(counts) - _MOST_NOTICES) > 0:
        yield "", f"{more} further notices stand in runs.parquet"


def vary(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Return the axes that vary, or all."""
    return [name for name in axes if table[name].nunique(dropna=False) > 1] or list(axes)


def _empty(axes: Sequence[str], heads: Iterable[str]) -> Table:
    """Return a table with a column for each axis and each head."""
    shown = Table(*axes, box=None, pad_edge=False)
    for head in heads:
        shown.add_column(head, justify="right")
    return shown


def _seed_table(table: pd.DataFrame, axes: Sequence[str], values: Sequence[str]) -> Table:
    known = {name: head for name, head in COLUMNS.items() if name in table}
    known |= {name: name for name in values if name in table and name not in known}
    axes = vary(table, axes)
    shown = _empty(axes, known.values())
    if VERDICT in table:
        shown.add_column("queue")
    for row in table.to_dict("records"):
        cells = [text_of(row[name]) if pd.notna(row[name]) else "" for name in axes]
        for name in known:
            there = pd.notna(row[name])
            cells.append(
                with_digits(row[name], row[f"{name}_ci"]) + _bar(row, name) if there else "-"
            )
        if VERDICT in table:
            cells.append(queues(row[VERDICT]) if pd.notna(row[VERDICT]) else "-")
        shown.add_row(*cells)
    return shown


def _differences(found: pd.DataFrame, axes: Sequence[str]) -> Table:
    numbers = list(dict.fromkeys(found["number"]))
    shown = _empty(axes, [COLUMNS.get(name, name) for name in numbers])
    for keys, rows in found.groupby(axes, sort=False, dropna=False):
        cells = {
            row["number"]: f"{with_digits(row['difference'], row['ci'])}"
            + (" *" if row["verdict"] == "significant" else "  ")
            for row in rows.to_dict("records")
        }
        shown.add_row(*map(text_of, keys), *(cells.get(name, "-") for name in numbers))
    return shown


def _bar(row: Mapping[str, Any], name: str) -> str:
    """Return ` [11.2, 14.9]` for a number with an error bar."""
    if f"{name}{LOW}" not in row or pd.isna(row[f"{name}{LOW}"]):
        return ""
    return f" [{with_digits(row[name + LOW], np.nan)}, {with_digits(row[name + HIGH], np.nan)}]"
