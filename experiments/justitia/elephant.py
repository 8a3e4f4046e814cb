"""Fig. 11 of Justitia's paper: a large application while small ones keep coming, and how late fair
sharing would end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.figures import fair_seeds
from twinserve.experiments.justitia.runs import (
    LLAMA_7B,
    fluid_iterations,
    inputs_of,
    resized,
    seconds_at,
)
from twinserve.experiments.justitia.tables import chosen, plain
from twinserve.experiments.study.study import Figure, Scale
from twinserve.experiments.study.verdict import Claim, judge_bound, worst
from twinserve.sim.results.metrics_jobs import job_completion
from twinserve.sim.setup.run import run_policy
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds, shown
from twinserve.traces.apps.generate import applications
from twinserve.traces.workload import Workload

MICE = ("KBQAV", "CC", "ALFWI")
POLICIES = ("justitia:predictor=perfect", "srjf:predictor=perfect")
ROOM = 2.0  # per cent that something bounded may grow by
CROWDS = {  # how large the summary is, and the pool
    "as drawn, profile": ({}, None),
    "summary a 6th, 400 blocks": ({"large": 1 / 6}, 400),
    "summary a 36th, 400 blocks": ({"large": 1 / 36}, 400),
}
CROWD_WHY = {
    "as drawn, profile": (
        "one small application a second does not fill this pool, as it does one of 400 blocks "
        "(other rows): it is later "
        "under both policies alike, and ends before the 400th small one comes"
    ),
    "summary a 6th, 400 blocks": (
        "small applications fill the pool, N grows, V slows down: GPS itself ends it the later "
        "the more of them come (`gps_s`)"
    ),
}


# -- runs ------------------------------------------------------------------------------------------
def crowd_of(mice: int, seed: int, sizes: Mapping[str, float]) -> Workload:
    """A summary (MRS) at 0 s and then a small application every second. sizes: see `resized`."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x11CE,)))
    kinds = ["MRS", *(MICE[i] for i in rng.integers(len(MICE), size=mice).tolist())]
    return applications(np.arange(mice + 1.0), seed, kinds, resized(sizes))


def elephant(
    policies: Sequence[str],
    mice: int,
    seed: int,
    num_blocks: int | None = None,
    sizes: Mapping[str, float] | None = None,
) -> list[dict]:
    """A summary (MRS) at 0 s and then a small application every second: a row a policy, with the
    JCT of the summary (elephant_s), the mean of the small ones (mice_s), and of `fair_end` gps_s
    and bound_s. sizes: see `resized`."""
    workload = crowd_of(mice, seed, sizes or {})
    inputs = inputs_of(
        workload, policies, seed, LLAMA_7B, {} if num_blocks is None else {"num_blocks": num_blocks}
    )
    found = []
    for spec in inputs.policies:
        rows = run_policy(inputs, spec).rows
        jct = job_completion(rows.requests)["jct_s"]
        gps_s, bound_s = fair_end(
            workload, rows.steps["end_s"].to_numpy(), inputs.hardware.kv_tokens
        )
        found.append(
            {
                "policy": spec.label,
                "elephant_s": float(jct[workload.group_names[0]]),
                "mice_s": float(jct.drop(workload.group_names[0]).mean()) if mice else float("nan"),
                "gps_s": gps_s,
                "bound_s": bound_s,
            }
        )
    return found


def fair_end(workload: Workload, ends_s: np.ndarray, M: int) -> tuple[float, float]:
    """Seconds at which GPS ends application 0, which came at 0 s, and the same with bound 2 of
    docs/justitia.md on top. Arguments: `fluid_iterations`.

    Bound 2 is proven for one graph among applications of one stage. The small ones here have
    several.
    """
    demands, ends = fluid_iterations(workload, ends_s, M)
    outputs, mine, gps = workload.output_tokens, workload.group == 0, float(ends[0])
    path = pd.Series(outputs[mine]).groupby(workload.stage[mine]).max()
    bound = gps + path.sum() + demands[0] / M + (len(path) + 1) * outputs.max()
    return seconds_at(gps, ends_s), seconds_at(bound, ends_s)


# -- figure ----------------------------------------------------------------------------------------
def points(scale: Scale) -> list[Point]:
    counts = (0, 6) if scale.quick else (0, 100, 200, 400, 600)
    return [
        Point(
            {"crowd": crowd, "mice": mice, "seed": seed},
            {
                "policies": POLICIES,
                "mice": mice,
                "seed": seed,
                "sizes": sizes,
                "num_blocks": blocks,
            },
        )
        for crowd, (sizes, blocks) in CROWDS.items()
        for mice in counts
        for seed in fair_seeds(scale)
    ]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """grown: JCT of the summary above that with the number of small ones before, in the same seed,
    per cent."""
    frame = frame.assign(policy=frame.policy.map(plain))
    before = frame.sort_values("mice").groupby(["crowd", "policy", "seed"]).elephant_s.shift()
    frame["grown"] = 100 * (frame.elephant_s / before - 1)
    return over_seeds(
        frame, ["crowd", "policy", "mice"], ["elephant_s", "mice_s", "grown", "gps_s", "bound_s"]
    )


def plot(canvas: Canvas, rows: pd.DataFrame, frame: pd.DataFrame) -> None:
    crowds = list(dict.fromkeys(rows.crowd))
    for panel, crowd in zip(np.atleast_1d(canvas.subplots(1, len(crowds))), crowds, strict=True):
        for policy, part in rows[rows.crowd == crowd].groupby("policy", sort=False):
            panel.errorbar(
                part.mice,
                part.elephant_s,
                np.nan_to_num(part.elephant_s_ci),
                marker="o",
                label=policy,
            )
            if policy == "justitia":
                panel.plot(part.mice, part.gps_s, color="grey", ls="--", label="GPS ends it")
                panel.plot(part.mice, part.bound_s, color="grey", ls=":", label="GPS and bound 2")
        panel.set_title(crowd, fontsize=8)
        panel.set(xlabel="small applications", ylabel="JCT of the summary, s", ylim=(0, None))
    canvas.axes[0].legend(fontsize=8)


def claims(rows: pd.DataFrame) -> list[Claim]:
    found = []
    for crowd, part in rows.groupby("crowd", sort=False):
        before, most = sorted(set(part.mice))[-2:]
        last = {p: chosen(part, policy=p, mice=most) for p in ("srjf", "justitia")}
        verdict = worst(
            judge_bound(last["srjf"].grown - ROOM, last["srjf"].grown_ci),
            judge_bound(ROOM - last["justitia"].grown, last["justitia"].grown_ci),
        )
        first = {p: chosen(part, policy=p, mice=before).elephant_s for p in last}
        ours = ", ".join(
            f"{p} {first[p]:.0f} to {row.elephant_s:.0f} s ({shown(row.grown, row.grown_ci)} %)"
            for p, row in last.items()
        )
        ours += (
            f"; GPS ends it at {last['justitia'].gps_s:.0f} s, with bound 2 "
            f"{last['justitia'].bound_s:.0f} s"
        )
        what = f"elephant as small applications go from {before} to {most}; {crowd}"
        why = CROWD_WHY.get(
            crowd, "the summaries of the seeds differ in size; no run here says more"
        )
        found.append(
            Claim.judged(
                "Fig. 11", what, "grows under SRJF, bounded under Justitia", ours, verdict, why
            )
        )
    return found


FIG11 = Figure("fig11", "an elephant among mice", points, elephant, table, plot, claims)
