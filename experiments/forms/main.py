"""The papers' forms of step times against measured operators, and what each costs a policy that
decides with it: `twinserve study forms`.

First how well each form describes an engine (`accuracy.py`). Then policies run on an engine
whose true step times are composed from operator tables, and believe one form after the other
(`--estimator`), over the same requests. docs/profiles.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.forms.accuracy import KINDS, LABELS, on_a_profile, on_recorded_steps
from twinserve.experiments.sensitivity.runs import KEPT, OFFLINE, TOKENS, TPOT, TTFT, TTFT99, Metric
from twinserve.experiments.study.command import GridOptions, Special
from twinserve.experiments.study.curves import panels
from twinserve.experiments.study.output import markdown_table, write_plot, write_tables
from twinserve.experiments.study.progress import shown_grid
from twinserve.experiments.validation.main import truth_folder
from twinserve.profiles.profile import load_profile
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import with_defaults
from twinserve.sim.setup.run import run_each
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.paired import gained
from twinserve.sim.sweep.statistics import over_seeds
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_atomically

SEEDS = 5
ALL = ("perfect", "bros", "echo", "layerkv", "roofline")
ENGINE = "llama-3.1-8b@a100-80g"  # operator tables


@dataclass(frozen=True)
class Case:
    """A policy on a workload. estimators: what it believes; the first one is what the others are
    held against."""

    title: str
    config: Callable[[int, bool], SimulationConfig]
    metrics: tuple[Metric, ...]
    estimators: tuple[str, ...] = ALL


def _bros(rate: float) -> Callable[[int, bool], SimulationConfig]:
    def config(seed: int, quick: bool) -> SimulationConfig:
        given = SimulationConfig(
            policy=("bros",), profile=ENGINE, rate=rate, duration=10.0 if quick else 60.0, seed=seed
        )
        return with_defaults(given, "bros-hybrid")

    return config


def _layerkv(seed: int, quick: bool) -> SimulationConfig:
    return SimulationConfig(
        policy=("layerkv:savable_only=true",),
        trace="sharegpt",
        profile="llama-2-7b@a100-80g/operators",
        rate=15.0,
        requests=60 if quick else 600,
        num_blocks=400 if quick else 3000,
        cap_length=2300,
        slo="ttft=3,tpot=0.2",
        seed=seed,
        **PAPERS_ENGINE,
    )


def _echo(seed: int, quick: bool) -> SimulationConfig:
    return SimulationConfig(
        policy=("echo:slo=gap",),
        trace="sharegpt",
        profile=ENGINE,
        rate=4.0,
        duration=10.0 if quick else 60.0,
        num_blocks=10_000,
        slo="ttft=1,tpot=0.05",
        seed=seed,
        **PAPERS_ENGINE,
    )


OF_BROS = (KEPT, TTFT, TTFT99, OFFLINE, TOKENS)
CASES: dict[str, Case] = {
    "bros, 20/s": Case(
        "`bros`, ShareGPT lengths at 20 requests/s, best-effort batches of 128",
        _bros(20.0),
        OF_BROS,
    ),
    "bros, 24/s": Case("the same at 24 requests/s, near saturation", _bros(24.0), OF_BROS),
    "layerkv": Case(
        "`layerkv:savable_only=true`, Llama-2-7B, 3,000 KV blocks, ShareGPT lengths at 15 "
        "requests/s",
        _layerkv,
        (KEPT, TTFT, TTFT99, TPOT, TOKENS),
        ("perfect", "paper", *ALL[1:]),  # the paper's: eq. 3 for prompts, BROS's form for decodes
    ),
    "echo": Case(
        "`echo:slo=gap`, ShareGPT lengths at 4 requests/s beside 1,000 questions on documents "
        "(`longdoc:toolbench`)",
        _echo,
        (KEPT, TTFT, TPOT, OFFLINE, TOKENS),
    ),
}


def inputs_of(case: str, estimator: str, seed: int, quick: bool) -> Inputs:
    config = CASES[case].config(seed, quick).model_copy(update={"estimator": estimator})
    inputs = resolve(config)
    if case != "echo":
        return inputs
    documents = longdoc("toolbench", requests=20 if quick else 1000, seed=seed)
    return replace(inputs, workload=merge(inputs.workload, documents))


def run_point(case: str, estimator: str, seed: int, quick: bool) -> dict:
    """One run: its metrics by name."""
    ((_, result),) = run_each(inputs_of(case, estimator, seed, quick))
    return {metric.name: metric.of(result.summary) for metric in CASES[case].metrics}


def points(quick: bool, seeds: int) -> list[Point]:
    found = []
    for name, case in CASES.items():
        for estimator in case.estimators:
            for seed in range(seeds):
                axes = {"case": name, "estimator": estimator, "seed": seed}
                found.append(Point(axes, {**axes, "quick": quick}))
    return found


def costs(rows: pd.DataFrame) -> pd.DataFrame:
    """case, metric, estimator, value and value_ci, change and change_ci against `perfect`
    (relative, for shares of requests a difference), paired by seed; means over seeds and half
    widths of 95 % intervals."""
    found = []
    for name, part in rows.groupby("case", sort=False):
        for metric in CASES[name].metrics:
            change = (metric.name, "difference" if metric.share else "change")
            exact = part[part.estimator == "perfect"]
            rows = gained(part, exact, ["seed"], {"change": change})
            rows["value"] = rows[metric.name]
            table = over_seeds(rows, ["estimator"], ["value", "change"])
            found.append(table.assign(case=name, metric=metric.name, share=metric.share))
    columns = [
        "case",
        "metric",
        "estimator",
        "value",
        "value_ci",
        "change",
        "change_ci",
        "share",
        "seeds",
    ]
    return pd.concat(found, ignore_index=True)[columns]


def accuracy_markdown(recorded: pd.DataFrame | None, profile: pd.DataFrame) -> str:
    """Both accuracies as one table; a form that is not in one of them has no number there."""
    models = [] if recorded is None else list(dict.fromkeys(recorded.model))
    header = [
        "form",
        *(f"recorded steps, {model}" for model in models),
        *(f"profile, {kind}" for kind in KINDS),
    ]
    ours = profile.set_index(["form", "kind"])
    rows = []
    for form, label in LABELS.items():
        row = [label]
        for model in models:
            left_out = recorded[(recorded.model == model) & (recorded.form == form)].left_out
            row.append(f"{left_out.iloc[0]:.1%}" if len(left_out) else "")
        for kind in KINDS:
            known = (form, kind) in ours.index
            row.append(
                f"{ours.error[form, kind]:.1%} ({100 * ours.bias[form, kind]:+.1f})"
                if known
                else ""
            )
        if any(row[1:]):
            rows.append(row)
    return markdown_table(header, rows)


def _cell(row) -> str:
    if row.estimator == "perfect":
        unit, factor = (" %", 100) if row.share else ("", 1)
        numbers = [factor * number for number in (row.value, row.value_ci) if np.isfinite(number)]
        return (
            " ± ".join(
                f"{number:,.0f}" if number >= 1000 else f"{number:.1f}" for number in numbers
            )
            + unit
        )
    unit = " points" if row.share else " %"
    half = f" ± {100 * row.change_ci:.1f}" if np.isfinite(row.change_ci) else ""
    return f"{100 * row.change:+.1f}{half}{unit}"


def costs_markdown(table: pd.DataFrame) -> str:
    text = []
    for name, part in table.groupby("case", sort=False):
        metrics = list(dict.fromkeys(part.metric))
        groups = part.groupby("estimator", sort=False)
        rows = [
            [f"`{estimator}`", *(_cell(row) for row in mine.itertuples())]
            for estimator, mine in groups
        ]
        text.append(
            f"**{name}**: {CASES[name].title}.\n\n{markdown_table(['believes', *metrics], rows)}"
        )
    return "\n".join(text)


def plot(table: pd.DataFrame) -> Canvas:
    """What each belief changes against true step times, per cent or points, with 95 % intervals."""
    canvas = Canvas(layout="constrained")
    cases = list(dict.fromkeys(table.case))
    columns = max(table[table.case == name].metric.nunique() for name in cases)
    axes = panels(canvas, len(cases), columns, width=2.5, height=2.0)
    for i, name in enumerate(cases):
        for j, (metric, part) in enumerate(table[table.case == name].groupby("metric", sort=False)):
            mine = part[part.estimator != "perfect"]
            y = np.arange(len(mine))[::-1]
            axes[i, j].errorbar(
                100 * mine.change,
                y,
                xerr=100 * mine.change_ci.fillna(0.0),
                fmt="o",
                markersize=3,
                capsize=2,
            )
            axes[i, j].axvline(0.0, color="black", linewidth=0.8)
            axes[i, j].set_yticks(y, mine.estimator, fontsize=7)
            axes[i, j].tick_params(axis="x", labelsize=7)
            unit = "points" if part.share.iloc[0] else "%"
            axes[i, j].set_title(
                f"{name + ': ' if j == 0 else ''}{metric}\nchange, {unit}", fontsize=7
            )
            axes[i, j].grid(alpha=0.3, axis="x")
    return canvas


def accuracy() -> tuple[pd.DataFrame | None, pd.DataFrame]:
    """Errors on recorded steps (None where TWINSERVE_TRUTH names none) and on the profile of the
    runs."""
    try:
        recorded = on_recorded_steps(truth_folder())
    except WorkloadError:
        recorded = None
    return recorded, on_a_profile(load_profile(ENGINE))


def experiment(options: GridOptions) -> str:
    """Run everything, write CSV, forms.png and report.md, and return the report."""
    out, seeds = options.out, options.seeds
    recorded, profile = accuracy()
    rows = shown_grid(
        run_point, points(options.quick, seeds), out, options.workers, "forms", options.any_version
    )
    table = costs(rows)
    text = (
        "Mean absolute relative errors. Recorded steps: on parts that the fit has not seen "
        "(what was fitted to none of them:"
    )
    text += (
        " on all). Profile: fitted to it as a policy does, on drawn steps, in brackets the "
        "mean error.\n\n"
    )
    text += accuracy_markdown(recorded, profile)
    if recorded is None:
        text += "\nTWINSERVE_TRUTH names no recorded steps, so errors on them are left out.\n"
    text += (
        f"\nMeans over {seeds} seeds, ± half width of the 95 % interval; `perfect` as it is, "
        "the others as changes against"
    )
    text += " it.\n\n"
    text += costs_markdown(table)
    write_plot(out / "forms.png", plot(table))
    tables = {"points": rows, "costs": table, "profile_errors": profile}
    write_tables(out, tables if recorded is None else {**tables, "recorded_errors": recorded})
    write_atomically(out / "report.md", text.encode())
    return text


STUDY = Special("forms", experiment, SEEDS)
