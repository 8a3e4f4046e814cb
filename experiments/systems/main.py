"""The four systems side by side: `twinserve study systems`.

No paper has this: BROS, Echo, LayerKV, Justitia and their baselines on the same hardware, model and
recorded traces.

loads, overload, loads-tight, four-gpus, four-gpus-tight
                       everybody at several loads, with loose and tight objectives, on one GPU and
                       on four
prefixes               everybody without and with a prefix cache
documents-systems      those that know offline requests, beside questions on shared documents
ladder-fit, ladder, documents, applications
                       the parts of BROS with chunks that fit, of BROS and LayerKV, of Echo, of
                       Justitia, one more at a time
ledgers, documents-ledgers
                       each scheduler on other KV ledgers
everyone               every policy there is on one hybrid workload and one of applications
saturated              every policy past saturation, with less and less memory

docs/systems.md says what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinserve.experiments.justitia.runs import compare
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.systems.parts import (
    APPLICATIONS,
    CHUNK,
    DOCUMENT_LEDGERS,
    DOCUMENT_SYSTEMS,
    DOCUMENTS,
    FIT,
    FIT_LADDER,
    LADDERS,
    LEDGERS,
    PREFIXES,
    SYSTEMS,
    Part,
    Parts,
)
from twinserve.experiments.systems.runs import (
    APPLICATIONS_PROFILE,
    FOUR_GPUS,
    TIGHT,
    beside_documents,
    generated,
    recorded,
)
from twinserve.experiments.systems.saturated import (
    TRACE,
    past_saturation,
    points_in,
    saturated_table,
    saturated_text,
)
from twinserve.experiments.systems.tables import (
    applications_table,
    before,
    draw_applications,
    draw_loads,
    draw_parts,
    draw_systems,
    first,
    means,
    table_of,
)
from twinserve.policies.registry import policy_names
from twinserve.sim.sweep.grid import Point

Loads = Mapping[str, tuple[float, ...]]  # of each trace
POOL = 16
# solves an integer programme wherever few run: hours for a workload of this size
# (docs/studies.md)
BOUND = "bros-exact"
# on applications their runs take minutes, and one seed shows why not to
TURNS = ("mlfq", "preemptive-wait")
# trace -> seconds of the recording in a window: about 160 and 90 s of the run at load 1, several
# times what a request takes
WINDOWS = {"mooncake": 60.0, "azure-2023": 300.0}
# where the window of each seed begins: ten minutes apart, which is all of the recording, then those
# in between
BEGINS = (*range(0, 3600, 600), *range(300, 3000, 600))
# trace -> shares of estimated capacity. On Azure nobody misses anything below.
LOADS = {"mooncake": (0.5, 0.75, 1.0), "azure-2023": (0.75, 1.0)}
SATURATION = dict.fromkeys(WINDOWS, (1.0,))
OVERLOAD = dict.fromkeys(WINDOWS, (1.25,))
# Left out on Azure, where six of seven prompts are no longer than a chunk of `bros:chunk=2048`: the
# same with whole prompts; and in the variants both, as runs of them take up to ten times as long.
LEFT_OUT, LEFT_OUT_OF_VARIANTS = {"bros"}, {"bros", CHUNK}
# loads of ladders and ledgers: around the one from which a queue builds up
LADDER_LOADS = {"mooncake": (0.75, 1.0), "azure-2023": (1.0, 1.25)}
# Azure's trace names no prefixes: with and without a cache is the same there
UNNAMED = ("azure-2023",)
PREFIX_LOADS = {"mooncake": LADDER_LOADS["mooncake"]}
DOCUMENT_LOADS = dict.fromkeys(WINDOWS, (0.5, 0.75))  # which leave something for offline work
PACES = ("2x", "3x")  # 300 applications in 9 and in 6 minutes
# name -> title, loads, arguments of a run
LOAD_FIGURES: Mapping[str, tuple[str, Loads, Mapping[str, str]]] = {
    "loads": ("several loads, one GPU, TPOT 200 ms", LOADS, {}),
    "loads-tight": ("one GPU, TPOT 50 ms", SATURATION, {"slo": TIGHT}),
    "four-gpus": ("four GPUs, TPOT 200 ms", SATURATION, {"profile": FOUR_GPUS}),
    "four-gpus-tight": ("four GPUs, TPOT 50 ms", SATURATION, {"profile": FOUR_GPUS, "slo": TIGHT}),
    "overload": ("load 1.25, one GPU, TPOT 200 ms", OVERLOAD, {}),
}


# -- grids -----------------------------------------------------------------------------------------
def _windows(scale: Scale, trace: str) -> list[dict[str, Any]]:
    seconds = WINDOWS[trace] / 6 if scale.quick else WINDOWS[trace]
    begins = [(seed, float(BEGINS[seed % len(BEGINS)])) for seed in scale.seeds]
    return [
        {"trace": trace, "begin_s": begin_s, "seconds": seconds, "seed": seed}
        for seed, begin_s in begins
    ]


def _point(
    axes: Mapping[str, Any],
    window: Mapping[str, Any],
    part: Part,
    load: float,
    more: Mapping[str, Any],
) -> Point:
    policy, caching = (part, None) if isinstance(part, str) else part
    work = {**window, "policy": policy, "load": load, **more} | (
        {} if caching is None else {"caching": caching}
    )
    told = {"policy": policy, "load": load, "window": window["begin_s"], "seed": window["seed"]}
    return Point({"trace": window["trace"], **axes, **told}, work)


def _loads(at: Loads, more: Mapping[str, str]) -> Callable[[Scale], list[Point]]:
    """Points of every system at these loads. more: arguments of a run, of a variant."""
    left_out = LEFT_OUT_OF_VARIANTS if more else LEFT_OUT

    def points(scale: Scale) -> list[Point]:
        return [
            _point({}, window, policy, load, {"pool": POOL, **more})
            for trace in WINDOWS
            for load in ((1.0,) if scale.quick else at[trace])
            for policy in SYSTEMS
            if trace == "mooncake" or policy not in left_out
            for window in _windows(scale, trace)
        ]

    return points


def _parts(groups: Parts, at: Loads, more: Mapping[str, Any]) -> Callable[[Scale], list[Point]]:
    """Points of every part of every group, at the loads of each trace. more: arguments of a run;
    none: beside documents."""

    def points(scale: Scale) -> list[Point]:
        shorter = {"questions": 200} if scale.quick and not more else {}
        return [
            _point({"system": system, "part": name}, window, part, load, {**more, **shorter})
            for trace in at
            for load in (at[trace][:1] if scale.quick else at[trace])
            for system, parts in groups.items()
            for name, part in parts.items()
            if not (more and trace in UNNAMED and isinstance(part, tuple))
            for window in _windows(scale, trace)
        ]

    return points


def applications(scale: Scale) -> list[Point]:
    policies = list(
        dict.fromkeys(policy for parts in APPLICATIONS.values() for policy in parts.values())
    )
    work = {"policies": policies, "profile": APPLICATIONS_PROFILE} | (
        {"count": 40} if scale.quick else {}
    )
    return [
        Point({"pace": pace, "seed": seed}, {**work, "trace": f"apps:{pace}", "seed": seed})
        for pace in (PACES[:1] if scale.quick else PACES)
        for seed in scale.seeds
    ]


def everyone(scale: Scale) -> list[Point]:
    return [
        Point(
            {"workload": w, "policy": p, "seed": s},
            {"workload": w, "policy": p, "seed": s, "quick": scale.quick},
        )
        for w in (("hybrid",) if scale.quick else ("hybrid", "applications"))
        for p in (*policy_names(), FIT)
        if p != BOUND
        for s in (scale.seeds[:1] if w == "applications" and p in TURNS else scale.seeds)
    ]


def saturated(scale: Scale) -> list[Point]:
    return points_in(scale, _windows(scale, TRACE))


# -- figures ---------------------------------------------------------------------------------------
def _load_figure(name: str) -> Figure:
    title, at, more = LOAD_FIGURES[name]
    table = table_of(("trace", "load", "policy"), ("trace", "load"), first)
    draw = draw_loads if at is LOADS else draw_systems
    return Figure(name, title, _loads(at, more), recorded, table, draw)


def _figure(
    name: str, title: str, groups: Parts, at: Loads, base, documents: bool = False
) -> Figure:
    points = _parts(groups, at, {} if documents else {"pool": POOL})
    by = ("trace", "load", "system", "part", "policy")
    work = beside_documents if documents else recorded
    return Figure(
        name, title, points, work, table_of(by, ("trace", "load", "system"), base), draw_parts
    )


STUDY = Study(
    "systems",
    "",
    [
        *map(_load_figure, LOAD_FIGURES),
        _figure(
            "ladder-fit",
            "which part of bros:chunk=fit earns it, one more at a time",
            FIT_LADDER,
            LADDER_LOADS,
            before,
        ),
        _figure("ladder", "which part earns it, one more at a time", LADDERS, LADDER_LOADS, before),
        _figure("prefixes", "without and with a prefix cache", PREFIXES, PREFIX_LOADS, first),
        _figure(
            "documents",
            "Echo's parts beside questions on shared documents",
            DOCUMENTS,
            DOCUMENT_LOADS,
            before,
            documents=True,
        ),
        _figure(
            "documents-systems",
            "the systems beside questions on shared documents",
            DOCUMENT_SYSTEMS,
            DOCUMENT_LOADS,
            first,
            documents=True,
        ),
        Figure(
            "applications",
            "Justitia's parts on applications",
            applications,
            compare,
            applications_table(APPLICATIONS),
            draw_applications,
        ),
        _figure(
            "ledgers",
            "each scheduler on the ledgers that can make a difference to it",
            LEDGERS,
            LADDER_LOADS,
            first,
        ),
        _figure(
            "documents-ledgers",
            "ledgers beside questions on shared documents",
            DOCUMENT_LEDGERS,
            DOCUMENT_LOADS,
            first,
            documents=True,
        ),
        Figure(
            "everyone",
            "every policy on two workloads",
            everyone,
            generated,
            means("workload", "policy"),
        ),
        Figure(
            "saturated",
            "every policy past saturation",
            saturated,
            past_saturation,
            saturated_table,
            text=saturated_text,
        ),
    ],
)
