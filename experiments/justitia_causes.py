"""Why our numbers are not the paper's: runs that change one thing at a time, at 2x on Llama-7B with demands known.

Everything here is a variant and labelled so; none of them is the default of the workload, the profile or a policy.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from .grid import Point, shown
from .justitia_figures import small
from .justitia_runs import PAPER_BLOCKS, compare
from .justitia_tables import chosen, jct_table, verdict
from .study import Claim, Figure, Scale

PAPER = "-57.5 %, -61.1 %, 92 %, up to +42.3 %"  # no density is said of the first two
BASE = "as drawn, pool of the profile"
TRUTH = "predictor=perfect"
POLICIES = (f"justitia:{TRUTH}", f"justitia:{TRUTH},cost=compute", "vtc", "parrot")


def _policies(option: str) -> dict:
    """The policies with one more option for all of them; names as without it."""
    names = tuple(f"{policy}{',' if ':' in policy else ':'}{option}" for policy in POLICIES)
    return {"policies": names, "fair": names[2]}


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
    ("sizes", "large a sixth, small four times, at 3x", {"sizes": {"small": 4.0, "large": 1 / 6}, "trace": "apps:3x"}),
    ("sizes", "large a sixth, 459 blocks", {"sizes": {"large": 1 / 6}, "num_blocks": PAPER_BLOCKS}),
    ("width", "one request a stage", {"shape": "narrow"}),
    ("width", "one stage", {"shape": "wide"}),
    (
        "VTC",
        "no counter lift",
        {"policies": (*POLICIES[:2], "vtc:counter_lift=false", "parrot"), "fair": "vtc:counter_lift=false"},
    ),
    ("VTC", "outputs cost 1", {"policies": (*POLICIES[:2], "vtc:output_weight=1", "parrot"), "fair": "vtc:output_weight=1"}),
    ("engine", "recompute, no swap", _policies("preemption_mode=recompute")),
    ("engine", "watermark 10 %", _policies("watermark=0.1")),
    ("engine", "whole prompts", _policies("enable_chunked_prefill=false")),
    ("engine", "32 seats", {"max_num_seqs": 32}),
    ("Justitia/C", "V: 50 a step", {"policies": (POLICIES[0], f"{POLICIES[1]},M=50", "vtc", "parrot")}),
    ("Justitia/C", "V: 500 a step", {"policies": (POLICIES[0], f"{POLICIES[1]},M=500", "vtc", "parrot")}),
    ("Justitia/C", "V: all KV tokens a step (eq. 2)", {"policies": (POLICIES[0], f"{POLICIES[1]},M=45264", "vtc", "parrot")}),
)
QUICK = (BASE, "459 blocks (Fig. 3)", "large a sixth, small four times", "no counter lift")


def points(scale: Scale) -> list[Point]:
    return [
        Point({"group": group, "change": change, "seed": seed}, {"policies": POLICIES, "seed": seed} | changed | small(scale))
        for group, change, changed in VARIANTS
        if not scale.quick or change in QUICK
        for seed in scale.seeds
    ]


def _role(policy: str) -> str:
    """What a policy is compared as, whatever options a variant gives it."""
    name = policy.partition(":")[0]
    return "justitia:cost=compute" if name == "justitia" and "cost=compute" in policy else name


def table(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.assign(policy=frame.policy.map(_role))
    return jct_table(frame, ["group", "change"])


def plot(canvas: Canvas, rows: pd.DataFrame, frame: pd.DataFrame) -> None:
    changes = list(dict.fromkeys(rows.change))
    panels = canvas.subplots(1, 4, sharey=True)
    canvas.set_size_inches(13, 0.32 * len(changes) + 1.6)
    names = [f"{chosen(rows, change=c, policy='justitia').group}: {c}".removeprefix(": ") for c in changes]
    shown_here = (
        ("justitia", "vs_vtc", -57.5, "Justitia against VTC, %"),
        ("justitia", "vs_parrot", -61.1, "Justitia against Parrot, %"),
        ("justitia", "not_delayed", 0.92, "no later than under VTC"),
        ("justitia:cost=compute", "vs_justitia", 42.3, "Justitia/C against Justitia, %"),
    )
    for panel, (policy, name, paper, title) in zip(panels, shown_here, strict=True):
        found = [chosen(rows, change=c, policy=policy) for c in changes]
        panel.barh(range(len(changes)), [r[name] for r in found], xerr=np.nan_to_num([r[f"{name}_ci"] for r in found]))
        panel.axvline(paper, color="black", lw=1, ls="--")
        panel.set_title(f"{title} (paper: dashed)", fontsize=8)
    panels[-1].set_xscale("symlog", linthresh=10)
    panels[0].set_yticks(range(len(changes)), names, fontsize=7)
    panels[0].invert_yaxis()


def claims(rows: pd.DataFrame) -> list[Claim]:
    found = []
    for change in dict.fromkeys(rows.change):
        row = chosen(rows, change=change, policy="justitia")
        compute = chosen(rows, change=change, policy="justitia:cost=compute")
        ours = ", ".join(
            f"{shown(mean, half)} %"
            for mean, half in (
                (row.vs_vtc, row.vs_vtc_ci),
                (row.vs_parrot, row.vs_parrot_ci),
                (100 * row.not_delayed, 100 * row.not_delayed_ci),
                (compute.vs_justitia, compute.vs_justitia_ci),
            )
        )
        near = verdict(-57.5, row.vs_vtc, 0.0), verdict(-61.1, row.vs_parrot, 0.0)
        said = "agrees" if set(near) == {"agrees"} else "differs" if "differs" in near else "direction agrees"
        setting = f"{row.group}: {change}" if row.group else change
        setting = setting if "3x" in change else f"2x, {setting}"
        what = f"{setting}: Justitia against VTC, against Parrot, no later than under VTC; Justitia/C against Justitia"
        found.append(Claim("Sec. V", what, PAPER, ours, said, "variant" if row.group else ""))
    return found


CAUSES = Figure("causes", "one thing changed at a time", points, compare, table, plot, claims)
