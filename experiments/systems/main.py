"""The four systems side by side: `twinserve study systems`.

No paper has this: BROS, Echo, LayerKV, Justitia and their baselines on the same hardware, model and
recorded traces.

loads, overload, loads-tight, four-gpus, four-gpus-tight
                       every system at several loads, with loose and tight objectives, on one GPU
                       and on four
prefixes               every system without and with a prefix cache
documents-systems      those that know offline requests, with questions on shared documents
ladder-fit, ladder, documents, applications
                       the parts of BROS with chunks that fit, of BROS and LayerKV, of Echo, of
                       Justitia, one more at a time
everyone               every policy there is on one hybrid workload and one of applications
saturated              every policy past saturation, with less and less memory

docs/systems.md says what came out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from twinserve.experiments.justitia.runs import compare
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import Bars, lines_of
from twinserve.experiments.study.grid import Grid, joined, windows
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Figure, Scale, Study, titled
from twinserve.experiments.study.tables import BEFORE, FIRST, Table
from twinserve.experiments.systems import saturated
from twinserve.policies.registry import policy_names
from twinserve.sim.setup.config import PAPERS_ENGINE

Part = str | tuple[str, bool]
Parts = Mapping[str, Mapping[str, Part]]
PARTS = texts(__file__, "parts.yaml")
SYSTEMS = tuple(PARTS.LOOKS)
PREFIXES: Parts = {
    said: {name: (policy, cached) for name, policy in PARTS.CACHED.items()}
    for said, cached in (("no prefix cache", False), ("prefix cache", True))
}
FOUR_GPUS = "llama-3.1-70b@h100:tp4"
TIGHT = "ttft=0.4,tpot=0.05,k=5"  # TTFT as by default, TPOT 50 ms in place of 200
APPLICATIONS_PROFILE = "llama-7b@a100-pcie-40g"
COMMON = {"profile": "llama-3.1-8b@h100", **PAPERS_ENGINE}
POOL = {"pool": 16}
# prompts of 9,900 tokens on average, 88 % of them text of a document, 8 on each; so many that some
# are left when the online requests have ended; a prefix block as long as in Mooncake's trace
QUESTIONS = {"documents": "next-qa", "requests": 4_000, "block_tokens": 512, "priority": 1}
# The run ends with the online requests. Best-effort tokens are counted while these arrive.
BESIDE = {"beside": QUESTIONS, "until_online": 1.0}
# solves an integer programme wherever few run: hours for a workload of this size
# (docs/optimality.md)
BOUND = "bros-exact"
# on applications their runs take minutes, and one seed shows why not to
TURNS = ("mlfq", "preemptive-wait")
# where the window of each seed begins: ten minutes apart, which is all of the recording, then those
# in between
BEGINS = (*range(0, 3600, 600), *range(300, 3000, 600))
# trace -> seconds of the recording in a window: about 160 and 90 s of the run at load 1, several
# times what a request takes
WINDOWS = {"mooncake": 60.0, "azure-2023": 300.0}
LOADS, COLUMNS, LABELS = PARTS.LOADS, PARTS.COLUMNS, PARTS.LABELS
SATURATION = dict.fromkeys(WINDOWS, (1.0,))
OVERLOAD = dict.fromkeys(WINDOWS, (1.25,))
# Left out on Azure, where six of seven prompts are no longer than a chunk of `bros:chunk=2048`: the
# same with whole prompts; and in the variants both, as runs of them take up to ten times as long.
LEFT_OUT, LEFT_OUT_OF_VARIANTS = {"bros"}, {"bros", PARTS.CHUNK}
# loads of ladders: around the one from which a queue builds up
LADDER_LOADS = {"mooncake": (0.75, 1.0), "azure-2023": (1.0, 1.25)}
# Azure's trace names no prefixes: with and without a cache is the same there
UNNAMED = ("azure-2023",)
PREFIX_LOADS = {"mooncake": LADDER_LOADS["mooncake"]}
DOCUMENT_LOADS = dict.fromkeys(WINDOWS, (0.5, 0.75))  # which leave something for offline work
PACES = ("2x", "3x")  # 300 applications in 9 and in 6 minutes
WHILE_ONLINE = {"be_tokens_per_s": "classes.be.window_total_token_throughput"}


GAINS = {"slo_gain": ("slo_attainment", "difference"), "be_gain": ("be_tokens_per_s", "change")}
WORDS = ("more", "less", "within the spread", "the same")


figure = titled(texts(__file__).TITLES)


# -- figures ---------------------------------------------------------------------------------------
def grid(trace: str, loads: Sequence[float], parts: Mapping, more: Mapping[str, Any]) -> Grid:
    """parts: axes -> labels -> settings; more: further settings of all runs."""
    beside = "beside" in more
    return Grid(
        {"trace": {trace: windows_of(trace)}, "load": loads, **parts},
        common=COMMON | more,
        columns=COLUMNS | ({**WHILE_ONLINE, "left": "offline_left"} if beside else {}),
        few={"load": loads[-1:] if "policy" in parts else 1},
        quick={
            "windows": windows(BEGINS, WINDOWS[trace] / 6),
            "beside": QUESTIONS | {"requests": 200},
        },
    )


def windows_of(trace: str) -> dict[str, Any]:
    return {"trace": trace, "windows": windows(BEGINS, WINDOWS[trace])}


def settings_of(part: Part) -> dict[str, Any]:
    """Of a policy, or of one with prefix caching as said."""
    return (
        {"policy": part}
        if isinstance(part, str)
        else {"policy": part[0], "prefix_caching": part[1]}
    )


def of_loads(name: str, at: Mapping[str, Sequence[float]], **more: str) -> Figure:
    """Every system at these loads. more: settings of a variant."""
    left_out = LEFT_OUT_OF_VARIANTS if more else LEFT_OUT
    some = [policy for policy in SYSTEMS if policy not in left_out]
    grids = [
        grid(trace, loads, {"policy": some if trace == "azure-2023" else SYSTEMS}, POOL | more)
        for trace, loads in at.items()
    ]
    by = ("trace", "load", "policy")
    table = Table(by, None, GAINS, FIRST, by[:2], verdicts={"verdict": ("slo_gain", 0.0, WORDS)})
    lines = lines_of("trace", LABELS, "load", "policy", PARTS.LOOKS, _log_times, xlabel=LOAD)
    plot = lines if at is LOADS else Bars("policy", "load", SHARES, split="trace", legend=TWO)
    return figure(name, joined(*grids), run, table, plot)


def of_parts(
    name: str,
    groups: Parts,
    at: Mapping[str, Sequence[float]],
    base: str,
    more: Mapping[str, Any] = POOL,
) -> Figure:
    """Every part of every group, against the first of its group or the one before."""
    grids = []
    for trace, loads in at.items():
        parts = {
            (system, name, settings["policy"]): settings
            for system, group in groups.items()
            for name, part in group.items()
            # without named prefixes a cache makes no difference
            if isinstance(part, str) or trace not in UNNAMED or more is BESIDE
            for settings in [settings_of(part)]
        }
        grids.append(grid(trace, loads, {("system", "part", "policy"): parts}, more))
    by = ("trace", "load", "system", "part", "policy")
    table = Table(by, None, GAINS, base, by[:3], verdicts={"verdict": ("slo_gain", 0.0, WORDS)})
    plot = Bars("part", "load", SHARES, group="system", split="trace", legend=TWO)
    return figure(name, joined(*grids), run, table, plot)


LOAD = "online load / estimated capacity"
TWO = ("lower load", "higher load")
SHARES = {name: LABELS[name][0] for name in ("slo_attainment", "be_tokens_per_s")}


def _log_times(axes, metric: str) -> None:
    if metric in ("ttft_s", "tpot_s"):
        axes.set_yscale("log")


# -- applications, and every policy ----------------------------------------------------------------
def applications_table(points: pd.DataFrame) -> pd.DataFrame:
    """JCT of the policies of each group. jct_gain: mean JCT over that of the part before (`ladder`)
    or of the first of the group (others), minus 1, of the same applications."""
    found = []
    for group, parts in PARTS.APPLICATIONS.items():
        rows = [points[points.policy == p].assign(part=part) for part, p in parts.items()]
        table = Table(
            ("pace", "group", "part", "policy"),
            ("mean_s", "p90_s", "not_delayed", "worst"),
            {"jct_gain": ("mean_s", "change")},
            BEFORE if group == "ladder" else FIRST,
            ("pace",),
            verdicts={"verdict": ("jct_gain", 0.0, WORDS)},
        )
        found.append(table(pd.concat(rows, ignore_index=True).assign(group=group)))
    return pd.concat(found).sort_values("pace", kind="stable", ignore_index=True)


def _log_seconds(axes, metric: str) -> None:
    if metric.endswith("_s"):
        axes.set_xscale("log")
        axes.set_xticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
        axes.minorticks_off()
        axes.set_xlim(left=10.0)


PARTS_OF_APPLICATIONS = dict.fromkeys(
    p for parts in PARTS.APPLICATIONS.values() for p in parts.values()
)
APPLICATIONS_FIGURE = figure(
    "applications",
    Grid(
        {"pace": {pace: {"trace": f"apps:{pace}"} for pace in PACES}},
        common={
            "policies": [*PARTS_OF_APPLICATIONS],
            "profile": APPLICATIONS_PROFILE,
            "count": 300,
        },
        few={"pace": 1},
        quick={"count": 40},
    ),
    compare,
    applications_table,
    Bars(
        "part",
        "pace",
        {
            "mean_s": "2x / 3x\nmean JCT, s",
            "p90_s": "2x / 3x\n90th percentile of JCT, s",
            "not_delayed": "2x / 3x\nnot later than under VTC",
        },
        group="group",
        legend=TWO,
        finish=_log_seconds,
    ),
)
HYBRID = Grid(
    {"workload": {"hybrid": {}}, "policy": [p for p in (*policy_names(), PARTS.FIT) if p != BOUND]},
    common={"preset": "bros-hybrid", "duration": 60.0, "pool": 128},
    columns={name: path for name, path in COLUMNS.items() if name != "window_s"},
    quick={"duration": 10.0, "pool": 16},
)


def everyone(scale: Scale) -> list[Point]:
    """The setting of the BROS paper, shortened; and Justitia's applications, JCT in seconds."""
    common = {"trace": "apps:2x", "profile": APPLICATIONS_PROFILE, "slo": "none", **PAPERS_ENGINE}
    paths = {"jct_s": "applications.mean_jct_s", "jct_p90_s": "applications.p90_jct_s"}
    jct = Grid({**HYBRID.vary, "workload": {"applications": {}}}, common, paths)
    first = [p for p in jct(scale) if p.axes["policy"] not in TURNS or p.axes["seed"] == 0]
    return HYBRID(scale) + ([] if scale.quick else first)


STUDY = Study(
    "systems",
    "",
    [
        of_loads("loads", LOADS),
        of_loads("loads-tight", SATURATION, slo=TIGHT),
        of_loads("four-gpus", SATURATION, profile=FOUR_GPUS),
        of_loads("four-gpus-tight", SATURATION, profile=FOUR_GPUS, slo=TIGHT),
        of_loads("overload", OVERLOAD),
        of_parts("ladder-fit", PARTS.FIT_LADDER, LADDER_LOADS, BEFORE),
        of_parts("ladder", PARTS.LADDERS, LADDER_LOADS, BEFORE),
        of_parts("prefixes", PREFIXES, PREFIX_LOADS, FIRST),
        of_parts("documents", PARTS.DOCUMENTS, DOCUMENT_LOADS, BEFORE, BESIDE),
        of_parts("documents-systems", PARTS.DOCUMENT_SYSTEMS, DOCUMENT_LOADS, FIRST, BESIDE),
        APPLICATIONS_FIGURE,
        figure("everyone", everyone, run, Table(("workload", "policy"))),
        figure(
            "saturated",
            saturated.grid(windows_of(saturated.TRACE)),
            run,
            saturated.SATURATED,
            text=saturated.TEXT,
        ),
    ],
)
