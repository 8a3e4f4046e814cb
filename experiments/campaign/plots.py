"""Plots of a campaign's report, as PNG bytes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

from twinserve.experiments.campaign.runs import Finished
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.measured.samples import StepSample, by_point
from twinserve.sim.report.axes import GREY, RUN_COLOURS
from twinserve.sim.report.figures import STYLE, new_figure, png

DASHES = ("--", ":", "-.")


def step_plots(
    samples: Sequence[StepSample], model: StepTimeModel | None, others: Mapping[str, StepTimeModel]
) -> dict[str, bytes]:
    """Prefill and decode times with the fitted curves beside those of other profiles; predicted
    against measured."""
    with matplotlib.rc_context(STYLE):
        found = {"steps": _curves(samples, model, others)}
        if model is not None:
            found["errors"] = _errors(samples, {"measured profile": model, **others})
        return found


def _curves(samples, model, others) -> bytes:
    figure = new_figure(11.5, 4.4)
    left, right = figure.subplots(1, 2)
    prefill = [s for s in samples if s.kind == "prefill"]
    tokens = np.array([int(s.work.prefill_new.sum()) for s in prefill])
    left.plot(
        tokens,
        [1000 * s.seconds for s in prefill],
        ".",
        color=RUN_COLOURS[0],
        markersize=4,
        label="measured",
    )
    models = {**({"fitted": model} if model is not None else {}), **others}
    if len(tokens):
        grid = np.unique(np.geomspace(tokens.min(), tokens.max(), 60).astype(int))
        for (name, one), dash in zip(models.items(), ("-", *DASHES), strict=False):
            times = [1000 * one.step_seconds(_prompt(int(n))) for n in grid]
            left.plot(grid, times, dash, color=GREY, linewidth=1, label=name)
    _log(left, "tokens of one fresh prompt", "step (ms)")
    left.legend()
    decode = [s for s in samples if s.kind == "decode"]
    contexts = np.array(
        [
            2 ** int(np.round(np.log2(s.work.decode_context / s.work.decode_requests)))
            for s in decode
        ]
    )
    for colour, context in zip(RUN_COLOURS, np.unique(contexts)[::2], strict=False):
        here = [s for s, c in zip(decode, contexts, strict=True) if c == context]
        batches = [s.work.decode_requests for s in here]
        right.plot(
            batches,
            [1000 * s.seconds for s in here],
            ".",
            markersize=4,
            color=colour,
            label=f"context {context}",
        )
        for one, dash in zip(models.values(), ("-", *DASHES), strict=False):
            grid = np.unique(np.geomspace(1, max(batches), 30).astype(int))
            work = [StepComposition(int(n), int(n * context), int(context)) for n in grid]
            right.plot(
                grid, [1000 * one.step_seconds(w) for w in work], dash, color=colour, linewidth=0.8
            )
    _log(right, "decoding requests", "step (ms)")
    right.legend(markerscale=2)
    return png(figure)


def _prompt(tokens: int) -> StepComposition:
    return StepComposition(0, 0, 0, np.array([tokens]), np.array([0]))


def _errors(samples, models: Mapping[str, StepTimeModel]) -> bytes:
    figure = new_figure(11.5, 4.0)
    axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    points = list(by_point(samples).values())
    measured = np.array([np.median([s.seconds for s in p]) for p in points])
    kinds = np.array([p[0].kind for p in points])
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        ratio = np.array(
            [np.median([model.step_seconds(s.work) / s.seconds for s in p]) for p in points]
        )
        for colour, kind in zip(RUN_COLOURS, dict.fromkeys(kinds.tolist()), strict=False):
            here = kinds == kind
            axis.plot(
                1000 * measured[here],
                100 * (ratio[here] - 1),
                ".",
                color=colour,
                markersize=5,
                label=kind,
            )
        axis.axhline(0, color=GREY, linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("measured (ms)")
        axis.set_title(f"{name}: {100 * np.abs(ratio - 1).mean():.1f} % mean absolute error")
    axes[0].set_ylabel("error of the predicted time (%)")
    axes[0].legend(fontsize=7)
    return png(figure)


def run_plots(found: Sequence[Finished]) -> dict[str, bytes]:
    """Simulated and live means over the load, a row a metric, a column a trace."""
    cells = [one for one in found if one.live]
    traces = sorted({one.cell["trace"] for one in cells})
    if not traces:
        return {}
    metrics = {"mean_ttft_ms": "mean TTFT (ms)", "mean_tpot_ms": "mean TPOT (ms)"}
    with matplotlib.rc_context(STYLE):
        figure = new_figure(5.2 * len(traces), 6.4)
        axes = figure.subplots(len(metrics), len(traces), squeeze=False)
        policies = sorted({one.cell["policy"] for one in cells})
        for column, trace in enumerate(traces):
            for row, (name, label) in enumerate(metrics.items()):
                axis = axes[row][column]
                for colour, policy in zip(RUN_COLOURS, policies, strict=False):
                    _loads(
                        axis,
                        [
                            c
                            for c in cells
                            if c.cell["trace"] == trace and c.cell["policy"] == policy
                        ],
                        name,
                        policy,
                        colour,
                    )
                axis.set_ylabel(label)
                axis.set_ylim(bottom=0)
            axes[0][column].set_title(trace)
            axes[-1][column].set_xlabel("load, share of estimated capacity")
        axes[0][0].legend(fontsize=8)
        return {"runs": png(figure)}


def _loads(axis, cells: Sequence[Finished], name: str, policy: str, colour: str) -> None:
    cells = sorted(
        (c for c in cells if c.simulated.summary.get(name) is not None),
        key=lambda c: c.cell["load"],
    )
    if not cells:
        return
    loads = [c.cell["load"] for c in cells]
    axis.plot(
        loads,
        [c.simulated.summary[name] for c in cells],
        "-",
        color=colour,
        label=f"{policy} simulated",
    )
    for c in cells:
        live = [result.summary[name] for result in c.live if result.summary.get(name) is not None]
        axis.plot(
            [c.cell["load"]] * len(live), live, "o", color=colour, fillstyle="none", markersize=5
        )


def _log(axis, x: str, y: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
