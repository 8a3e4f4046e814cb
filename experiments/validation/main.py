"""The simulator against runs and steps that others measured: `python -m
twinserve.experiments.validation`.

Four runs of real vLLM (their own engine arguments, arrival times and prefix blocks) are simulated
and compared request by request metric, beside the published errors of LLMServingSim 2; then single
steps of vLLM on H100; with --events also step times that the runs' own events tell.
docs/validation.md has the results and what they mean.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter

from twinserve.experiments.validation.overload import of_run, of_steps, overload_markdown
from twinserve.experiments.validation.releases import of_release, releases_markdown
from twinserve.experiments.validation.runs import (
    CASES,
    Case,
    blocks_of,
    errors,
    profile_of,
    read_run,
    simulate,
    simulated_samples,
    simulated_series,
)
from twinserve.experiments.validation.step_times import (
    events_markdown,
    plot_events,
    validate_events,
)
from twinserve.experiments.validation.tables import markdown, plot_run
from twinserve.profiles.measured.step_files import read_steps
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_atomically

# model filter in the file of steps, profile
STEPS = (
    ("llama-2-70b", "llama-2-70b@h100:tp4/operators"),
    ("codellama-34b", "codellama-34b@h100:tp2"),
)


def truth_folder(given: Path | None = None) -> Path:
    """The folder with vllm_runs/ and steps/: `given`, or the first of TWINSERVE_TRUTH that has
    them."""
    named = os.environ.get("TWINSERVE_TRUTH", "").split(os.pathsep)
    for folder in [given] if given is not None else [Path(p) for p in named if p]:
        if (folder / "vllm_runs").is_dir():
            return folder
    where = str(given) if given is not None else "TWINSERVE_TRUTH"
    raise WorkloadError(
        f"no measured runs: {where} must name the folder that holds vllm_runs/ and steps/"
    )


def validate_run(truth: Path, case: Case, form: str | None = None) -> dict:
    """One run: errors by metric and statistic, what passed through the engine, and how queue and
    memory went over time.

    The result holds the samples too, under keys that start with an underscore, for plots.
    """
    run = read_run(truth, case)
    profile = profile_of(run, form)
    rows = simulate(run, profile)
    ours, real = simulated_samples(rows), run.samples
    table = errors(real, ours)
    blocks = blocks_of(run, profile)
    series = simulated_series(rows, blocks, run.series.t.to_numpy(float))
    apart = {
        name: float(np.abs(series[name] - run.series[name]).mean())
        for name in ("running", "waiting", "kv_cache_pct")
        if name != "kv_cache_pct" or run.num_blocks
    }
    return {
        "run": case.label,
        "profile": profile.name,
        "form": profile.step_model.form,
        "num_blocks": {
            "value": blocks,
            "source": "measured" if run.num_blocks else profile.num_gpu_blocks_source,
        },
        "errors": {
            m: dict(zip(g.statistic, g.error, strict=True))
            for m, g in table.groupby("metric", sort=False)
        },
        "real_s": {
            m: dict(zip(g.statistic, g.real_s, strict=True))
            for m, g in table.groupby("metric", sort=False)
        },
        "peer_errors": run.peer,
        "preemptions": int(rows.requests.recomputes.sum()),
        "duration_s": {
            "real": float(run.requests.last_token_s.max()),
            "ours": float(rows.requests.last_token_s.max()),
        },
        "mean_distance": apart,
        "_samples": (real, ours),
        "_series": (run.series, series),
    }


def validate_steps(truth: Path) -> list[dict]:
    """Mean absolute relative error on single steps of vLLM 0.15.1 on H100, operators and
    roofline."""
    found = []
    for model, name in STEPS:
        steps, seconds = read_steps(truth / "steps" / "h100_vllm_steps.csv.gz", model)
        operators = load_profile(name)
        roofline = derive_profile(operators.llm, operators.gpu, operators.tp)
        prompt = np.array([len(work.prefill_new) > 0 for work in steps])
        row = {"model": model, "steps": len(steps)}
        for form, profile in (("operators", operators), ("roofline", roofline)):
            timed = profile.model()
            wrong = np.abs([timed.step_seconds(work) for work in steps] / seconds - 1.0)
            row[form] = {
                "all": float(wrong.mean()),
                "decode": float(wrong[~prompt].mean()),
                "other": float(wrong[prompt].mean()),
            }
        found.append(row)
    return found


def validation(
    *,
    truth: Path | None = None,
    out: Path | None = None,
    form: Annotated[
        str | None, Parameter(help="roofline: profiles derived from specs, for comparison")
    ] = None,
    events: Annotated[bool, Parameter(negative="")] = False,
    overload: Annotated[bool, Parameter(negative="")] = False,
    releases: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Simulate measured runs of real engines and print the errors.

    Parameters
    ----------
    truth: Path
        Folder with the measured runs; by default TWINSERVE_TRUTH.
    out: Path
        Folder for results.json and the plots.
    form: str
        roofline: with profiles derived from specs instead of operator tables, for comparison.
    events: bool
        Read real step times off the events of the dense runs too, and compare the model's for the
        same batches.
    overload: bool
        Also ask whether steps of full batches grow longer with scheduling, or through a run.
    releases: bool
        Also simulate the runs with the rules of older releases of vLLM.
    as_json: bool
        Print the results as JSON.
    """
    if form not in (None, "roofline"):
        raise WorkloadError(
            f"--form {form!r}: only roofline can be chosen; leave it out for operator tables"
        )
    folder = truth_folder(truth)
    cases = CASES
    runs = [validate_run(folder, case, form) for case in cases]
    steps = validate_steps(folder)
    if out is not None:
        for run, case in zip(runs, cases, strict=True):
            plot_run(run, out / f"{case.folder}.png")
    dense = [case for case in cases if events and "ep2" not in case.profile]
    read = [(case, validate_events(folder, case, form)) for case in dense]
    if out is not None:
        for case, run in read:
            plot_events(run, out / f"{case.folder}.events.png")
    report = {"runs": [_shown(run) for run in runs], "steps": steps}
    if events:
        report["events"] = [_shown(run) for _, run in read]
    if overload:
        found = of_steps(folder / "steps" / "h100_vllm_steps.csv.gz")
        dense = [case for case in cases if "ep2" not in case.profile]
        report["overload"] = found + [run for case in dense if (run := of_run(folder, case))]
    if releases:
        report["releases"] = [row for case in cases for row in of_release(folder, case)]
    if out is not None:
        write_atomically(out / "results.json", dump_json(report).encode())
    text = markdown(report) + ("\n" + events_markdown(report["events"]) if events else "")
    text += "\n" + overload_markdown(report["overload"]) if overload else ""
    text += "\n" + releases_markdown(report["releases"]) if releases else ""
    print(dump_json(report) if as_json else text, end="")


def _shown(run: dict) -> dict:
    return {name: value for name, value in run.items() if name[0] != "_"}


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="validation", help=validation.__doc__)
    app.default(validation)
    run_app(app, arguments)
