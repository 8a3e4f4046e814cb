"""The chapters of comparisons with measured runs, and of validations against a live engine."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.sim.report.chart import Chart, Curve, best, number
from twinserve.sim.report.found import Found, read_document
from twinserve.sim.report.metric_names import METRIC_NAMES, SECONDS
from twinserve.sim.report.page import (
    Block,
    Part,
    folded,
    heading,
    listing,
    note,
    paragraph,
    table,
    verdict,
)
from twinserve.sim.report.runs_part import runs_part
from twinserve.sim.report.seen import Seen
from twinserve.sim.results.checked import SHAPES
from twinserve.sim.results.files import ResultsError, dump_json

_STEPS = ("predicted_s", "measured_s", "prefill_tokens")
_DRAWN = 1_500  # steps of a scatter; more cannot be told apart


# -- measured --------------------------------------------------------------------------------------
def comparison_part(found: Found) -> Part:
    """Raises ResultsError for a file that is no comparison."""
    file = found.folder / "compare.json"
    document = read_document(file, SHAPES["comparison"])
    runs, measured = document["runs"], document["measured"]
    for row in (*document["rows"], *document["windows"]):
        if len(row["simulated"]) != len(runs) or len(row.get("errors", runs)) != len(runs):
            raise ResultsError(f"{file}: a row has not one number for each run; compare again")
    said = f"Measured: {', '.join(measured)}. Simulated: {', '.join(runs)}."
    blocks: list[Block] = [*verdict(document.get("verdicts", ())), paragraph(said)]
    blocks += map(note, document.get("notices", ()))
    head = ["class", "metric", "", "measured", "spread, %"]
    for run in runs:
        head += [run, "error, %"]
    body = []
    for row in document["rows"]:
        scale, unit = (1000.0, " ms") if row["metric"] in SECONDS else (1.0, "")
        spread = "-" if row["spread"] is None else f"{row['spread'] * 100:.1f}"
        cells = [row["service_class"], METRIC_NAMES.get(row["metric"], row["metric"])]
        cells += [row["statistic"], number(row["measured"] * scale) + unit, spread]
        for value, off in zip(row["simulated"], row["errors"], strict=True):
            cells += [number(value * scale) + unit, f"{off * 100:+.1f}"]
        body.append(cells)
    blocks.append(table(head, body))
    blocks += [c for c in (*measured_curves(document), *_measured_windows(document)) if c.curves]
    if document.get("again"):
        blocks += [heading("To run it again"), listing(document["again"])]
    return Part(found.title, tuple(blocks))


def measured_curves(document: Mapping) -> Iterator[Chart]:
    """Yield a chart of the distributions in compare.json for each known metric."""
    found = document.get("curves", [])
    names = list(dict.fromkeys(one["name"] for one in found))
    for metric in dict.fromkeys(one["metric"] for one in found):
        mine = [one for one in found if one["metric"] == metric]
        curves = tuple(
            Curve(
                one["name"],
                1000 * np.array(one["seconds"], np.float64),
                np.array(one["share"], np.float64),
                names.index(one["name"]),
                "step",
            )
            for one in mine
            if one["seconds"] and len(one["seconds"]) == len(one["share"])
        )
        medians = [
            (c.label, float(c.x[np.searchsorted(c.y, 0.5).clip(0, len(c.x) - 1)])) for c in curves
        ]
        name = METRIC_NAMES.get(metric, metric)
        yield Chart(
            f"compared-{metric}",
            f"{name}, measured and simulated",
            "ms",
            "share at or below",
            curves,
            f"Distributions of {name}: median {best(medians, 'ms')}.",
            "Curves keep some hundred ranks of their values, where they are exact.",
            share=True,
            log_x=None,
        )


def _measured_windows(document: Mapping) -> Iterator[Chart]:
    for metric in dict.fromkeys(window["metric"] for window in document["windows"]):
        mine = [window for window in document["windows"] if window["metric"] == metric]
        x = np.array([(w["start_s"] + w["end_s"]) / 2 for w in mine])
        about = tuple(f"{w['start_s']:.6g} to {w['end_s']:.6g} s" for w in mine)
        sides = [("measured", [w["measured"] for w in mine])]
        for i, run in enumerate(document["runs"]):
            sides.append((run, [w["simulated"][i] for w in mine]))
        curves = tuple(
            Curve(name, x, 1000 * np.array(values), i, "points", about=about, joined=True)
            for i, (name, values) in enumerate(sides)
        )
        name = METRIC_NAMES.get(metric, metric)
        means = [(curve.label, float(curve.y.mean())) for curve in curves]
        yield Chart(
            f"compared-windows-{metric}",
            f"{name} over time, measured and simulated",
            "seconds since the first request",
            f"mean {name} (ms)",
            curves,
            f"Mean {name} of the requests that arrived in each window: over all windows "
            f"{best(means, 'ms')}.",
        )


# -- live ------------------------------------------------------------------------------------------
def validation_part(found: Found, runs: Sequence[Seen]) -> Part:
    """runs: those in its folder. Raises ResultsError for a file that is no validation."""
    document = read_document(found.folder / "validation.json", SHAPES["validation"])
    blocks: list[Block] = [paragraph(f"Simulated and vLLM {document['vllm']}.")]
    for label, why in document.get("failed", {}).items():
        blocks.append(note(f"{label}: failed: {why}"))
    for policy in document["policies"]:
        locked = policy["locked"]
        error = locked.get("mean_absolute_error_pct")
        off = f", step times {error:.1f} % off" if isinstance(error, (int, float)) else ""
        said = f"{locked['steps']:,g} steps locked, {locked['drift']:g} drifted{off}."
        blocks += [heading(policy["policy"]), paragraph(said)]
        blocks += [note(f"{line}.") for line in policy.get("notes", ())]
        head = ["metric", "", "simulated", "live", "error, %", "repeats within, %"]
        rows = [
            [
                *(row["metric"], row["statistic"], number(row["simulated"]), number(row["live"])),
                *(_percent(row[name]) for name in ("error_pct", "spread_pct")),
            ]
            for row in policy["metrics"]
        ]
        blocks.append(table(head, rows))
    blocks += list(_steps(found.folder))
    if runs:
        blocks += runs_part(runs).blocks
    settings = [listing(dump_json(document.get("config", {})))]
    blocks.append(folded("settings of the validation", settings))
    if document.get("again"):
        blocks += [heading("To run it again"), listing(document["again"])]
    return Part(found.title, tuple(blocks))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _steps(folder: Path) -> Iterator[Chart]:
    """Measured over predicted time of the steps of each locked replay."""
    for file in sorted(folder.glob("*-steps.parquet")):
        steps = _read_steps(file)
        name = file.name.removesuffix("-steps.parquet")
        every = max(1, -(-len(steps) // _DRAWN))
        kept = steps.iloc[::every]
        curves = []
        for colour, label, mine in (
            (0, "decode only", kept["prefill_tokens"] == 0),
            (1, "with prompt tokens", kept["prefill_tokens"] > 0),
        ):
            part = kept[mine]
            if len(part):
                x, y = (1000 * part[c].to_numpy(np.float64) for c in ("predicted_s", "measured_s"))
                curves.append(Curve(label, x, y, colour, "points"))
        if not curves:
            continue
        ratio = steps["predicted_s"].sum() / steps["measured_s"].sum() - 1
        yield Chart(
            "validated-steps",
            f"{name}: step times, predicted and measured",
            "predicted (ms)",
            "measured (ms)",
            tuple(curves),
            f"Measured over predicted time of the steps of the locked replay of {name}; in sum the "
            f"prediction is {ratio:+.1%} off.",
            f"One step in {every} of {len(steps):,} is drawn." if every > 1 else "",
            log_x=True,
            log_y=True,
        )


def _read_steps(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ResultsError(f"{file}: torn or not a parquet file; validate again") from error
    for column in _STEPS:
        if column not in frame or frame[column].dtype.kind not in "iuf":
            raise ResultsError(f"{file}: column {column} is not of numbers; validate again")
    times = frame[["predicted_s", "measured_s"]]
    return frame[np.isfinite(times).all(axis=1) & (times > 0).all(axis=1)]
