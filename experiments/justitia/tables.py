"""Tables, plots and verdicts of Justitia's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.runs import QUANTILES
from twinserve.experiments.study.verdict import Claim, Verdict, judge, judge_bound
from twinserve.sim.sweep.statistics import over_seeds, shown

RATIOS = [f"ratio_{q}" for q in QUANTILES]
PER_CENT = 100.0  # changes (vs_POLICY) are given so


def plain(policy: str) -> str:
    """A policy's label without the choice of its predictor, which is the same for all of a
    figure."""
    name, _, options = policy.partition(":")
    kept = [
        option for option in options.split(",") if option and not option.startswith("predictor=")
    ]
    return f"{name}:{','.join(kept)}" if kept else name


def beside(frame: pd.DataFrame, by: Sequence[str], value: str, base: str) -> np.ndarray:
    """Of each row of `frame`, `value` of policy `base` in the same run; nan where that was not run.

    by  the columns that, with the seed, tell runs apart
    """
    keys = [*by, "seed"]
    bases = frame[frame.policy == base].set_index(keys)[value]
    return bases.reindex(pd.MultiIndex.from_frame(frame[keys])).to_numpy()


def against(
    frame: pd.DataFrame, by: Sequence[str], value: str, base: str, name: str
) -> pd.DataFrame:
    """`frame` with a column `name`: how much `value` is above that of policy `base` in the same
    run, per cent."""
    return frame.assign(**{name: 100 * (frame[value] / beside(frame, by, value, base) - 1)})


def jct_table(points: pd.DataFrame, by: Sequence[str], pooled: str | None = None) -> pd.DataFrame:
    """A row a setting and policy: JCT, how far from `vtc`, `parrot` and `justitia`, and the ratios
    to VTC's.

    half_delay  half of the worst delay against VTC (ratio - 1) less Justitia's worst in the same
                run: above 0 where Justitia's is smaller than half
    pooled      one of `by`: further rows, in which it is `all`, hold the mean over its values of
                each seed
    """
    frame = points.assign(policy=points.policy.map(plain))
    values = ["mean_s", "p90_s", "late_s", "load", "not_delayed", "worst", "half_delay"]
    frame["half_delay"] = (frame.worst - 1) / 2 - (beside(frame, by, "worst", "justitia") - 1)
    for base in ("vtc", "parrot", "justitia"):
        frame = against(frame, by, "mean_s", base, f"vs_{base}")
        values.append(f"vs_{base}")
    frame = against(frame, by, "p90_s", "justitia", "p90_vs_justitia")
    values += ["p90_vs_justitia", *RATIOS]
    if pooled is not None:
        keys = [*(name for name in by if name != pooled), "policy", "seed"]
        means = frame.groupby(keys, sort=False)[values].mean().reset_index()
        frame = pd.concat([frame, means.assign(**{pooled: "all"})], ignore_index=True)
    return over_seeds(frame, [*by, "policy"], values)


def chosen(table: pd.DataFrame, **wanted) -> pd.Series:
    """The one row with these values."""
    keep = np.ones(len(table), bool)
    for name, value in wanted.items():
        keep &= (table[name] == value).to_numpy()
    return table[keep].iloc[0]


def neutral(name: str) -> float | None:
    """What would be no effect, of a column: 0 of a change (vs_POLICY), 1 of a ratio (over_POLICY);
    others are amounts."""
    return 0.0 if "vs_" in name else 1.0 if "over_" in name else None


def judge_close(change: float, half: float, room: float = 10.0) -> Verdict:
    """ "Very close": the change, per cent, is within `room` to either side."""
    return judge_bound(room - abs(change), half)


def judge_up_to(change: float, half: float, most: float) -> Verdict:
    """ "Up to": as `judge`, but a change that is surely above `most` (and 10 % of it) differs."""
    return "differs" if change - half > 1.1 * most else judge(change, half, most, whole=PER_CENT)


def claim(
    where: str,
    what: str,
    paper: float,
    row: pd.Series,
    name: str,
    why: str,
    unit: str = "",
    text: str | None = None,
    judged: Callable[[float, float], Verdict] | None = None,
) -> Claim:
    """A claim about column `name` of a row of a table, with its interval.

    text    the paper's words, where it gives no number
    judged  function of mean and half width; none: `judge` beside `paper`
    """
    mean, half = float(row[name]), float(row[f"{name}_ci"])
    if judged is None:
        whole = PER_CENT if "vs_" in name else 1.0
        verdict = judge(mean, half, paper, neutral(name), whole)
    else:
        verdict = judged(mean, half)
    directed = neutral(name) is not None and paper != neutral(name)
    said = text or f"{paper:g}{unit}"
    return Claim.judged(where, what, said, f"{shown(mean, half)}{unit}", verdict, why, directed)


def bars(
    canvas: Canvas,
    table: pd.DataFrame,
    group: str,
    values: Mapping[str, str],
    order: Sequence[str] | None = None,
) -> None:
    """A panel a value (column -> title): bars of policies with intervals, in groups of `group`."""
    policies = list(order or dict.fromkeys(table.policy))
    groups = list(dict.fromkeys(table[group]))
    panels = np.atleast_1d(canvas.subplots(1, len(values)))
    width = 0.8 / len(policies)
    for panel, (value, title) in zip(panels, values.items(), strict=True):
        for i, policy in enumerate(policies):
            rows = [table[(table.policy == policy) & (table[group] == g)] for g in groups]
            heights = [float(r[value].iloc[0]) if len(r) else np.nan for r in rows]
            halves = [float(r[f"{value}_ci"].iloc[0]) if len(r) else np.nan for r in rows]
            at = np.arange(len(groups)) + (i - (len(policies) - 1) / 2) * width
            panel.bar(
                at, heights, width, yerr=np.nan_to_num(halves), label=policy, error_kw={"lw": 0.8}
            )
        panel.set_xticks(range(len(groups)), [str(g) for g in groups], fontsize=8)
        panel.set_title(title, fontsize=10)
    canvas.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(policies),
        fontsize=8,
    )
