"""Forms of step times against measured steps, prompts and whole runs: `twinserve study step_times`.

Points are other people's (`points.py`), loads are formulas (`load.py`). No form is fitted to a
point. docs/validation.md has the results.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.step_times.bars import MISSED, held_out, with_groups
from twinserve.experiments.step_times.load import seconds
from twinserve.experiments.step_times.points import Measured, read_measured
from twinserve.experiments.step_times.runs import score_runs
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.output import table_lines
from twinserve.experiments.study.study import Figure, Study
from twinserve.profiles.catalog import find_model
from twinserve.profiles.evidence import expected_errors, kind_of_weights
from twinserve.profiles.kv_memory.releases import is_known
from twinserve.profiles.memory import with_fp8_kv, with_server_flags
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import StepTimes, choose

FORMS: tuple[StepTimes, ...] = ("roofline", "operators", "auto")
DECODES = ("tpot", "loop")


def score(points: Iterable[Measured], forms: Sequence[StepTimes] = FORMS) -> pd.DataFrame:
    """A row for each point and form: kind, gpu, source, what, seconds measured and ours, their
    ratio, the printed error (relative), whether it is said to be known. `why` instead, if the form
    has no times of it or the point is not scored."""
    rows = []
    for point in points:
        for form in forms:
            row = {"source": point.source, "what": point.what, "profile": point.profile}
            row |= {"isl": point.isl, "osl": point.osl, "concurrency": point.concurrency}
            row |= {"form": form, "measured_s": point.seconds, "why": point.why_not}
            row |= {"suspect": point.suspect}
            try:
                profile = _profile(point, form)
                row |= {
                    "kind": kind_of_weights(profile.llm),
                    "gpu": profile.gpu.name,
                    "tp": profile.tp,
                }
                row |= {"family": profile.gpu.family, "ran": profile.step_model.form}
                ours = seconds(point, profile)
                errors = expected_errors(profile)
                small = point.concurrency < 32
                of = errors.decode_small if small else errors.decode_large
                of = of if point.what in DECODES else errors.prefill
                row |= {"ours_s": ours, "ratio": ours / point.seconds}
                row |= {"error": of.error, "known": of.known}
            except ProfileError as error:
                row["why"] = row["why"] or str(error)
            rows.append(row)
    return pd.DataFrame(rows)


def _profile(point: Measured, form: StepTimes) -> Profile:
    """As the server was started, as far as that is known."""
    if point.what == "layer":
        if form == "operators":
            raise ProfileError("tables are of all layers")
        return _of_one_layer(point.profile)
    profile = _chosen(point.profile, form)
    if point.release:
        version = ".".join(map(str, point.release)) + ".0"
        if is_known(version):  # its KV memory, too
            profile = with_server_flags(profile, engine_version=version)
        profile = profile.model_copy(update={"engine_version": version})
    if point.eager:
        profile = profile.model_copy(update={"enforce_eager": True})
    return with_fp8_kv(profile) if point.fp8_kv else profile


@lru_cache(maxsize=256)
def _chosen(name: str, form: StepTimes) -> Profile:
    return choose(name, form).profile


def _of_one_layer(name: str) -> Profile:
    parsed = ProfileName.parse(name)
    return derive_profile(replace(find_model(parsed.model), layers=1), parsed.gpu)


def summary(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """By the columns `by`, of scored points: points and sources; median and 90th percentile of the
    size of the error, and mean error. Also the share that the printed range holds, its median width
    (high / low - 1) and the mean interval score, all in per cent. The range over the measured time:
    `low` and `high`, or ours with `error` in both directions."""
    if "low" not in rows:
        rows = rows.assign(low=rows.ratio / (1 + rows.error), high=rows.ratio * (1 + rows.error))
    low, high = np.log(rows.low), np.log(rows.high)
    # in logarithms: the width, and 2 / MISSED times what lies outside
    outside = low.clip(lower=0) - high.clip(upper=0)
    rows = rows.assign(
        error=(rows.ratio - 1).abs(),
        held=outside == 0,
        width=rows.high / rows.low - 1,
        interval=high - low + 2 / MISSED * outside,
    )
    found = []
    for key, part in rows.groupby(list(by), sort=True):
        numbers = {
            "median": part.error.median(),
            "p90": part.error.quantile(0.9),
            "mean": (part.ratio - 1).mean(),
            "held": part.held.mean(),
            "width": part.width.median(),
            "interval": part.interval.mean(),
        }
        of = {"points": len(part), "sources": part.source.nunique()}
        percent = {name: 100 * value for name, value in numbers.items()}
        found.append(dict(zip(by, key, strict=True)) | of | percent)
    return pd.DataFrame(found)


HEADER = ("points", "sources", "median", "p90", "mean", "held", "width", "interval")


def truth_folder() -> Path:
    """The folder of TWINSERVE_TRUTH that has the points. ProfileError where none has."""
    for folder in filter(None, os.environ.get("TWINSERVE_TRUTH", "").split(os.pathsep)):
        if (Path(folder) / "step_points.csv").is_file():
            return Path(folder)
    raise ProfileError(
        "measured steps not found; set TWINSERVE_TRUTH to the folder that holds step_points.csv"
    )


def markdown(rows: pd.DataFrame) -> str:
    """Tables of scored points, and how many are not scored, by reason."""
    good, unseen = with_groups(rows[rows.why == ""]), held_out(rows)
    kinds = ("step", "kind", "family", "form")
    lines = []
    for title, found, by in (
        ("### By kind and GPU family", good, kinds),
        ("### By source", good, ("step", "source", "form")),
        ("### All", good, ("step", "form")),
        ("### All, ranges of other sources", unseen, ("step", "form")),
    ):
        lines += [title, "", *_table(found, by), ""]
    return "\n".join([*lines, "### Not scored", "", *_not_scored(rows)]) + "\n"


def _table(rows: pd.DataFrame, by: Sequence[str]) -> list[str]:
    cells = [
        [*(str(row[name]) for name in by), *(f"{row[name]:.0f}" for name in HEADER)]
        for row in summary(rows, by).to_dict("records")
    ]
    return table_lines((*by, *HEADER), cells)


def markdown_of_runs(rows: pd.DataFrame) -> str:
    """Tables of whole runs."""
    good = rows[rows.why == ""]
    lines = []
    for title, by in (
        ("### Runs by source", ("metric", "source", "kind", "form")),
        ("### Runs", ("metric", "host", "form")),
    ):
        lines += [title, "", *_table(good, by), ""]
    lines += [
        f"- {count} x {why}" for why, count in rows.why[rows.why != ""].value_counts().items()
    ]
    return "\n".join(lines) + "\n"


def _not_scored(rows: pd.DataFrame) -> list[str]:
    bad = rows.why[rows.why != ""].str[:100]
    return [f"- {count} x {why}" for why, count in bad.value_counts().items()]


def scored(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score(read_measured(truth_folder()), (form,)).to_dict("records")


def scored_runs(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score_runs(truth_folder(), form).to_dict("records")


def whole(points: pd.DataFrame) -> pd.DataFrame:
    """Nothing is random here: the points are the table."""
    return points.drop(columns="seed").assign(why=points.why.fillna(""))


GRID = Grid({"form": FORMS}, few={"form": 1})
STUDY = Study(
    "step_times",
    "",
    [
        Figure("steps", "Steps and prompts", GRID, scored, whole, text=markdown),
        Figure("runs", "Whole runs", GRID, scored_runs, whole, text=markdown_of_runs),
    ],
    seeds=1,
    intro="Forms of step times on others' measurements; numbers are per cent.",
)
