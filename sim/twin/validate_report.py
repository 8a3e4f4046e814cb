"""The folder of a validation: numbers, plots, a page, and the rows of every run."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from twinserve.backends.counts import not_made_lines
from twinserve.sim.report.chart import COLOURS, GREY
from twinserve.sim.report.run_charts import courses, distributions
from twinserve.sim.report.seen import LATENCIES, Seen, look
from twinserve.sim.report.static import STYLE, new_figure, panels, png
from twinserve.sim.results.files import RunResult, dump_json, write_run
from twinserve.sim.results.folders import check_folder, folders, resolved, whole_folder
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.twin.replay import LockedReplay
from twinserve.sim.twin.stability import FACTORS
from twinserve.sim.twin.validate import STEP_TIME_AIM_PCT, Validation

Runs = Mapping[str, RunResult]


def latency_figure(
    runs: Runs, repeats: Mapping[str, Sequence[RunResult]] = MappingProxyType({})
) -> Figure | None:
    """Distributions of TTFT, TPOT and end-to-end latency: a row a class, a curve a run. repeats:
    further runs of a label, each a curve of its colour."""
    seen = [_seen(label, one) for label in runs for one in (runs[label], *repeats.get(label, ()))]
    charts = list(distributions(seen))
    rows = [charts[i : i + len(LATENCIES)] for i in range(0, len(charts), len(LATENCIES))]
    kept = [chart for row in rows if any(c.curves for c in row) for chart in row]
    return panels(kept, len(LATENCIES)) if kept else None


def load_figure(runs: Runs) -> Figure | None:
    """Requests that wait, KV memory and batches over time."""
    charts = [c for c in courses([_seen(label, run) for label, run in runs.items()]) if c.curves]
    return panels(charts, 2) if charts else None


def _seen(label: str, run: RunResult) -> Seen:
    return look(label, Path(), run)


MARKER = "validation.json"
STEPS = "steps"  # of every single run
_DRAWN = 20_000  # steps of a scatter; more cannot be told apart


def write_validation(
    out: Path,
    found: list[Validation],
    failed: dict[str, str],
    inputs: Inputs,
    version: str,
    overwrite: bool = False,
    kept: Sequence[Path] = (),
    again: str = "",
) -> Path:
    """Write everything, or nothing. failed: label -> why there is nothing of that policy; kept:
    files of single runs' steps, which are copied into a folder of their own; again: the command
    that validates once more, if there is one."""
    out = resolved(out)
    check_folder(out, overwrite, MARKER)
    names = folders(validation.spec.label for validation in found)
    with whole_folder(out) as partial:
        document = {
            "vllm": version,
            "config": inputs.config.model_dump(mode="json"),
            "profile": inputs.hardware.profile.model_dump(mode="json"),
            "policies": [validation.summary() for validation in found],
            "failed": failed,
            "again": again,
        }
        (partial / MARKER).write_text(dump_json(document, MARKER), encoding="utf-8")
        (partial / "validation.md").write_text(page(found, version, failed), encoding="utf-8")
        if kept:
            (partial / STEPS).mkdir()
        for path in kept:
            shutil.copyfile(path, partial / STEPS / path.name)
        for validation in found:
            name = names[validation.spec.label]
            validation.locked.steps.to_parquet(partial / f"{name}-steps.parquet", index=False)
            for kind, image in figures(validation).items():
                (partial / f"{name}-{kind}.png").write_bytes(image)
            write_run(partial / name / "simulated", validation.simulated)
            for number, result in enumerate(validation.live, 1):
                write_run(partial / name / f"live-{number}", result)
    return out


def metric_lines(validation: Validation) -> list[tuple[str, str]]:
    """The comparison as names and values, for the terminal."""
    error = validation.locked.error()
    lines = [
        (
            "drift",
            f"{validation.locked.drift} of {len(validation.locked.steps):,} steps locked, "
            f"{validation.drift} live",
        ),
        (
            "step time, locked",
            f"{error['mean_absolute_error_pct']:.1f} % mean absolute error (aim "
            f"{STEP_TIME_AIM_PCT:g} %{_repeats(error)}), "
            f"{error['total_error_pct']:+.1f} % in sum",
        ),
        *schedule_lines(validation),
        *not_made_lines(validation.not_made),
        *(("note", line) for line in [*profile_noise(validation), *validation.noise()]),
    ]
    for row in validation.table().to_dict("records"):
        name = f"{row['statistic']} {row['metric']}".strip()
        lines.append(
            (
                name,
                f"{row['simulated']:.4g} / {row['live']:.4g}   {row['error_pct']:+.1f} %  "
                f"(repeats within {row['spread_pct']:.1f} "
                f"%){'' if row['within'] or np.isnan(row['aim_pct']) else '  outside'}",
            )
        )
    return lines


def schedule_lines(validation: Validation) -> list[tuple[str, str]]:
    """What the free runs' error is made of, as names and values; empty if none ended."""
    schedule = validation.schedule
    if schedule is None or not schedule.live:
        return []
    ours, live = schedule.simulated, schedule.live
    steps = ", ".join(f"{part.steps:,} of {part.batch:.1f}" for part in live)
    idle = ", ".join(f"{part.idle_seats:,}" for part in live)
    factors = (
        f"{name} {', '.join(f'{getattr(part, name) - 1:+.1%}' for part in live)}"
        for name in FACTORS
    )
    return [
        ("steps, requests in one", f"{ours.steps:,} of {ours.batch:.1f} / {steps}"),
        ("live time", "; ".join(factors)),
        ("seats idle despite ready decodes", f"{ours.idle_seats:,} / {idle}"),
        *(
            (f"if {nudge.what}", nudge.said() + ("  not stable" if nudge.moved else ""))
            for nudge in schedule.nudges
        ),
        ("verdict", schedule.verdict()),
    ]


def profile_noise(validation: Validation) -> list[str]:
    """What its run's notices say of the measurements behind the profile."""
    return [line for line in validation.simulated.config["notices"] if line.startswith("profile ")]


def _repeats(error: dict) -> str:
    repeats = error.get("repeat_error_pct")
    return "" if repeats is None else f"; a step's repeats are {repeats:.1f} % from their median"


def page(found: list[Validation], version: str, failed: Mapping[str, str] | None = None) -> str:
    """validation.md. failed: label -> why."""
    parts = [f"# Simulated against vLLM {version}\n"]
    parts += [f"## {label}\n\nFailed: {line}.\n" for label, line in (failed or {}).items()]
    names = folders(validation.spec.label for validation in found)
    for validation in found:
        error = validation.locked.error()
        name = names[validation.spec.label]
        parts.append(
            f"## {validation.spec.label}\n\n"
            f"Locked replay: {len(validation.locked.steps):,} steps, {validation.locked.drift} "
            "drifted; step times "
            f"{error['mean_absolute_error_pct']:.1f} % mean absolute error{_repeats(error)}, "
            f"{error['total_error_pct']:+.1f} % "
            "in sum. "
            f"Free: {len(validation.live)} runs, {validation.drift} steps drifted.\n\n"
            + "".join(f"- {what}: {text}\n" for what, text in schedule_lines(validation))
            + "\n"
            + "".join(
                f"{name.capitalize()}: {text}.\n\n"
                for name, text in not_made_lines(validation.not_made)
            )
            + "".join(
                f"**Note:** {line}.\n\n"
                for line in [*profile_noise(validation), *validation.noise()]
            )
            + (
                "| metric | | simulated | live | error | repeats within "
                "|\n|---|---|---:|---:|---:|---:|"
            )
        )
        for row in validation.table().to_dict("records"):
            parts.append(
                f"| {row['metric']} | {row['statistic']} | {row['simulated']:.4g} | "
                f"{row['live']:.4g} | "
                f"{row['error_pct']:+.1f} % | {row['spread_pct']:.1f} % |"
            )
        drawn = ("latency", "load", "steps") if validation.live else ("steps",)
        parts.append("\n" + "\n".join(f"![{kind}]({name}-{kind}.png)" for kind in drawn) + "\n")
    return "\n".join(parts)


def figures(validation: Validation) -> dict[str, bytes]:
    """Return PNG bytes: latency distributions, simulated and of each live run; load over time, also
    of the first live run; and the step times."""
    images = {}
    with matplotlib.rc_context(STYLE):
        images["steps"] = png(step_figure(validation.locked))
        if not validation.live:
            return images
        first, *further = validation.live
        latency = latency_figure(
            {"simulated": validation.simulated, "live": first}, {"live": further}
        )
        one = f"live 1 of {len(validation.live)}" if further else "live"
        load = load_figure({"simulated": validation.simulated, one: first})
        for name, figure in (("latency", latency), ("load", load)):
            if figure is not None:
                images[name] = png(figure)
    return images


def step_figure(locked: LockedReplay) -> Figure:
    """Measured over predicted time of a locked replay's steps, and the error over the replay."""
    steps = locked.steps[~locked.steps["moved"]]
    if len(steps) > _DRAWN:
        steps = steps.iloc[np.linspace(0, len(steps) - 1, _DRAWN).astype(int)]
    figure = new_figure(11.5, 4.2)
    left, right = figure.subplots(1, 2)
    prefill = steps["prefill_tokens"] > 0
    for label, chosen, colour in (
        ("decode only", ~prefill, COLOURS[0]),
        ("with prompt tokens", prefill, COLOURS[1]),
    ):
        part = steps[chosen]
        left.plot(
            1000 * part["predicted_s"],
            1000 * part["measured_s"],
            ".",
            markersize=3,
            alpha=0.5,
            color=colour,
            label=label,
        )
    low = 1000 * float(min(steps["predicted_s"].min(), steps["measured_s"].min()))
    high = 1000 * float(max(steps["predicted_s"].max(), steps["measured_s"].max()))
    left.plot([low, high], [low, high], color=GREY, linewidth=1)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("predicted (ms)")
    left.set_ylabel("measured (ms)")
    left.legend(markerscale=3)
    error = locked.error()
    left.set_title(f"Steps: {error['mean_absolute_error_pct']:.1f} % mean absolute error")
    window = max(1, len(steps) // 200)
    smooth = (
        steps["predicted_s"].rolling(window).sum() / steps["measured_s"].rolling(window).sum() - 1
    ) * 100
    right.plot(steps["start_s"], smooth, color=COLOURS[0], linewidth=1)
    right.axhline(0, color=GREY, linewidth=1)
    right.set_xlabel("simulated time (s)")
    right.set_ylabel("error of predicted time (%)")
    right.set_title(f"Over {window} steps each; {error['total_error_pct']:+.1f} % in sum")
    return figure
