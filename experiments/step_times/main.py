"""Forms of step times against measured steps, prompts and whole runs: `twinserve study step_times`.

Points are other people's (`measured/points.py`), loads are formulas (`load.py`). No form is fitted
to a point. docs/validation.md has the results.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.measured.points import Measured, read_measured
from twinserve.experiments.measured.scores import score_lines, sections, whole
from twinserve.experiments.step_times.bars import held_out, with_groups
from twinserve.experiments.step_times.load import seconds
from twinserve.experiments.step_times.runs import score_runs
from twinserve.experiments.study.grid import Grid
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
OF_POINT = ("source", "what", "profile", "isl", "osl", "concurrency")


def score(points: Iterable[Measured], forms: Sequence[StepTimes] = FORMS) -> pd.DataFrame:
    """A row for each point and form: kind, gpu, source, what, seconds measured and ours, their
    ratio, the printed error (relative), whether it is said to be known. `why` instead, if the form
    has no times of it or the point is not scored."""
    rows = []
    for point in points:
        for form in forms:
            row = {name: getattr(point, name) for name in OF_POINT}
            row |= {"form": form, "measured_s": point.seconds, "why": point.why_not}
            row |= {"suspect": point.suspect}
            try:
                profile = _profile(point, form)
                row |= {"kind": kind_of_weights(profile.llm), "gpu": profile.gpu.name}
                row |= {"tp": profile.tp, "family": profile.gpu.family}
                row |= {"ran": profile.step_model.form}
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


def markdown(rows: pd.DataFrame) -> str:
    """Tables of scored points, and how many are not scored, by reason."""
    good, unseen = with_groups(rows[rows.why == ""]), with_loads(held_out(rows))
    tables = {
        "By kind and GPU family": (good, ("step", "kind", "family", "form")),
        "By source": (good, ("step", "source", "form")),
        "All": (good, ("step", "form")),
        "All, ranges of other sources": (unseen, ("step", "form")),
        "By load, ranges of other sources": (unseen, ("step", "load", "form")),
        "By class, ranges of other sources": (unseen, ("step", "class", "form")),
    }
    parts = {title: score_lines(ranged(of), by) for title, (of, by) in tables.items()}
    return sections(parts, rows.why)


def with_loads(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored points with `load`: requests under way, or what else was measured."""
    of = {"a burst": rows.what == "batch", "one layer": rows.what == "layer"}
    of |= {"1 to 4": rows.concurrency <= 4, "5 to 31": rows.concurrency < 32}
    return rows.assign(load=np.select(list(of.values()), list(of), "32 or more"))


def ranged(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored points with the printed range over the measured time: ours with `error` in both
    directions."""
    low, high = rows.ratio / (1 + rows.error), rows.ratio * (1 + rows.error)
    return rows.assign(off=rows.ratio - 1, low=low, high=high)


def markdown_of_runs(rows: pd.DataFrame) -> str:
    """Tables of whole runs."""
    good = rows[rows.why == ""].assign(off=rows.ratio - 1)
    tables = {
        "Runs by source": ("metric", "source", "kind", "form"),
        "Runs": ("metric", "host", "form"),
    }
    return sections({title: score_lines(good, by) for title, by in tables.items()}, rows.why)


def scored(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score(read_measured(), (form,)).to_dict("records")


def scored_runs(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score_runs(form).to_dict("records")


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
