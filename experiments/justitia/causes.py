"""Why our numbers are not the paper's: runs that change one thing at a time, at 2x on Llama-7B with
demands known.

Everything here is a variant and labelled so; none of them is the default of the workload, the
profile or a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.justitia.claims import TEXTS, UP_TO, judge_up_to
from twinserve.experiments.justitia.runs import compare
from twinserve.experiments.justitia.tables import jct
from twinserve.experiments.study.claims import rows_of
from twinserve.experiments.study.curves import Bars
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import titled
from twinserve.experiments.study.verdict import Claim, judge, worst

# in words, policy, its column in per cent, the paper's number; no density is said of the first two.
# Nothing is claimed of fairness here, which takes more seeds
PARTS = (
    ("against VTC", "justitia", "vs_vtc", -57.5),
    ("against Parrot", "justitia", "vs_parrot", -61.1),
    ("Justitia/C against Justitia", "justitia:cost=compute", "vs_justitia", UP_TO),
)
BASE = "as drawn, pool of the profile"
TRUTH = "predictor=perfect"
POLICIES = (f"justitia:{TRUTH}", f"justitia:{TRUTH},cost=compute", "vtc", "parrot", f"srjf:{TRUTH}")


def asked(how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `compare` for an entry of CHANGES."""
    ours, costly, vtc, *_ = POLICIES
    match how:
        case {"all": option}:
            names = [f"{policy}{',' if ':' in policy else ':'}{option}" for policy in POLICIES]
            return {"policies": names, "fair": names[2]}
        case {"vtc": option}:
            return {"policies": (ours, f"{vtc}:{option}"), "fair": f"{vtc}:{option}"}
        case {"clock": M}:
            return {"policies": (ours, f"{costly},M={M}"), "fair": ours}
    return dict(how)


VARIANTS = {
    (group, change): asked(how)
    for group, changes in TEXTS.CHANGES.items()
    for change, how in changes.items()
}
QUICK = (BASE, "459 blocks (Fig. 3)", "large a sixth, small four times", "no counter lift")
GRID = Grid(
    {("group", "change"): VARIANTS},
    {"policies": POLICIES, "count": 300, "offline": False},
    few={("group", "change"): [name for name in VARIANTS if name[1] in QUICK]},
    quick={"count": 12, "offline": True},
)


def _role(policy: str) -> str:
    """What a policy is compared as, whatever options a variant gives it."""
    name = policy.partition(":")[0]
    return "justitia:cost=compute" if name == "justitia" and "cost=compute" in policy else name


def _grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """With the group of the base, which has no name: read from a file it is nan."""
    return rows.assign(group=rows.group.fillna(""))


def table(frame: pd.DataFrame) -> pd.DataFrame:
    frame = _grouped(frame)
    found = jct("group", "change")(frame.assign(policy=frame.policy.map(_role)))
    fair = ("not_delayed", "worst", "half_delay", "ratio_")
    fair = [name for name in found if name.startswith(fair)]
    found.loc[found.vs_vtc.isna(), fair] = np.nan  # a run without VTC has nothing to be later than
    return found


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each variant: for each of `PARTS`, per cent, mean and half width (NAME_ci); nan if
    it was not run."""
    rows = _grouped(rows)
    named = rows.assign(variant=np.where(rows.group == "", "", rows.group + ": ") + rows.change)
    found = named[["variant", "group"]].drop_duplicates("variant").set_index("variant")
    for name, policy, column, _ in PARTS:
        mine = named[named.policy == policy].set_index("variant")
        found[name], found[f"{name}_ci"] = mine[column], mine[f"{column}_ci"]
    return found.reset_index()


def _finish(axes, name: str) -> None:
    paper = {part[0]: part[-1] for part in PARTS}[name]
    axes.axvline(paper, color="black", lw=1, ls="--")
    if name == PARTS[-1][0]:
        axes.set_xscale("symlog", linthresh=10)


BARS = Bars(
    "variant", None, {name: f"{name}, %\n(paper: dashed)" for name, *_ in PARTS}, finish=_finish
)


def claims(rows: pd.DataFrame) -> list[Claim]:
    """One a variant, judged by the worst of its parts; `why` names them."""
    found = []
    for row in rows_of(parts(rows)):
        verdicts, ours, paper = {}, [], []
        for name, _, column, number in PARTS:
            mine = getattr(row, name)
            if not mine.known:
                continue
            up_to = column == "vs_justitia"
            verdicts[name] = (
                judge_up_to(mine.mean, mine.half)
                if up_to
                else judge(mine.mean, mine.half, number, whole=100.0)
            )
            ours.append(f"{mine} %")
            paper.append(f"{'up to ' if up_to else ''}{number:+g} %")
        kind = "a variant, to show a cause" if row.group else "no variant, at one density"
        why = f"{kind}: {'; '.join(f'{name} {verdict}' for name, verdict in verdicts.items())}"
        setting = row.variant if "3x" in row.variant else f"2x, {row.variant}"
        what = f"{setting}: {', '.join(verdicts)}"
        verdict = worst(*verdicts.values())
        said = ("Sec. V", what, ", ".join(paper), ", ".join(ours), verdict, why)
        found.append(Claim.judged(*said, directed=False))
    return found


CAUSES = titled(TEXTS.TITLES)(
    "causes",
    GRID,
    compare,
    table,
    lambda canvas, rows, points: BARS(canvas, parts(rows), points),
    claims,
)
