"""Charts of several runs: throughput and latency, objectives, distributions, courses over time."""

import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from twinserve.sim.report.chart import MOST_CURVES, POINTS, Chart, Curve, best, number
from twinserve.sim.report.fleet import any_real_time, of_interest
from twinserve.sim.report.metric_names import CLASS_NAMES
from twinserve.sim.report.seen import OverTime, Seen
from twinserve.sim.results.parts import front
from twinserve.sim.results.paths import lookup

# Settings in which runs of one throughput-latency curve may differ.
_LOAD = {"rate", "rate_scale", "load", "seed", "duration", "requests", "window"}
_MOST_APART = 3  # runs whose replicas are drawn one by one

_LATENCY_NAMES = {
    "ttft_s": ("TTFT", "time to first token", 1.0, "s"),
    "tpot_s": ("TPOT", "time per output token", 1000.0, "ms"),
    "e2el_s": ("End to end", "arrival to last token", 1.0, "s"),
}


def run_charts(runs: Sequence[Seen]) -> list[Chart]:
    """In the order of the page; those that apply to no run are left out."""
    drawn = runs[:MOST_CURVES]
    left = ""
    if len(runs) > len(drawn):
        left = f" The first {len(drawn)} of {len(runs)} runs are drawn; the summary has all."
    charts = [
        *_throughput(runs),
        *_attainment(runs),
        *distributions(drawn, left),
        *_completions(drawn, left),
        *courses(drawn, left),
        *_windows(drawn, left),
        *_replicas(runs),
    ]
    return [chart for chart in charts if chart.curves]


# -- a point a run ---------------------------------------------------------------------------------
def _number(run: Seen, path: str) -> float:
    value = lookup(run.summary, path)
    return float("nan") if value is None else float(value)


def _families(runs: Sequence[Seen]) -> list[list[int]]:
    """Places of runs that differ in their load alone, in order of it."""
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        config = run.config.get("config")
        config = config if isinstance(config, dict) else {}
        rest = {name: value for name, value in config.items() if name not in _LOAD}
        key = json.dumps([rest, run.config.get("policy")], sort_keys=True) if rest else f"run {i}"
        found.setdefault(key, []).append(i)
    return [
        sorted(members, key=lambda i: (runs[i].arrivals_per_s or 0.0, i))
        for members in found.values()
    ]


def _throughput(runs: Sequence[Seen]) -> Iterator[Chart]:
    """Latency over throughput, a line through runs that differ in their load alone; and the front
    of what throughput can be had with which objectives."""
    if len(runs) < 2:
        return
    of_class = "rt" if any("rt" in r.summary.get("classes", {}) for r in runs) else "be"
    name = CLASS_NAMES[of_class]
    for key, metric, statistic, title in (
        ("throughput-ttft", "ttft", "p99", "p99 TTFT"),
        ("throughput-tpot", "tpot", "mean", "mean TPOT"),
    ):
        points = [
            (
                _number(run, "total_token_throughput"),
                _number(run, f"classes.{of_class}.{statistic}_{metric}_ms"),
            )
            for run in runs
        ]
        curves = tuple(
            Curve(
                runs[members[0]].label if len(members) == 1 else _family(runs, members),
                np.array([points[i][0] for i in members]),
                np.array([points[i][1] for i in members]),
                members[0],
                "points",
                about=tuple(runs[i].label for i in members),
                joined=len(members) > 1,
            )
            for members in _families(runs)
        )
        labelled = [(run.label, y) for run, (_, y) in zip(runs, points, strict=True)]
        yield Chart(
            key,
            f"Throughput and {title} of {name} requests",
            "tokens a second, prompt and output",
            f"{title} (ms)",
            curves,
            f"A point a run, {title} over throughput: {best(labelled, 'ms')}. Lines join runs that "
            "differ in their load alone.",
        )
    yield from _front(runs, of_class, name)


def _family(runs: Sequence[Seen], members: Sequence[int]) -> str:
    first = runs[members[0]]
    return f"{first.config.get('label', first.label)} ({len(members)} loads)"


def _front(runs: Sequence[Seen], of_class: str, name: str) -> Iterator[Chart]:
    shares = [_number(run, f"classes.{of_class}.slo_attainment") for run in runs]
    tokens = [_number(run, "total_token_throughput") for run in runs]
    ends = front(list(zip(tokens, shares, strict=True)), low_x=False, low_y=False)
    if not ends:
        return
    others = [i for i in range(len(runs)) if i not in ends]
    labels = [run.label for run in runs]
    yield pareto(
        "front",
        "Pareto front: throughput and objectives kept",
        "tokens a second, prompt and output",
        "share that keeps its objectives",
        *(
            (np.array(tokens)[i], np.array(shares)[i], [labels[j] for j in i])
            for i in (ends, others)
        ),
        share=True,
        what="run",
    )


def pareto(key: str, title: str, x: str, y: str, on, off, share: bool, what: str) -> Chart:
    """on, off: (float64[n], float64[n], label of each) of the front, joined, and of the others."""
    labelled = [label for label in on[2]]
    many = ", ".join(labelled[:6]) + (", ..." if len(labelled) > 6 else "")
    return Chart(
        key,
        title,
        x,
        y,
        tuple(
            Curve(label, xs, ys, colour, "points", about=tuple(names), joined=joined, filled=joined)
            for label, (xs, ys, names), colour, joined in (
                ("on the front", on, 0, True),
                ("not on the front", off, 7, False),
            )
            if len(xs)
        ),
        f"{len(labelled)} of {len(labelled) + len(off[2])} are on the front, where no other {what} "
        f"is as good in one and better in the other: {many}.",
        share=share,
    )


def _attainment(runs: Sequence[Seen]) -> Iterator[Chart]:
    for service_class, name in CLASS_NAMES.items():
        known = [
            i
            for i, run in enumerate(runs)
            if service_class in run.attained and run.arrivals_per_s is not None
        ]
        families = [[i for i in f if i in known] for f in _families(runs)]
        curves = []
        for members in filter(None, families):
            shares = np.array([runs[i].attained[service_class][0] for i in members])
            halves = np.array([runs[i].attained[service_class][1] for i in members])
            halves = np.where(np.isfinite(halves), halves, 0.0)
            curves.append(
                Curve(
                    runs[members[0]].label if len(members) == 1 else _family(runs, members),
                    np.array([runs[i].arrivals_per_s for i in members]),
                    shares,
                    members[0],
                    "points",
                    np.maximum(shares - halves, 0.0),
                    np.minimum(shares + halves, 1.0),
                    tuple(runs[i].label for i in members),
                    joined=len(members) > 1,
                )
            )
        labelled = [(runs[i].label, runs[i].attained[service_class][0] * 100) for i in known]
        yield Chart(
            f"attainment-{service_class}",
            f"Objectives kept over load, {name} requests",
            "arrivals a second, without the pool",
            "share that keeps its objectives",
            tuple(curves),
            f"Share of {name} requests that keep all of their objectives: "
            f"{best(labelled, '%', high=True)}. Bars are 95 % intervals, from ten parts of a run.",
            share=True,
        )


# -- distributions ---------------------------------------------------------------------------------
def distributions(runs: Sequence[Seen], left: str = "") -> Iterator[Chart]:
    """A chart a class and latency; runs of one label are repeats, of one colour."""
    for service_class, name in CLASS_NAMES.items():
        for latency, (short, long, scale, unit) in _LATENCY_NAMES.items():
            key = service_class, latency
            bounds = {run.bounds.get(key) for run in runs if key in run.cdfs}
            bound = next(iter(bounds)) if len(bounds) == 1 else None
            marks = (
                () if bound is None else ((bound * scale, f"objective {bound * scale:g} {unit}"),)
            )
            yield _cdf_chart(
                runs, key, f"{short}, {name} requests", f"{long} ({unit})", scale, unit, left, marks
            )


def _completions(runs: Sequence[Seen], left: str) -> Iterator[Chart]:
    title = "Completion of applications and sessions"
    axis = "first arrival to last token (s)"
    yield _cdf_chart(runs, ("all", "jct_s"), title, axis, 1.0, "s", left)


def _cdf_chart(
    runs: Sequence[Seen],
    key: tuple[str, str],
    title: str,
    axis: str,
    scale: float,
    unit: str,
    left: str,
    marks: tuple[tuple[float, str], ...] = (),
) -> Chart:
    places = {label: i for i, label in enumerate(dict.fromkeys(run.label for run in runs))}
    have = [(run.label, run.cdfs[key]) for run in runs if key in run.cdfs]
    curves = tuple(
        Curve(label, cdf.seconds * scale, cdf.share, places[label], "step") for label, cdf in have
    )
    by_run = [(label, [cdf for other, cdf in have if other == label]) for label, _ in have]
    medians = [(label, np.mean([cdf.median for cdf in of]) * scale) for label, of in by_run]
    tails = [(label, np.mean([cdf.p99 for cdf in of]) * scale) for label, of in by_run]
    most = max((cdf.count for _, cdf in have), default=0)
    note = (
        ""
        if most <= POINTS
        else (
            f"Curves of more than {POINTS} values are drawn at {POINTS} of their ranks, where they "
            f"are exact; the longest has {most:,}."
        )
    )
    return Chart(
        f"cdf-{'-'.join(key)}",
        title,
        axis,
        "share at or below",
        curves,
        f"Distribution of {title}: median {best(medians, unit)}; p99 {best(tails, unit)}.",
        note + left,
        share=True,
        log_x=None,
        marks=marks,
    )


# -- over time -------------------------------------------------------------------------------------
def courses(runs: Sequence[Seen], left: str = "") -> Iterator[Chart]:
    """Queue, KV memory and batches over time."""
    yield _course("queue", "Queue", "requests waiting", "waiting", runs, left)
    bounded = [run for run in runs if run.times]
    share = bool(bounded) and all(run.kv_blocks for run in bounded)
    axis = "share of KV blocks" if share else "KV blocks"

    def of_all(run: Seen) -> float:
        return 1.0 / run.kv_blocks if share and run.kv_blocks else 1.0

    title = "KV memory that requests hold"
    yield _course("kv", title, axis, "kv_used_blocks", runs, left, of_all, share)
    if any(run.times and run.times["kv_be_blocks"].most for run in runs):
        title = "KV memory that best-effort requests hold"
        yield _course("kv-be", title, axis, "kv_be_blocks", runs, left, of_all, share)
    if any(run.times and run.times["kv_cached_blocks"].most for run in runs):
        title = "KV memory of cached prefixes without a holder"
        yield _course("kv-cached", title, axis, "kv_cached_blocks", runs, left, of_all, share)
    title = "Batch: requests that decode"
    yield _course("decodes", title, "requests a step", "decode_requests", runs, left)
    title = "Batch: prompt tokens"
    yield _course("prompts", title, "tokens a step", "prefill_tokens", runs, left)


def _course(
    key: str,
    title: str,
    axis: str,
    column: str,
    runs: Sequence[Seen],
    left: str,
    scale: Callable[[Seen], float] = lambda run: 1.0,
    share: bool = False,
) -> Chart:
    have = [(i, run, run.times[column]) for i, run in enumerate(runs) if run.times]
    curves = tuple(_over(run.label, run.edges, found, scale(run), i) for i, run, found in have)
    peaks = [(run.label, found.most * scale(run)) for _, run, found in have]
    return Chart(
        f"time-{key}",
        title,
        "simulated time (s)",
        axis,
        curves,
        f"{title} over time, highest {best(peaks, '')}.",
        _binned([run for _, run, _ in have]) + left,
        share=share,
    )


def _over(label: str, edges: np.ndarray, found: OverTime, scale: float, colour: int) -> Curve:
    middle = (edges[1:] + edges[:-1]) / 2
    highest = tuple(f"highest {number(v * scale)}" for v in found.highest)
    return Curve(label, middle, found.mean * scale, colour, "line", about=highest)


def _binned(runs: Sequence[Seen]) -> str:
    if not runs:
        return ""
    steps = max(run.steps for run in runs)
    widest = max(float(run.edges[1]) for run in runs)
    return (
        f"Thinned: means over {len(runs[0].edges) - 1} equal parts of each run, weighted by time "
        f"and summed over replicas; up to {steps:,} steps, parts of up to {widest:.3g} s. Point "
        "at a curve for the highest value of a part, on one replica."
    )


def _windows(runs: Sequence[Seen], left: str) -> Iterator[Chart]:
    have = [
        (i, run, run.summary["windows"]) for i, run in enumerate(runs) if run.summary.get("windows")
    ]
    real_time = any(any_real_time(windows) for *_, windows in have)
    whose = "real-time requests" if real_time else "requests"
    for key, title, axis in (
        ("served_per_s", f"Windows: {whose} served", "requests a second"),
        ("in_system", f"Windows: {whose} in the system at the end", "requests"),
        ("p99_ttft_ms", f"Windows: p99 TTFT of {whose} that arrived", "ms"),
        ("slo_attainment", f"Windows: {whose} within their objectives", "share"),
    ):
        curves = []
        for i, run, windows in have:
            numbers = [np.nan if w.get(key) is None else w[key] for w in of_interest(windows)]
            middle = [(w["start_s"] + w["end_s"]) / 2 for w in windows]
            about = tuple(f"{w['start_s']:g} to {w['end_s']:g} s" for w in windows)
            y = np.array(numbers, np.float64)
            if np.isfinite(y).any():
                points = np.array(middle, np.float64)
                curves.append(Curve(run.label, points, y, i, "points", about=about, joined=True))
        tops = [(curve.label, float(np.nanmax(curve.y))) for curve in curves]
        yield Chart(
            f"windows-{key}",
            title,
            "simulated time (s)",
            axis,
            tuple(curves),
            f"{title}, a point a window: highest {best(tops, '')}.",
            left.strip(),
            share=key == "slo_attainment",
        )


def _replicas(runs: Sequence[Seen]) -> Iterator[Chart]:
    several = [run for run in runs if run.by_replica]
    left = (
        f" The first {_MOST_APART} of {len(several)} runs with several replicas are drawn."
        if len(several) > _MOST_APART
        else ""
    )
    for run in several[:_MOST_APART]:
        for column, title, axis in (
            ("waiting", "queue by replica", "requests waiting"),
            ("kv_used_blocks", "KV memory by replica", "KV blocks"),
        ):
            found = {r: t for (name, r), t in run.by_replica.items() if name == column}
            curves = tuple(
                _over(f"replica {r}", run.edges, course, 1.0, place)
                for place, (r, course) in enumerate(found.items())
            )
            peaks = [(f"replica {r}", course.most) for r, course in found.items()]
            yield Chart(
                f"replicas-{column}",
                f"{run.label}: {title}",
                "simulated time (s)",
                axis,
                curves,
                f"{title.capitalize()} of {run.label} over time, highest {best(peaks, '')}.",
                _binned([run]) + left,
            )
