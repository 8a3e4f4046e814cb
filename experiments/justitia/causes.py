"""Why our numbers are not the paper's: runs that change one thing at a time, at 2x on Llama-7B with
demands known.

Everything here is a variant and labelled so; none of them is the default of the workload, the
profile or a policy.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.figures import UP_TO, small
from twinserve.experiments.justitia.runs import LLAMA_13B, PAPER_BLOCKS, compare
from twinserve.experiments.justitia.tables import PER_CENT, jct_table, judge_up_to
from twinserve.experiments.study.study import Figure, Scale
from twinserve.experiments.study.verdict import Claim, Verdict, judge, worst
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import shown

# per cent; no density is said of the first two. Nothing is claimed of fairness here, which takes
# more seeds (fairness.py)
PAPER = {"against VTC": -57.5, "against Parrot": -61.1, "Justitia/C against Justitia": UP_TO}
SHOWN = (  # of each of them: policy, column in per cent
    ("justitia", "vs_vtc"),
    ("justitia", "vs_parrot"),
    ("justitia:cost=compute", "vs_justitia"),
)
BASE = "as drawn, pool of the profile"
TRUTH = "predictor=perfect"
LIFT, WEIGHT = "counter_lift=false", "output_weight=1"
POLICIES = (f"justitia:{TRUTH}", f"justitia:{TRUTH},cost=compute", "vtc", "parrot", f"srjf:{TRUTH}")


def _policies(option: str) -> dict:
    """The policies with one more option for all of them; names as without it."""
    names = tuple(f"{policy}{',' if ':' in policy else ':'}{option}" for policy in POLICIES)
    return {"policies": names, "fair": names[2]}


def _clock(M: int) -> dict:
    """Justitia/C with a fixed M beside Justitia; nothing else depends on it."""
    return {"policies": (POLICIES[0], f"{POLICIES[1]},M={M}"), "fair": POLICIES[0]}


# group, what is changed, arguments of `compare`
VARIANTS = (
    ("", BASE, {}),
    ("pool", "1,415 blocks", {"num_blocks": 1415}),
    ("pool", "918 blocks", {"num_blocks": 918}),
    ("pool", "459 blocks (Fig. 3)", {"num_blocks": PAPER_BLOCKS}),
    ("arrivals", "twice as fast", {"rate_scale": 2.0}),
    ("arrivals", "six times as fast", {"rate_scale": 6.0}),
    ("sizes", "large a sixth (DM as in Fig. 3)", {"sizes": {"large": 1 / 6}}),
    ("sizes", "small four times as large", {"sizes": {"small": 4.0}}),
    ("sizes", "large a sixth, small four times", {"sizes": {"small": 4.0, "large": 1 / 6}}),
    (
        "sizes",
        "large a sixth, small four times, at 3x",
        {"sizes": {"small": 4.0, "large": 1 / 6}, "trace": "apps:3x"},
    ),
    ("sizes", "large a sixth, 459 blocks", {"sizes": {"large": 1 / 6}, "num_blocks": PAPER_BLOCKS}),
    ("width", "one request a stage", {"shape": "narrow"}),
    ("width", "one stage", {"shape": "wide"}),
    ("VTC", "no counter lift", {"policies": (POLICIES[0], f"vtc:{LIFT}"), "fair": f"vtc:{LIFT}"}),
    (
        "VTC",
        "outputs cost 1",
        {"policies": (POLICIES[0], f"vtc:{WEIGHT}"), "fair": f"vtc:{WEIGHT}"},
    ),
    ("engine", "recompute, no swap", _policies("preemption_mode=recompute")),
    ("engine", "watermark 10 %", _policies("watermark=0.1")),
    ("engine", "whole prompts", _policies("enable_chunked_prefill=false")),
    ("engine", "32 seats", {"max_num_seqs": 32, "num_blocks": 2829}),  # the memory of all seats
    ("Justitia/C", "V: 50 a step", _clock(50)),
    ("Justitia/C", "V: 500 a step", _clock(500)),
    ("Justitia/C", "V: all KV tokens a step (eq. 2)", _clock(45264)),
    ("Llama-13B", "as drawn", {"profile": LLAMA_13B}),
    (
        "Llama-13B",
        "prompts in a quarter of the time",
        {"profile": LLAMA_13B, "scaled": {"prefill": 0.25}},
    ),
    ("Llama-13B", "1,199 blocks (half)", {"profile": LLAMA_13B, "num_blocks": 1199}),
    (
        "Llama-13B",
        "1,199 blocks, prompts in a quarter of the time",
        {"profile": LLAMA_13B, "num_blocks": 1199, "scaled": {"prefill": 0.25}},
    ),
    ("Llama-13B", "large a sixth", {"profile": LLAMA_13B, "sizes": {"large": 1 / 6}}),
)
QUICK = (BASE, "459 blocks (Fig. 3)", "large a sixth, small four times", "no counter lift")


def points(scale: Scale) -> list[Point]:
    return [
        Point(
            {"group": group, "change": change, "seed": seed},
            {"policies": POLICIES, "seed": seed} | changed | small(scale),
        )
        for group, change, changed in VARIANTS
        if not scale.quick or change in QUICK
        for seed in scale.seeds
    ]


def _role(policy: str) -> str:
    """What a policy is compared as, whatever options a variant gives it."""
    name = policy.partition(":")[0]
    return "justitia:cost=compute" if name == "justitia" and "cost=compute" in policy else name


def _grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """With the group of the base, which has no name: read from a file it is nan."""
    return rows.assign(group=rows.group.fillna(""))


def table(frame: pd.DataFrame) -> pd.DataFrame:
    frame = _grouped(frame)
    found = jct_table(frame.assign(policy=frame.policy.map(_role)), ["group", "change"])
    fair = [
        name for name in found if name.startswith(("not_delayed", "worst", "half_delay", "ratio_"))
    ]
    found.loc[found.vs_vtc.isna(), fair] = np.nan  # a run without VTC has nothing to be later than
    return found


def plot(canvas: Canvas, rows: pd.DataFrame, frame: pd.DataFrame) -> None:
    rows = _grouped(rows)
    changes = list(dict.fromkeys(zip(rows.group, rows.change, strict=True)))
    panels = canvas.subplots(1, len(PAPER), sharey=True)
    canvas.set_size_inches(13, 0.32 * len(changes) + 1.6)
    parts = [_parts(rows, *change) for change in changes]
    for panel, (name, paper) in zip(panels, PAPER.items(), strict=True):
        means, halves = zip(*(part[name] for part in parts), strict=True)
        panel.barh(range(len(changes)), means, xerr=np.nan_to_num(halves))
        panel.axvline(paper, color="black", lw=1, ls="--")
        panel.set_title(f"{name}, % (paper: dashed)", fontsize=8)
    panels[-1].set_xscale("symlog", linthresh=10)
    names = [": ".join(filter(None, change)) for change in changes]
    panels[0].set_yticks(range(len(changes)), names, fontsize=7)
    panels[0].invert_yaxis()


def claims(rows: pd.DataFrame) -> list[Claim]:
    """One a variant, judged by the worst of its parts; `why` names them."""
    rows, found = _grouped(rows), []
    for group, change in dict.fromkeys(zip(rows.group, rows.change, strict=True)):
        parts = {
            name: part for name, part in _parts(rows, group, change).items() if np.isfinite(part[0])
        }
        verdicts = {name: _judged(name, *part) for name, part in parts.items()}
        setting = f"{group}: {change}" if group else change
        setting = setting if "3x" in change else f"2x, {setting}"
        ours = ", ".join(f"{shown(*part)} %" for part in parts.values())
        paper = ", ".join(
            f"{'up to ' if name.startswith('Justitia/C') else ''}{PAPER[name]:+g} %"
            for name in parts
        )
        kind = "a variant, to show a cause" if group else "no variant, at one density"
        why = f"{kind}: {'; '.join(f'{name} {verdict}' for name, verdict in verdicts.items())}"
        found.append(
            Claim.judged(
                "Sec. V",
                f"{setting}: {', '.join(parts)}",
                paper,
                ours,
                worst(*verdicts.values()),
                why,
                directed=False,
            )
        )
    return found


def _parts(rows: pd.DataFrame, group: str, change: str) -> dict[str, tuple[float, float]]:
    """Mean and half width, per cent, of ours for each number of the paper; nan where it was not
    run."""
    found = dict.fromkeys(PAPER, (np.nan, np.nan))
    for name, (policy, column) in zip(PAPER, SHOWN, strict=True):
        for _, row in rows[
            (rows.group == group) & (rows.change == change) & (rows.policy == policy)
        ].iterrows():
            found[name] = row[column], row[f"{column}_ci"]
    return found


def _judged(name: str, mean: float, half: float) -> Verdict:
    paper = PAPER[name]
    if name.startswith("Justitia/C"):
        return judge_up_to(mean, half, paper)
    return judge(mean, half, paper, whole=PER_CENT)


CAUSES = Figure("causes", "one thing changed at a time", points, compare, table, plot, claims)
