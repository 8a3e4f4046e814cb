"""The simulator against runs and steps that others measured: `twinserve study validation`.

runs      four runs of real vLLM, simulated with their own engine arguments, arrival times and
          prefix blocks, beside the published errors of LLMServingSim 2
steps     single steps of vLLM on H100
events    step times that the runs' own events tell

docs/validation.md has the results and what they mean.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.measured.scores import whole
from twinserve.experiments.measured.truth import truth_folder
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Cell, Text, plain
from twinserve.experiments.validation.runs import (
    CASES,
    STATISTICS,
    Case,
    blocks_of,
    profile_of,
    read_run,
    simulate,
    simulated_samples,
)
from twinserve.experiments.validation.step_times import validate_events
from twinserve.profiles.measured.step_files import read_steps
from twinserve.profiles.profile import derive_profile, load_profile

# model filter in the file of steps, profile
STEPS = (
    ("llama-2-70b", "llama-2-70b@h100:tp4/operators"),
    ("codellama-34b", "codellama-34b@h100:tp2"),
)
DATA = texts(__file__, "data.yaml")
H100_STEPS = "steps/h100_vllm_steps.csv.gz"
BY_LABEL = {case.label: case for case in CASES}
DENSE = {label: case for label, case in BY_LABEL.items() if "ep2" not in case.profile}
FORMS = ("operators", "roofline")


def validate_run(truth: Path, case: Case, form: str | None = None) -> list[dict[str, Any]]:
    """One run: a row for TTFT, TPOT and E2E.

    real_s               measured mean
    mean, p50 ..         error of the statistic; theirs_NAME: LLMServingSim 2's, where published
    preemptions, blocks  of the simulation; ours_end_s, real_end_s: the last token
    """
    run = read_run(truth, case)
    profile = profile_of(run, form)
    rows = simulate(run, profile)
    real, ours = run.samples, simulated_samples(rows)
    about = {
        "profile": profile.name,
        "blocks": blocks_of(run, profile),
        "preemptions": int(rows.requests.recomputes.sum()),
        "real_end_s": float(run.requests.last_token_s.max()),
        "ours_end_s": float(rows.requests.last_token_s.max()),
    }
    return [
        {"metric": metric, "real_s": float(np.mean(real[metric]))}
        | {name: float(of(ours[metric]) / of(real[metric]) - 1) for name, of in STATISTICS.items()}
        | {f"theirs_{name}": run.peer.get(metric, {}).get(name, np.nan) for name in STATISTICS}
        | about
        for metric in real
    ]


def validate_steps(truth: Path) -> list[dict[str, Any]]:
    """Mean absolute relative error on single steps of vLLM 0.15.1 on H100, a row for each model and
    form."""
    found = []
    for model, name in STEPS:
        steps, seconds = read_steps(truth / H100_STEPS, model)
        operators = load_profile(name)
        roofline = derive_profile(operators.llm, operators.gpu, operators.tp)
        prompt = np.array([len(work.prefill_new) > 0 for work in steps])
        for form, profile in zip(FORMS, (operators, roofline), strict=True):
            timed = profile.model()
            wrong = np.abs([timed.step_seconds(work) for work in steps] / seconds - 1.0)
            parts = {"all": wrong, "decode": wrong[~prompt], "other": wrong[prompt]}
            means = {part: float(values.mean()) for part, values in parts.items()}
            found.append({"model": model, "form": form, "steps": len(steps), **means})
    return found


# -- the figures -----------------------------------------------------------------------------------
def of_a_run(run: str, form: str, seed: int) -> list[dict[str, Any]]:
    return validate_run(truth_folder("vllm_runs"), BY_LABEL[run], form)


def of_single_steps(seed: int) -> list[dict[str, Any]]:
    return validate_steps(truth_folder(H100_STEPS))


def of_events(run: str, form: str, seed: int) -> list[dict[str, Any]]:
    """A row for each range of sizes: of decodes alone, of steps with prompts, and of tokens counted
    a second."""
    found = validate_events(truth_folder("vllm_runs"), BY_LABEL[run], form)
    return [{"part": part} | row for part in ("decode", "prompt", "counted") for row in found[part]]


def _theirs(row: pd.Series) -> str:
    said = [row[f"theirs_{name}"] for name in ("mean", "p50", "p99")]
    return ", ".join(f"{error:+.1%}" for error in said if not np.isnan(error)) or "-"


def _time(row: pd.Series) -> str:
    return f"{row.real_s:.2f} s" if row.real_s >= 1 else f"{row.real_s * 1e3:.1f} ms"


def _sizes(row: pd.Series) -> str:
    low, high = int(row.above) + 1, int(row.to)
    return f"{low} to {high}" if high > low else str(high)


def _cells(columns: Mapping[str, tuple[str, str]]) -> dict[str, Cell]:
    return {heading: plain(*column) for heading, column in columns.items()}


RUNS = {"run": tuple(BY_LABEL), "form": FORMS}
EVENTS = RUNS | {"run": tuple(DENSE)}
FEW = {"run": 1, "form": 1}
TEXTS = {
    "runs": Text(
        "Simulated over measured, less 1.",
        {"form": "form", "": "metric"},
        {
            "real mean": _time,
            **_cells({name: (name, "+.1%") for name in STATISTICS}),
            "LLMServingSim 2: mean, p50, p99": _theirs,
        },
        each="run",
        heading="### {}",
    ),
    "steps": Text(
        "Mean absolute errors.",
        {"model": "model", "steps": "steps", "form": "form"},
        _cells(DATA.OF_STEPS),
    ),
    "events": Text(
        "Decodes alone by requests, steps with prompts by tokens, in ms. All-reduce: ours, "
        "and the one that would leave no error. Counted: requests; real over ours.",
        {"form": "form", "": "part"},
        {"size": _sizes, **_cells(DATA.OF_EVENTS)},
        each="run",
        heading="### {}",
    ),
}
FIGURES = (
    ("runs", "Measured runs", Grid(RUNS, few=FEW), of_a_run),
    ("steps", "Single steps of vLLM 0.15.1 on H100", Grid({}), of_single_steps),
    ("events", "Step times read off the events", Grid(EVENTS, few=FEW), of_events),
)
STUDY = Study(
    "validation",
    "",
    [Figure(*parts, whole, text=TEXTS[parts[0]]) for parts in FIGURES],
    seeds=1,
    intro="Others' measurements, simulated.",
)
