"""Every policy past saturation: figure `saturated` of the systems.

Windows of Azure's conversations at 1 to 2 times the estimated capacity of one L40S. KV memory is as
much as the profile has or much less, without and with a pool of best-effort requests.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid, windows
from twinserve.experiments.study.tables import Table, Text, mean
from twinserve.policies.overview import KNOWN
from twinserve.sim.report.over import with_digits as shown

PROFILE, TRACE, SLO = "llama-3.1-8b@l40s", "azure-2023", "ttft=1,tpot=0.05"
BASE = "vllm"
FIT = texts(__file__, "parts.yaml").FIT
DATA = texts(__file__, "saturated.yaml")
MEMORY, RULES, COLUMNS = DATA.MEMORY, DATA.RULES, DATA.COLUMNS
# so many of a window that the slowest setting runs for a minute at load 2
REQUESTS = {"ample": 400, "tight": 200, "very tight": 200}
LOADS = (1.0, 1.2, 1.5, 2.0)
POOLS = (0, 16)
RULE_LOADS = (1.2, 2.0)  # all loads would take an hour more
# all that a paper or a system has, and the setting that we recommend; not our bounds
POLICIES = (*(name for name, (_, how, _) in KNOWN.items() if how != "ours"), FIT)
SETTING = ("memory", "pool", "load")
GAINS = {"share": ("tokens_per_s", "ratio"), "slo_gain": ("slo_attainment", "difference")}


def grid(window: Mapping[str, Any]) -> Grid:
    """The first requests of a window, until all have ended."""
    asked = [*POLICIES, *RULES.values()]
    quick = (BASE, FIT, "preemptive-wait")
    return Grid(
        {
            "memory": {
                name: {**settings, "requests": REQUESTS[name]} for name, settings in MEMORY.items()
            },
            "pool": POOLS,
            "load": LOADS,
            "policy": asked,
        },
        common={"profile": PROFILE, "slo": SLO, **window},
        columns=COLUMNS,
        # a rule is taken away where its price shows
        where=lambda at: at["policy"] in POLICIES or (at["load"] in RULE_LOADS and not at["pool"]),
        few={
            "memory": ("very tight",),
            "pool": 1,
            "load": RULE_LOADS[1:],
            "policy": (*quick, *(RULES[policy] for policy in quick if policy in RULES)),
        },
        quick={
            "requests": 30,
            "windows": lambda found: windows(found["begins_s"], found["seconds"] / 6),
        },
    )


def _vllms(row: pd.Series) -> str:
    """What `vllm` itself has, in its own row."""
    return shown(row.tokens_per_s, row.tokens_per_s_ci) if row.policy == BASE else ""


SATURATED = Table((*SETTING, "policy"), [*COLUMNS], GAINS, {"policy": BASE}, SETTING)
TEXT = Text(
    f"Throughput over that of `{BASE}` and objectives kept minus `{BASE}`'s, of the same window. "
    "Means over windows, ± half of the 95 % interval.",
    {name: name for name in (*SETTING, "policy")},
    {
        "tokens/s": _vllms,
        "throughput": mean("share"),
        "objectives kept, %": mean("slo_attainment", 100.0),
        "more than vllm, points": mean("slo_gain", 100.0),
    },
)
