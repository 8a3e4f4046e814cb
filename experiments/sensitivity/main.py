"""How far conclusions move when the profile is off: `twinserve study sensitivity`.

Every part of a profile is made 10 % too large and 10 % too small (`Profile.scaled`), and policies
are compared again. The table says which policy is best then, and by how much. docs/sensitivity.md
has the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import lines_of
from twinserve.experiments.study.grid import Grid, joined
from twinserve.experiments.study.output import markdown_table
from twinserve.experiments.study.runs import BELIEFS, PARTS, run
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table, signed
from twinserve.sim.setup.config import PAPERS_ENGINE
from twinserve.sim.sweep.statistics import interval

FACTORS = (0.9, 1.1)
BY = ["part", "factor"]


@dataclass(frozen=True)
class Metric:
    """path: in the summary; better: high or low; share: of requests, compared in percentage
    points."""

    path: str
    better: str
    share: bool = False


DATA = texts(__file__, "settings.yaml")
SETTINGS: Mapping[str, Mapping[str, Any]] = DATA.SETTINGS
METRICS = {name: Metric(**how) for name, how in DATA.METRICS.items()}
ONLINE = [name for name in METRICS if not name.startswith("completion")]


def grid(name: str) -> Grid:
    """A setting with its profile as it is, then with each part at each factor."""
    of = SETTINGS[name]
    parts = (*PARTS, "demand") if name == "apps" else ("belief",) if "exact" in name else PARTS
    off = [("none", 1.0), *((part, factor) for part in parts for factor in FACTORS)]
    few = ("none", *of.get("quick", ()))
    return Grid(
        {
            "setting": {name: of["settings"]},
            ("part", "factor"): {pair: {"off": [*pair]} for pair in off},
            "policy": of["policies"],
        },
        PAPERS_ENGINE,
        {metric: METRICS[metric].path for metric in of.get("metrics", ONLINE)},
        few={
            "setting": int("quick" in of),
            ("part", "factor"): [pair for pair in off if pair[0] in few],
        },
        quick=of.get("small", {}),
    )


def metrics_of(rows: pd.DataFrame) -> dict[str, Metric]:
    """Of the runs of one setting."""
    known = rows.columns[rows.notna().any()]
    return {name: metric for name, metric in METRICS.items() if name in known}


# -- tables ----------------------------------------------------------------------------------------
def margins(rows: pd.DataFrame, name: str, metric: Metric) -> pd.DataFrame:
    """A row for each part and factor of one setting: `best` policy, and what is left of the lead
    that the best policy has with the profile unchanged.

    lead, lead_low, lead_high   of `leader`, over the best of the others: mean over seeds and its 95
                                % interval, paired by
                    seed; a share of the other's value, or for shares of requests a difference.
                    Negative: it has lost

    Values are compared by their logarithms (geometric means), so that a seed with a tenfold TTFT
    does not stand for all.
    """
    sign = 1.0 if metric.better == "high" else -1.0
    wide = {
        key: part.pivot(index="seed", columns="policy", values=name)
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
            "metric": name,
            "part": part,
            "factor": factor,
            "leader": leader,
            "best": best,
            "second": second,
        }
        for end, value in (("lead", mean), ("lead_low", mean - half), ("lead_high", mean + half)):
            row[end] = value if metric.share else float(sign * np.expm1(sign * value))
        found.append(row | {"share": metric.share})
    return pd.DataFrame(found)


def conclusions(rows: pd.DataFrame) -> pd.DataFrame:
    """`margins` of every setting and metric."""
    tables = [
        margins(part, name, metric).assign(setting=setting)
        for setting, part in rows.groupby("setting", sort=False)
        for name, metric in metrics_of(part).items()
    ]
    found = pd.concat(tables, ignore_index=True)
    return found[["setting", *(column for column in found if column != "setting")]]


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """How each policy's own numbers move: relative change against the profile as it is, paired by
    seed (shares of requests: difference), with its 95 % interval."""
    found = []
    for setting, part in rows.groupby("setting", sort=False):
        for name, metric in metrics_of(part).items():
            gain = {"change": (name, "difference" if metric.share else "change")}
            table = Table([*BY, "policy"], (), gain, {"part": "none"}, ("policy",), own=False)
            found.append(table(part).assign(setting=setting, metric=name, share=metric.share))
    columns = ["setting", "metric", *BY, "policy", "change", "change_ci", "share", "seeds"]
    return pd.concat(found, ignore_index=True)[columns]


# -- text and plot --------------------------------------------------------------------------------
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


def markdown(found: pd.DataFrame) -> str:
    """A table for each setting: the best policy, by how much it leads, the least and the greatest
    lead, and what takes it away."""
    text = ["Means over seeds, in brackets the 95 % interval of the lead, paired by seed.\n"]
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
        text.append(f"**{name}**: {SETTINGS[name]['title']}.\n\n{markdown_table(header, rows)}")
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
    """What wrong beliefs do to the policies that hold them, from `changes`; policies that nothing
    moves hold none."""
    mine = changed[changed.part.isin(BELIEFS)]
    mine = mine[
        mine.groupby(["setting", "policy"]).change.transform(lambda change: change.abs().max()) > 0
    ]
    metrics, rows = list(DATA.OF_BELIEFS), []
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
    return signed(row.change, row.change_ci, " points" if row.share else " %")


# the leads over the factors, a line for each part of the profile that is off
PLOT = lines_of("setting", {"lead": ("lead, % or points", 100.0)}, "factor", "part", split="metric")
RUNS = joined(*map(grid, SETTINGS))
STUDY = Study(
    "sensitivity",
    "",
    [
        Figure(
            "leads", "leads with a profile that is off", RUNS, run, conclusions, PLOT, text=markdown
        ),
        Figure(
            "changes",
            "what changes for each policy, and what wrong beliefs do",
            RUNS,
            run,
            changes,
            text=beliefs_markdown,
        ),
    ],
    seeds=5,
)
