"""The papers' forms of step times against measured operators: `twinserve study forms`.

How well each form describes an engine (`accuracy.py`): steps recorded on one, and steps of the
profile that simulations run on. docs/profiles.md has the results; docs/echo.md says what a
wrong form costs a policy.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from twinserve.experiments.forms.accuracy import LABELS, on_a_profile, on_recorded_steps
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.study.tables import Text
from twinserve.experiments.validation.main import truth_folder
from twinserve.profiles.profile import load_profile
from twinserve.traces.workload import WorkloadError

ENGINE = "llama-3.1-8b@a100-80g"  # operator tables


def points(scale: Scale) -> list[Point]:
    """Recorded steps, if TWINSERVE_TRUTH names them, and drawn steps of a profile."""
    drawn = Point({}, {"truth": None, "each": 20 if scale.quick else 400})
    try:
        return [Point({}, {"truth": str(truth_folder()), "each": 0}), drawn]
    except WorkloadError:
        return [drawn]


def errors(truth: str | None, each: int) -> list[dict]:
    """A row for each form and kind of steps. truth: folder of recorded steps; None: so many drawn
    steps of each kind. See `accuracy.py` for the columns."""
    if truth is None:
        found = on_a_profile(load_profile(ENGINE), each=each)
        found.insert(0, "on", "profile, " + found.pop("kind"))
    else:
        found = on_recorded_steps(Path(truth))
        found.insert(0, "on", "recorded steps, " + found.pop("model"))
    return found.to_dict("records")


def table(rows: pd.DataFrame) -> pd.DataFrame:
    order = rows.form.map([*LABELS].index)
    return rows.assign(label=rows.form.map(LABELS), order=order).sort_values("order", kind="stable")


def _cell(row: pd.Series) -> str:
    if row["on"].startswith("recorded"):
        return f"{row.left_out:.1%}"
    return f"{row.error:.1%} ({100 * row.bias:+.1f})"


TEXT = Text(
    "Mean absolute relative errors. Recorded steps: on parts that the fit has not seen (what was "
    "fitted to none of them: on all). Profile: fitted to it as a policy does, on drawn steps, in "
    "brackets the mean error. Without TWINSERVE_TRUTH there are no recorded steps.",
    {"form": "label"},
    {"": _cell},
    over="on",
)
STUDY = Study(
    "forms", "", [Figure("errors", "errors of forms", points, errors, table, text=TEXT)], seeds=1
)
