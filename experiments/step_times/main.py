"""Forms of step times against measured steps and prompts: `python -m
twinserve.experiments.step_times`.

Points are other people's (`points.py`), loads are formulas (`load.py`). No form is fitted to a
point. docs/validation.md has the results.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
import pandas as pd
from cyclopts import Parameter

from twinserve.experiments.step_times.load import seconds
from twinserve.experiments.step_times.points import Measured, read_measured
from twinserve.experiments.study.output import check_target, table_lines
from twinserve.profiles.catalog import find_model
from twinserve.profiles.evidence import expected_errors, kind_of_weights
from twinserve.profiles.kv_memory.releases import is_known
from twinserve.profiles.memory import with_fp8_kv, with_server_flags
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import StepTimes, choose
from twinserve.sim.cli.main import run_app
from twinserve.traces.write import write_atomically

FORMS: tuple[StepTimes, ...] = ("roofline", "operators", "auto")
DECODES = ("tpot", "loop")
# How much wider bars are where all points are of one source. With sources left out, bars of the
# others' points hold 79 % of the decodes of a kind on average, and 95 % if they are so much wider.
STRANGERS = 1.5
ENOUGH = 3  # points of a source
LEAST_POINTS = 5  # of a kind
MISSED = 0.1  # of the points a range may miss


def score(points: Iterable[Measured], forms: Sequence[StepTimes] = FORMS) -> pd.DataFrame:
    """A row for each point and form: kind, gpu, source, what, seconds measured and ours, their
    ratio, the printed error (relative), whether it is said to be known. `why` instead, where the
    form has no times of it or the point is not scored."""
    rows = []
    for point in points:
        for form in forms:
            row = {"source": point.source, "what": point.what, "profile": point.profile}
            row |= {"isl": point.isl, "osl": point.osl, "concurrency": point.concurrency}
            row |= {"form": form, "measured_s": point.seconds, "why": point.why_not}
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
    return with_fp8_kv(profile) if point.fp8_kv else profile


@lru_cache(maxsize=256)
def _chosen(name: str, form: StepTimes) -> Profile:
    return choose(name, form).profile


def _of_one_layer(name: str) -> Profile:
    parsed = ProfileName.parse(name)
    return derive_profile(replace(find_model(parsed.model), layers=1), parsed.gpu)


def summary(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """By the columns `by`, of scored points: points and sources; median and 90th percentile of the
    size of the error, mean error, the share that the printed range holds, its median width
    (high / low - 1) and the mean interval score, all in per cent."""
    found = []
    for key, part in rows.groupby(list(by), sort=True):
        error = (part.ratio - 1).abs()
        low, high = 1 / (1 + part.error), 1 + part.error
        held = (part.ratio <= high) & (part.ratio >= low)
        # in logarithms: the width, and 2 / MISSED times what lies outside
        apart = np.log(part.ratio).abs() - np.log(high)
        interval = 2 * np.log(high) + 2 / MISSED * apart.clip(lower=0)
        width = high**2 - 1
        numbers = {
            "points": len(part),
            "sources": part.source.nunique(),
            "median": 100 * error.median(),
            "p90": 100 * error.quantile(0.9),
            "mean": 100 * (part.ratio - 1).mean(),
            "held": 100 * held.mean(),
            "width": 100 * width.median(),
            "interval": 100 * interval.mean(),
        }
        found.append(dict(zip(by, key, strict=True)) | numbers)
    return pd.DataFrame(found)


def bars(rows: pd.DataFrame) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """(form, step, kind, family) -> (error to be expected, points), of scored points that are not
    dense models in 16 bits: what 90 % of the points keep, and STRANGERS times that where they are
    all of one source, for servers of others.
    """
    found = {}
    good = with_step(rows[(rows.why == "") & (rows.kind != "dense 16 bits")])
    size = np.exp(np.log(good.ratio).abs()) - 1
    for key, part in good.assign(size=size).groupby(["ran", "step", "kind", "family"]):
        sources = (part.source.value_counts() >= ENOUGH).sum()
        if sources and len(part) >= LEAST_POINTS:
            wider = 1.0 if sources > 1 else STRANGERS
            found[key] = (float(wider * part["size"].quantile(1 - MISSED)), len(part))
    return found


def with_step(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(step=np.where(rows.what.isin(DECODES), "decode", "prefill"))


HEADER = ("points", "sources", "median", "p90", "mean", "held", "width", "interval")


def step_times(
    *,
    form: Annotated[tuple[StepTimes, ...], Parameter(negative="")] = FORMS,
    out: Path | None = None,
) -> None:
    """Score forms of step times on measured steps and prompts, by kind of model and GPU.

    Parameters
    ----------
    form: tuple[str, ...]
        Forms, as of `simulate --step-times`; by default all. Tables take some minutes to be made.
    out: Path
        CSV with a row for each point and form.
    """
    check_target(out)
    rows = score(read_measured(truth_folder()), form)
    if out is not None:
        write_atomically(out, rows.to_csv(index=False, float_format="%.6g").encode())
    print(markdown(rows), end="")


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
    good = with_step(rows[rows.why == ""])
    lines = []
    for title, by in (
        ("### By kind and GPU family", ("step", "kind", "family", "form")),
        ("### All", ("step", "form")),
    ):
        found = summary(good, by)
        cells = [
            [*(str(row[name]) for name in by), *(f"{row[name]:.0f}" for name in HEADER)]
            for row in found.to_dict("records")
        ]
        lines += [title, "", *table_lines((*by, *HEADER), cells), ""]
    bad = rows[rows.why != ""].why.str[:100]
    lines += ["### Not scored", ""]
    lines += [f"- {count} x {why}" for why, count in bad.value_counts().items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(
        name="step_times", help=step_times.__doc__, version_flags=[], result_action="return_value"
    )
    app.default(step_times)
    run_app(app, arguments)
