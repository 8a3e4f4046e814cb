"""The chapter of a sweep: means over seeds with their intervals, throughput against latency,
attainment over load, the front, what failed, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.errors import worded
from twinserve.sim.report.chart import MOST_CURVES, Chart, Curve, best, front, spans_decades
from twinserve.sim.report.found import Found, read_document
from twinserve.sim.report.page import Block, Html, Part, folded, listing, note, paragraph, table
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.results.checked import Shape
from twinserve.sim.results.command import command
from twinserve.sim.results.files import ResultsError, dump_json
from twinserve.sim.results.options import measured_again

_SHAPE = Shape(
    "object",
    needed={"common": Shape("object"), "seeds": Shape("list", rest=Shape("number"))},
    known={
        "runs": Shape("number"),
        "versions": Shape("object"),
        "seeds_of_each": Shape("number"),
        "given": Shape("object"),
        "combinations": Shape("list", rest=Shape("object")),
        "metrics": Shape("object"),
    },
)
_TOKENS = "total_token_throughput"
# In the summary's order: name, title, unit, whether it is a share.
_OVER = (
    ("classes.rt.slo_attainment", "Objectives kept, real-time", "share", True),
    ("classes.be.slo_attainment", "Objectives kept, best-effort", "share", True),
    ("classes.rt.mean_ttft_ms", "TTFT mean, real-time", "ms", False),
    ("classes.rt.mean_tpot_ms", "TPOT mean, real-time", "ms", False),
    ("output_throughput", "Output throughput", "tokens a second", False),
    ("kv.peak_use", "KV memory, highest", "share of KV blocks", True),
    ("scheduler.mean_batch", "Batch, mean", "requests a step", False),
    ("scheduler.mean_waiting", "Queue, mean", "requests waiting", False),
)
_CI = "_ci"
_COPIES = "same_requests"


def sweep_part(found: Found) -> Part:
    """Raises ResultsError for a file that is no sweep's."""
    document = read_document(found.folder / "sweep.json", _SHAPE)
    failures = _csv(found.folder / "failures.csv")
    means = _csv(found.folder / "table.csv")
    seeds = [int(seed) for seed in document["seeds"]]
    blocks: list[Block] = []
    if means is None:
        blocks.append(note("No run of this sweep has completed."))
    else:
        axes = _checked(means, found.folder / "table.csv")
        blocks.append(paragraph(_repeated(document, len(means), len(seeds))))
        if _COPIES in means and means[_COPIES].any():
            blocks.append(
                note("Requests are recorded, the same for each seed, so there is no interval.")
            )
        blocks.append(_table(means, axes))
        blocks += [c for c in _charts(means, axes) if c.curves]
    if failures is not None:
        rows = failures.astype(object).where(failures.notna(), "").values.tolist()
        blocks.append(note(f"{len(failures)} runs failed."))
        blocks.append(folded("failed runs", [table(list(failures.columns), rows)]))
    blocks += _again(document)
    return Part(f"Sweep {found.label}", tuple(blocks))


def _repeated(document: Mapping, combinations: int, seeds: int) -> str:
    """How many runs the numbers are of, and what an interval is."""
    kind, _, count = str(document.get("repeat") or "").partition("=")
    if kind == "blocks":
        return (
            f"{combinations} combinations, one run each. ± and bars are half widths of 95 % "
            f"intervals, from a bootstrap over {count} blocks of its time."
        )
    what = f"{count} windows" if kind else f"{seeds} seed" + "s" * (seeds != 1)
    return (
        f"{combinations} combinations with {what} each. Numbers are means over them, ± and bars "
        "half widths of their 95 % intervals (Student's)."
    )


def _csv(file: Path) -> pd.DataFrame | None:
    """None where it is not there. Raises ResultsError for one that is no table."""
    if not file.exists():
        return None
    try:
        return pd.read_csv(file)
    except (ValueError, OSError, pd.errors.ParserError) as error:
        raise ResultsError(
            f"{file}: no table of a sweep ({worded(error)}); run the sweep again"
        ) from None


def _checked(means: pd.DataFrame, file: Path) -> list[str]:
    """What combinations name: all that stands before the seeds. Raises ResultsError where that is
    not there, or where a number is none."""
    if "seeds" not in means:
        raise ResultsError(f"{file}: no column seeds; run the sweep again")
    numbers = [c for c in means if c == "seeds" or c.endswith(_CI)]
    numbers += [c.removesuffix(_CI) for c in numbers if c != "seeds"]
    for column in numbers:
        if column not in means:
            raise ResultsError(f"{file}: no column {column}; run the sweep again")
        if means[column].notna().any() and means[column].dtype.kind not in "iuf":
            raise ResultsError(f"{file}: column {column} is not of numbers; run the sweep again")
    return list(means.columns[: means.columns.get_loc("seeds")])


def _values(means: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(mean, half width) of each combination; the latter 0 where one seed says nothing of it."""
    if name not in means or f"{name}{_CI}" not in means:
        return np.full(len(means), np.nan), np.zeros(len(means))
    half = means[f"{name}{_CI}"].to_numpy(np.float64)
    return means[name].to_numpy(np.float64), np.where(np.isfinite(half), half, 0.0)


def _table(means: pd.DataFrame, axes: Sequence[str]) -> Html:
    known = [(n, f"{title}, {unit}") for n, title, unit, _ in _OVER if n in means]
    verdict = "classes.rt.saturation.verdict"
    head = [*axes, *(title for _, title in known)] + ["queue"] * (verdict in means)
    columns = {name: _values(means, name) for name, _ in known}
    rows = []
    for i in range(len(means)):
        cells = [_text(means[name].iloc[i]) for name in axes]
        for name, _ in known:
            mean, half = (column[i] for column in columns[name])
            cells.append(_short(mean, 4) + (f" ± {_short(half, 2)}" if half else ""))
        if verdict in means:
            cells.append(_text(means[verdict].iloc[i]))
        rows.append(cells)
    return table(head, rows)


def _short(value: float, digits: int) -> str:
    if not np.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:g}"
    return str(value)


def _charts(means: pd.DataFrame, axes: Sequence[str]) -> Iterator[Chart]:
    x = _load_axis(means, axes)
    others = [name for name in axes if name != x and means[name].nunique(dropna=False) > 1]
    labels = [
        ", ".join(_named(name, means[name].iloc[i]) for name in others) or "all"
        for i in range(len(means))
    ]
    whole = [", ".join(_named(n, means[n].iloc[i]) for n in axes) for i in range(len(means))]
    lines = list(dict.fromkeys(labels))
    drawn = lines[:MOST_CURVES]
    left = f"The first {len(drawn)} of {len(lines)} lines are drawn." if drawn != lines else ""

    def curves(xs: np.ndarray, name: str, share: bool) -> tuple[Curve, ...]:
        mean, half = _values(means, name)
        found = []
        for colour, line in enumerate(drawn):
            at = np.array([i for i, label in enumerate(labels) if label == line])
            at = at[np.isfinite(mean[at]) & np.isfinite(xs[at])]
            if len(at):
                at = at[np.argsort(xs[at], kind="stable")] if x is not None else at
                low, high = mean[at] - half[at], mean[at] + half[at]
                if share:
                    low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
                about = tuple(whole[i] for i in at)
                found.append(
                    Curve(line, xs[at], mean[at], colour, "points", low, high, about, joined=True)
                )
        return tuple(found)

    for name, title in (
        ("classes.rt.p99_ttft_ms", "p99 TTFT"),
        ("classes.rt.mean_tpot_ms", "mean TPOT"),
    ):
        tokens, _ = _values(means, _TOKENS)
        found = curves(tokens, name, False)
        labelled = [(c.about[i], float(c.y[i])) for c in found for i in range(len(c.y))]
        yield Chart(
            f"sweep-throughput-{name.rsplit('.', 1)[-1]}",
            f"Throughput and {title} of real-time requests",
            "tokens a second, prompt and output",
            f"{title} (ms)",
            found,
            f"A point a combination, {title} over throughput, mean of seeds: "
            f"{best(labelled, 'ms')}.",
            left,
            log_y=spans_decades([c.y for c in found]),
        )
    if x is not None:
        xs = means[x].to_numpy(np.float64)
        for name, title, unit, share in _OVER:
            found = curves(xs, name, share)
            labelled = [(c.about[i], float(c.y[i])) for c in found for i in range(len(c.y))]
            yield Chart(
                f"sweep-{name}",
                f"{title} over {x}",
                x,
                unit,
                found,
                f"{title} over {x}, mean of seeds: {best(labelled, '', high=share)}.",
                left,
                share=share,
            )
    yield from _front(means, whole)


def _load_axis(means: pd.DataFrame, axes: Sequence[str]) -> str | None:
    """The number with most values; a load before all else. None where no number varies."""
    numbers = [n for n in axes if means[n].dtype.kind in "iuf" and means[n].nunique() > 1]
    loads = [n for n in ("rate", "rate_scale", "load") if n in numbers]
    return next(iter(loads or sorted(numbers, key=lambda n: -means[n].nunique())), None)


def _named(name: str, value: object) -> str:
    return _text(value) if name in ("policy", "name") else f"{name}={_text(value)}"


def _front(means: pd.DataFrame, whole: Sequence[str]) -> Iterator[Chart]:
    tokens, _ = _values(means, _TOKENS)
    shares, _ = _values(means, "classes.rt.slo_attainment")
    ends = front(list(zip(tokens.tolist(), shares.tolist(), strict=True)), False, False)
    if not ends:
        return
    others = [i for i in range(len(means)) if i not in ends]
    yield pareto(
        "sweep-front",
        "Pareto front: throughput and objectives kept",
        "tokens a second, prompt and output",
        "share that keeps its objectives",
        *((tokens[i], shares[i], [whole[j] for j in i]) for i in (ends, others)),
        share=True,
        what="combination",
    )


def _again(document: Mapping) -> list[Html]:
    """The combinations as a file for --params, and the command."""
    combinations = document.get("combinations")
    if not combinations:  # of an earlier version
        return [folded("settings of all runs", [listing(dump_json(document["common"]))])]
    asked = measured_again(document.get("metrics"))
    settings = {**document.get("given", {}), "params": "combinations.json"}
    settings |= {"seeds": document.get("seeds_of_each"), "repeat": document.get("repeat"), **asked}
    settings |= {"error_bars": document.get("error_bars") is True, "out": "again"}
    return [
        paragraph("To run it again, with the combinations below in combinations.json:"),
        listing(command("twinserve sweep", settings)),
        folded("combinations.json", [listing(json.dumps(combinations, indent=2))]),
    ]
