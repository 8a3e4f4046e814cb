"""How far conclusions move when the profile is off: `twinserve study sensitivity`.

Every part of a profile is made 10 % too large and 10 % too small (`Profile.scaled`), policies are
compared again, and the table says whose number is best then, and by how much. docs/studies.md
has the results.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.sensitivity.runs import (
    COMPLETION,
    KEPT,
    OFFLINE,
    SETTINGS,
    TPOT,
    TTFT,
    Metric,
    Setting,
    run_point,
)
from twinserve.experiments.study.command import GridOptions, Special
from twinserve.experiments.study.curves import panels
from twinserve.experiments.study.off import BELIEFS
from twinserve.experiments.study.output import markdown_table, write_plot, write_tables
from twinserve.experiments.study.progress import shown_grid
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.paired import gained
from twinserve.sim.sweep.statistics import interval, over_seeds
from twinserve.traces.write import write_atomically

FACTORS = (0.9, 1.1)
SEEDS = 5
QUICK = {"hybrid": ("step", "belief"), "mooncake": ("kv",), "echo": ("belief",)}
BY = ["part", "factor"]


def points(quick: bool, seeds: int) -> list[Point]:
    """As it is, then each part at each factor; settings one after another."""
    found = []
    for name, setting in SETTINGS.items():
        if quick and name not in QUICK:
            continue
        parts = QUICK[name] if quick else setting.parts
        for part, factor in [
            ("none", 1.0),
            *((part, factor) for part in parts for factor in FACTORS),
        ]:
            for seed in range(seeds):
                axes = {"setting": name, "part": part, "factor": factor, "seed": seed}
                found.append(Point(axes, {**axes, "quick": quick}))
    return found


def margins(rows: pd.DataFrame, setting: Setting, metric: Metric) -> pd.DataFrame:
    """A row for each part and factor of one setting: `best` policy, and what is left of the lead of
    the one that is best as the profile is.

    lead, lead_low, lead_high   of `leader`, over the best of the others: mean over seeds and its 95
                                % interval, paired by
                    seed; a share of the other's value, or for shares of requests a difference.
                    Negative: it has lost

    Values are compared by their logarithms (geometric means), so that a seed with a tenfold TTFT
    does not stand for all.
    """
    high = metric.better == "high"
    sign = 1.0 if high else -1.0
    wide = {
        key: part.pivot(index="seed", columns="policy", values=metric.name)
        for key, part in rows.groupby(BY, sort=False)
    }
    scores = {key: sign * (table if metric.share else np.log(table)) for key, table in wide.items()}
    leader = scores["none", 1.0].mean().idxmax()
    found = []
    for (part, factor), score in scores.items():
        means = score.mean()
        second = means.drop(leader).idxmax()
        mean, half = interval(score[leader] - score[second])
        best = leader if means[leader] >= means[second] else second
        row = {
            "metric": metric.name,
            "part": part,
            "factor": factor,
            "leader": leader,
            "best": best,
            "second": second,
        }
        for name, value in (("lead", mean), ("lead_low", mean - half), ("lead_high", mean + half)):
            row[name] = value if metric.share else float(sign * np.expm1(sign * value))
        found.append(row | {"share": metric.share})
    return pd.DataFrame(found)


def conclusions(rows: pd.DataFrame) -> pd.DataFrame:
    """`margins` of every setting and metric."""
    tables = []
    for name, part in rows.groupby("setting", sort=False):
        setting = SETTINGS[name]
        tables += [
            margins(part, setting, metric).assign(setting=name) for metric in setting.metrics
        ]
    found = pd.concat(tables, ignore_index=True)
    return found[["setting", *(column for column in found if column != "setting")]]


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """How each policy's own numbers move: relative change against the profile as it is, paired by
    seed (shares of requests: difference), with its 95 % interval."""
    found = []
    for name, setting_rows in rows.groupby("setting", sort=False):
        base = setting_rows[setting_rows.part == "none"]
        moved = setting_rows[setting_rows.part != "none"]
        for metric in SETTINGS[name].metrics:
            kind = "difference" if metric.share else "change"
            changed = gained(moved, base, ["policy", "seed"], {"change": (metric.name, kind)})
            table = over_seeds(changed, [*BY, "policy"], ["change"])
            found.append(table.assign(setting=name, metric=metric.name, share=metric.share))
    columns = ["setting", "metric", *BY, "policy", "change", "change_ci", "share", "seeds"]
    return pd.concat(found, ignore_index=True)[columns]


def _lead(row, bounds: bool = True) -> str:
    numbers = (
        (row.lead, row.lead_low, row.lead_high)
        if bounds and np.isfinite(row.lead_low)
        else (row.lead,)
    )
    digits = 1 if abs(row.lead) < 0.0995 else 0
    mean, *ends = (f"{100 * number:+.{digits}f}" for number in numbers)
    unit = " points" if row.share else " %"
    return mean + (f" ({ends[0]} to {ends[1]})" if ends else "") + unit


def markdown(found: pd.DataFrame, seeds: int) -> str:
    """A table for each setting: who leads, by how much, the least and the greatest lead, and what
    takes it away."""
    text = [
        f"Means over {seeds} seeds, in brackets the 95 % interval of the lead, paired by seed.\n"
    ]
    for name, part in found.groupby("setting", sort=False):
        rows = []
        for metric, table in part.groupby("metric", sort=False):
            base = table[table.part == "none"].iloc[0]
            off = table[table.part != "none"]
            least, most = off.loc[off.lead.idxmin()], off.loc[off.lead.idxmax()]
            lost = off[off.best != off.leader]
            taken = (
                "; ".join(
                    f"{r.part} x {r.factor:g}: {r.best} ({_lead(r)})" for r in lost.itertuples()
                )
                or "nothing"
            )
            ends = [f"{_lead(row, False)} ({row.part} x {row.factor:g})" for row in (least, most)]
            rows.append([metric, f"`{base.leader}`", f"`{base.second}`", _lead(base), *ends, taken])
        header = [
            "metric",
            "best",
            "next",
            "lead",
            "least lead",
            "greatest lead",
            "who is best otherwise",
        ]
        text.append(f"**{name}**: {SETTINGS[name].title}.\n\n{markdown_table(header, rows)}")
    kept = found[found.part != "none"]
    same = int((kept.best == kept.leader).sum())
    base = found[found.part == "none"].set_index(["setting", "metric"])
    clear = {key for key, row in base.iterrows() if row.lead_low > 0}
    of_clear = kept[[key in clear for key in zip(kept.setting, kept.metric, strict=True)]]
    same_clear = int((of_clear.best == of_clear.leader).sum())
    text.append(
        f"The same policy is best in {same} of {len(kept)} comparisons with a profile that is "
        "off; where the interval of its"
        f" lead was above 0 before, in {same_clear} of {len(of_clear)}.\n"
    )
    return "\n".join(text)


def beliefs_markdown(changed: pd.DataFrame) -> str:
    """What wrong beliefs do to those who hold them, from `changes`; policies that nothing moves
    hold none."""
    mine = changed[changed.part.isin(BELIEFS)]
    mine = mine[
        mine.groupby(["setting", "policy"]).change.transform(lambda change: change.abs().max()) > 0
    ]
    metrics, rows = [metric.name for metric in (KEPT, TTFT, TPOT, OFFLINE, COMPLETION)], []
    for (name, policy, part, factor), table in mine.groupby(["setting", "policy", *BY], sort=False):
        cells = {row.metric: _change(row) for row in table.itertuples()}
        rows.append(
            [
                name,
                f"`{policy}`",
                f"{part} x {factor:g}",
                *(cells.get(metric, "") for metric in metrics),
            ]
        )
    text = (
        "Changes of the policies' own numbers where what they believe is off: paired by seed, "
        "± half of the 95 % interval."
    )
    return f"{text}\n\n{markdown_table(['setting', 'policy', 'off', *metrics], rows)}"


def _change(row) -> str:
    half = f" ± {100 * row.change_ci:.1f}" if np.isfinite(row.change_ci) else ""
    return f"{100 * row.change:+.1f}{half}{' points' if row.share else ' %'}"


def plot(found: pd.DataFrame) -> Canvas:
    """Leads of each setting and metric: grey as the profile is, and with each part too small and
    too large."""
    canvas = Canvas(layout="constrained")
    settings = list(dict.fromkeys(found.setting))
    columns = max(found[found.setting == name].metric.nunique() for name in settings)
    axes = panels(canvas, len(settings), columns, width=2.6, height=2.3)
    for i, name in enumerate(settings):
        mine = found[found.setting == name]
        for j, (metric, table) in enumerate(mine.groupby("metric", sort=False)):
            _dots(axes[i, j], table, metric, f"{name}: " if j == 0 else "")
        for j in range(mine.metric.nunique(), columns):
            axes[i, j].axis("off")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return canvas


def _dots(axes, table: pd.DataFrame, metric: str, before: str) -> None:
    base = table[table.part == "none"].iloc[0]
    parts = [part for part in dict.fromkeys(table.part) if part != "none"]
    if np.isfinite(base.lead_low):
        axes.axvspan(
            100 * base.lead_low, 100 * base.lead_high, color="0.85", label="as it is, 95 %"
        )
    axes.axvline(0.0, color="black", linewidth=0.8)
    for factor, colour, shift in ((FACTORS[0], "tab:blue", 0.15), (FACTORS[1], "tab:red", -0.15)):
        mine = table[table.factor == factor].set_index("part").reindex(parts)
        y = np.arange(len(parts))[::-1] + shift
        error = 100 * np.nan_to_num([mine.lead - mine.lead_low, mine.lead_high - mine.lead])
        axes.errorbar(
            100 * mine.lead,
            y,
            xerr=error,
            fmt="o",
            color=colour,
            markersize=3,
            capsize=2,
            label=f"x {factor:g}",
        )
    # an interval may go down to thousands where a lead is open
    axes.set_xlim(left=max(axes.get_xlim()[0], -110.0))
    axes.set_yticks(np.arange(len(parts))[::-1], parts, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(
        f"{before}{metric}\nlead of {base.leader.partition(':')[0]}, "
        f"{'points' if base.share else '%'}",
        fontsize=7,
    )
    axes.grid(alpha=0.3, axis="x")


def experiment(options: GridOptions) -> str:
    """Run everything, write points.csv, leads.csv, changes.csv, report.md and sensitivity.png, and
    return the report."""
    out, seeds = options.out, options.seeds
    rows = shown_grid(
        run_point,
        points(options.quick, seeds),
        out,
        options.workers,
        "sensitivity",
        options.any_version,
    )
    found = conclusions(rows)
    changed = changes(rows)
    text = f"{markdown(found, seeds)}\n{beliefs_markdown(changed)}"
    write_plot(out / "sensitivity.png", plot(found))
    write_tables(out, {"points": rows, "leads": found, "changes": changed})
    write_atomically(out / "report.md", text.encode())
    return text


STUDY = Special("sensitivity", experiment, SEEDS)
