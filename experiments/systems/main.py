"""The four systems side by side: `python -m twinserve.experiments.systems`.

No paper has this: BROS, Echo, LayerKV, Justitia and their baselines on the same hardware, model and
recorded traces, at several loads (`loads`); their parts, one more at a time, beside private
best-effort prompts (`ladder`: BROS and LayerKV), beside offline questions on shared documents
(`documents`: Echo) and on applications (`applications`: Justitia); each scheduler on other KV
ledgers (`ledgers`, `documents-ledgers`); and every policy there is on one hybrid workload and one
of applications (`everyone`). docs/systems.md says what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinserve.experiments.justitia.runs import compare
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.systems.runs import (
    APPLICATIONS_PROFILE,
    beside_documents,
    generated,
    recorded,
)
from twinserve.experiments.systems.tables import (
    applications_table,
    before,
    draw_applications,
    draw_loads,
    draw_parts,
    first,
    means,
    table_of,
)
from twinserve.policies.registry import policy_names
from twinserve.sim.sweep.grid import Point

POOL = 16
CHUNK = "bros:chunk=2048"
# solves an integer programme wherever few run: hours for a workload of this size
# (docs/optimality.md)
BOUND = "bros-exact"
# on applications their runs take minutes, and one seed shows why not to
TURNS = ("mlfq", "preemptive-wait")
SYSTEMS = ("vllm", "vllm-v0", "bros", CHUNK, "echo", "layerkv", "justitia")
# trace -> seconds of the recording in a window: about 160 and 90 s of the run at load 1, several
# times what a request takes
WINDOWS = {"mooncake": 60.0, "azure-2023": 300.0}
# Where windows begin: six of them ten minutes apart, which is all of the recording, then those in
# between.
BEGINS = (*range(0, 3600, 600), *range(300, 3000, 600))
A_SEED = 2  # windows
LOADS = (0.5, 0.75, 1.0, 1.25)  # of estimated capacity
# loads of ladders and ledgers: around the one from which a queue builds up
LADDER_LOADS = {"mooncake": (0.75, 1.0), "azure-2023": (1.0, 1.25)}
DOCUMENT_LOADS = dict.fromkeys(WINDOWS, (0.5, 0.75))  # which leave something for offline work

# traces that name no prefixes: with and without a cache is the same there
UNNAMED = ("azure-2023",)

# a policy, or with prefix caching as said instead of as its own system does
Part = str | tuple[str, bool]
Parts = Mapping[str, Mapping[str, Part]]
# system -> its parts, one more in each step
LADDERS: Parts = {
    "bros": {
        "vllm": "vllm",
        "two classes in turn": "round-robin:chunk=2048",
        "deadlines (Alg. 1)": "bros:chunk=2048,kv=paged,replacement=false",
        "+ replacement": "bros:chunk=2048,kv=paged",
        "+ bidirectional blocks": CHUNK,
    },
    "layerkv": {
        "vllm-v0": "vllm-v0",
        "+ layers": "layerkv:slo_aware=false",
        "+ Alg. 1, late ones left out": "layerkv:savable_only=true",
        "Alg. 1 as printed": "layerkv",
    },
}
# scheduler -> ledgers, the first with all of its own system; none that is the same memory to it as
# another one
LEDGERS: Parts = {
    "vllm": {
        "paged": "vllm",
        "no prefix cache": ("vllm", False),
        "bidirectional": "vllm:kv=bidirectional",
    },
    "bros": {
        "bidirectional": CHUNK,
        "paged": "bros:chunk=2048,kv=paged",
        "checkpointed": "bros:chunk=2048,kv=checkpointed",
    },
    "echo": {
        "task-aware": "echo",
        "no prefix cache": ("echo", False),
        "bidirectional": "echo:kv=bidirectional",
    },
    "layerkv": {
        "layerwise": "layerkv",
        "paged": "layerkv:kv=paged",
        "paged, prefix cache": ("layerkv:kv=paged", True),
        "bidirectional": "layerkv:kv=bidirectional",
    },
    "justitia": {
        "paged": "justitia",
        "paged, prefix cache": ("justitia:kv=paged", True),
        "bidirectional": "justitia:kv=bidirectional",
    },
}
PRIORITY = "vllm:scheduling=priority"
DOCUMENTS: Parts = {
    "echo": {
        "vllm, priorities": (PRIORITY, True),
        "online first (BS)": ("echo-bs", True),
        "+ estimator (E)": ("echo-bs-e", True),
        "+ KV-aware choice (S)": ("echo-bs-e-s", True),
        "+ eviction order (M)": ("echo:threshold=false", True),
        "+ reserve (M)": ("echo", True),
    }
}
# the first: with a prefix cache that knows nothing of what is asked next. Not LayerKV: first come,
# first served, it would serve the whole pool before the online requests. Not BROS: it looks up no
# prefix.
DOCUMENT_LEDGERS: Parts = {
    "vllm, priorities": {
        "paged": (PRIORITY, True),
        "task-aware": (f"{PRIORITY},kv=task-aware", True),
    },
    "echo-bs": {"paged": ("echo-bs", True), "task-aware": ("echo-bs:kv=task-aware", True)},
    "echo": {"paged": ("echo:kv=paged", True), "task-aware": ("echo", True)},
    "justitia": {
        "paged": ("justitia:kv=paged", True),
        "task-aware": ("justitia:kv=task-aware", True),
        "no prefix cache": "justitia",
    },
}
# of applications: Justitia's parts, one more in each step; and Justitia with one of them exchanged
APPLICATIONS: Mapping[str, Mapping[str, str]] = {
    "ladder": {
        "vllm": "vllm",
        "applications, first come (Parrot)": "parrot",
        "least cost left, class means": "srjf:predictor=class-mean",
        "fair order, class means": "justitia:predictor=class-mean",
        "+ predictor of text": "justitia",
        "+ truth": "justitia:predictor=perfect",
    },
    "one part exchanged": {
        "justitia": "justitia",
        "cost: tokens computed": "justitia:cost=compute",
        "order: least cost left (SRJF)": "srjf",
        "order: counters (VTC)": "vtc",
        "requests, not applications (SJF)": "vllm-sjf",
    },
}
PACES = ("2x", "3x")  # 300 of them in 9 and in 6 minutes


# -- grids -----------------------------------------------------------------------------------------
def repeats(scale: Scale) -> list[int]:
    """Seeds, A_SEED of them for each of the scale's."""
    return (
        list(scale.seeds)
        if scale.quick
        else [A_SEED * seed + i for seed in scale.seeds for i in range(A_SEED)]
    )


def _windows(scale: Scale, trace: str) -> list[dict[str, Any]]:
    seconds = WINDOWS[trace] / 6 if scale.quick else WINDOWS[trace]
    begins = [(seed, float(BEGINS[seed % len(BEGINS)])) for seed in repeats(scale)]
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


def loads(scale: Scale) -> list[Point]:
    return [
        _point({}, window, policy, load, {"pool": POOL})
        for trace in WINDOWS
        for load in ((1.0,) if scale.quick else LOADS)
        for policy in SYSTEMS
        for window in _windows(scale, trace)
    ]


def _parts(
    groups: Parts, at: Mapping[str, tuple[float, ...]], more: Mapping[str, Any]
) -> Callable[[Scale], list[Point]]:
    """Points of every part of every group, at the loads of each trace. more: arguments of a run;
    none: beside documents."""

    def points(scale: Scale) -> list[Point]:
        shorter = {"questions": 200} if scale.quick and not more else {}
        return [
            _point({"system": system, "part": name}, window, part, load, {**more, **shorter})
            for trace in WINDOWS
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
        for seed in repeats(scale)
    ]


def everyone(scale: Scale) -> list[Point]:
    return [
        Point(
            {"workload": w, "policy": p, "seed": s},
            {"workload": w, "policy": p, "seed": s, "quick": scale.quick},
        )
        for w in (("hybrid",) if scale.quick else ("hybrid", "applications"))
        for p in policy_names()
        if p != BOUND
        for s in (scale.seeds[:1] if w == "applications" and p in TURNS else scale.seeds)
    ]


# -- figures ---------------------------------------------------------------------------------------
def _figure(name: str, title: str, groups: Parts, documents: bool, base) -> Figure:
    points = (
        _parts(groups, DOCUMENT_LOADS, {})
        if documents
        else _parts(groups, LADDER_LOADS, {"pool": POOL})
    )
    by = ("trace", "load", "system", "part", "policy")
    work = beside_documents if documents else recorded
    return Figure(
        name, title, points, work, table_of(by, ("trace", "load", "system"), base), draw_parts
    )


LOADS_TABLE = table_of(("trace", "load", "policy"), ("trace", "load"), first)
STUDY = Study(
    "systems",
    "",
    [
        Figure("loads", "four systems, several loads", loads, recorded, LOADS_TABLE, draw_loads),
        _figure("ladder", "which part earns it, one more at a time", LADDERS, False, before),
        _figure(
            "ledgers",
            "each scheduler on the ledgers that can make a difference to it",
            LEDGERS,
            False,
            first,
        ),
        _figure(
            "documents",
            "Echo's parts beside questions on shared documents",
            DOCUMENTS,
            True,
            before,
        ),
        _figure(
            "documents-ledgers",
            "ledgers beside questions on shared documents",
            DOCUMENT_LEDGERS,
            True,
            first,
        ),
        Figure(
            "applications",
            "Justitia's parts on applications",
            applications,
            compare,
            applications_table(APPLICATIONS),
            draw_applications,
        ),
        Figure(
            "everyone",
            "every policy on two workloads",
            everyone,
            generated,
            means("workload", "policy"),
        ),
    ],
)
