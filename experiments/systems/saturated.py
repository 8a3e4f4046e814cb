"""Every policy past saturation: figure `saturated` of the systems.

Windows of Azure's conversations at 1 to 2 times the estimated capacity of one L40S. KV memory is as
much as the profile has or much less, without and with a pool of best-effort requests. At two of the
loads, without a pool, the engine's steps take 10 % less and 10 % more time as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid, windows
from twinserve.experiments.study.output import markdown_table
from twinserve.experiments.study.tables import Table
from twinserve.policies.overview import KNOWN
from twinserve.sim.report.over import with_digits as shown
from twinserve.sim.sweep.baseline import baseline_of

PROFILE, TRACE, SLO = "llama-3.1-8b@l40s", "azure-2023", "ttft=1,tpot=0.05"
BASE = "vllm"
FIT = texts(__file__, "parts.yaml").FIT
DATA = texts(__file__, "saturated.yaml")
MEMORY, RULES, COLUMNS = DATA.MEMORY, DATA.RULES, DATA.COLUMNS
# so many of a window that the slowest setting runs for a minute at load 2
REQUESTS = {"ample": 400, "tight": 200, "very tight": 200}
LOADS = (1.0, 1.2, 1.5, 2.0)
POOLS = (0, 16)
ERROR = 0.1
ERROR_LOADS = (1.2, 2.0)  # all loads would take an hour more
# all that a paper or a system has, and the setting that we recommend; not our bounds
POLICIES = (*(name for name, (_, how, _) in KNOWN.items() if how != "ours"), FIT)
COLLAPSED = 0.5  # of vllm's throughput: below that a policy has collapsed
SETTING = ("memory", "pool", "load")
GAINS = {"share": ("tokens_per_s", "ratio"), "slo_gain": ("slo_attainment", "difference")}


def grid(window: Mapping[str, Any]) -> Grid:
    """The first requests of a window, until all have ended. The engine's steps take `step` times as
    long as those that set the arrivals and the objectives; policies know."""
    factors = (1.0, 1 - ERROR, 1 + ERROR)
    others = [(1.0, without) for *_, without in RULES.values()]
    asked = [(step, policy) for step in factors for policy in POLICIES] + others
    quick = (BASE, FIT, "preemptive-wait")
    known = {*quick, *(RULES[policy][-1] for policy in quick if policy in RULES)}
    return Grid(
        {
            "memory": {
                name: {**settings, "requests": REQUESTS[name]} for name, settings in MEMORY.items()
            },
            "pool": POOLS,
            "load": LOADS,
            ("step", "policy"): {
                (step, policy): {"policy": policy, "off": ["step", step]} for step, policy in asked
            },
        },
        common={"profile": PROFILE, "slo": SLO, **window},
        columns=COLUMNS,
        # a rule is taken away where its price shows: as the steps are, without a pool
        where=lambda at: (
            (at["load"] in ERROR_LOADS and not at["pool"])
            or (at["step"] == 1.0 and at["policy"] in POLICIES)
        ),
        few={
            "memory": ("very tight",),
            "pool": 1,
            "load": ERROR_LOADS[1:],
            ("step", "policy"): [pair for pair in asked if pair[1] in known],
        },
        quick={
            "requests": 30,
            "windows": lambda found: windows(found["begins_s"], found["seconds"] / 6),
        },
    )


# -- table -----------------------------------------------------------------------------------------
def saturated_table(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting and policy with the steps as they are, means over windows.

    share       tokens per second over vllm's, of the same window
    slo_gain    objectives kept, minus vllm's
    elasticity  relative change of tokens per second for a relative change of step times: central
                difference of 10 % less and 10 % more. -1: as slow as the engine; nan: not run
    """
    rows = points[points.step == 1.0]
    lower, higher = (
        baseline_of(rows, points[points.step == step], [*SETTING, "seed", "policy"]).tokens_per_s
        for step in (1 - ERROR, 1 + ERROR)
    )
    rows = rows.assign(elasticity=(higher - lower) / (2 * ERROR * rows.tokens_per_s))
    values = ["elasticity", *(name for name in points if name in COLUMNS)]
    return Table((*SETTING, "policy"), values, GAINS, {"policy": BASE}, SETTING)(rows)


def saturated_text(table: pd.DataFrame) -> str:
    """A table for each memory, without and with a pool, and the rules behind the collapses."""
    text = [
        f"Of each load: throughput over that of `{BASE}`, then objectives kept minus `{BASE}`'s in "
        "points; last the elasticity of throughput to step times. The row of "
        f"`{BASE}` has tokens per second and per cent kept. Means over windows, ± half of the 95 % "
        f"interval. **Bold**: less than {COLLAPSED:g} of `{BASE}`'s throughput, told.\n"
    ]
    without = {other for *_, other in RULES.values()}
    for (memory, pool), part in table.groupby(["memory", "pool"], sort=False):
        own = part[~part.policy.isin(without)]
        loads = list(dict.fromkeys(own.load))
        moved = [load for load in loads if own.elasticity[own.load == load].notna().any()]
        rows = []
        for policy, mine in own.groupby("policy", sort=False):
            at = mine.set_index("load")
            ends = [
                shown(at.elasticity[x], at.elasticity_ci[x], digits=2) if x in at.index else ""
                for x in moved
            ]
            rows.append([f"`{policy}`", *(_cell(policy, at.loc[x]) for x in loads), *ends])
        span = own[own.policy == BASE].span_s
        beside = f", beside a pool of {pool}" if pool else ""
        header = ["", *(f"load {x:g}" for x in loads), *(f"elasticity, {x:g}" for x in moved)]
        text.append(
            f"**{memory}**{beside} (requests arrive for {span.min():.0f} to {span.max():.0f} s)\n\n"
            f"{markdown_table(header, rows)}"
        )
    return "\n".join([*text, _rules(table)])


def _cell(policy: str, row: pd.Series) -> str:
    if policy == BASE:
        kept = shown(100 * row.slo_attainment, 100 * row.slo_attainment_ci, digits=2)
        return f"{shown(row.tokens_per_s, row.tokens_per_s_ci)}; {kept}"
    share, half = row["share"], row.share_ci
    said = f"{shown(share, half)}; {shown(100 * row.slo_gain, 100 * row.slo_gain_ci, digits=2)}"
    return f"**{said}**" if share + half < COLLAPSED else said


def _rules(table: pd.DataFrame) -> str:
    """What the throughput of a policy is with and without the rule of `RULES`, of vllm's."""
    rows = []
    for policy, (rule, whose, other) in RULES.items():
        pair = [table[(table.policy == name) & (table.pool == 0)] for name in (policy, other)]
        both = pair[0].merge(pair[1], on=list(SETTING), suffixes=("", "_other"))
        rows += [
            [
                f"`{policy}`",
                f"{rule} ({whose})",
                f"`{other}`",
                f"{row.memory}, {row.load:g}",
                shown(row.share, row.share_ci),
                shown(row.share_other, row.share_ci_other),
            ]
            for row in both.itertuples()
        ]
    header = ["policy", "rule", "without the rule", "memory, load", "share", "without"]
    return f"**Rules and their price**\n\n{markdown_table(header, rows)}"
