"""The published latency forms and ours, fitted to the same recorded steps, with the error on steps that a fit has not
seen.

Every form is linear in its coefficients, which are not negative: one `nnls` on relative errors (`relative_nnls`).
Cross-validation leaves out each of five contiguous parts of the file in turn: neighbouring steps are alike, so parts
that are drawn at random would be half seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.sampling import relative_nnls
from twinserve.profiles.specs import ProfileError

FOLDS = 5
Features = Callable[[Sequence[StepComposition]], np.ndarray]


@dataclass(frozen=True)
class FormFit:
    """A fitted form. errors: mean absolute relative; error on all steps, cross_error on parts left out.

    names, coefficients   seconds a unit; none for a model that is taken as it is
    """

    form: str
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    error: float
    cross_error: float
    largest_error: float


def bros(steps: Sequence[StepComposition]) -> np.ndarray:
    """BROS Sec. IV-A: Ln, Ln La and a constant for each phase present."""
    rows = []
    for work in steps:
        new, n = int(work.prefill_new.sum()), work.decode_requests
        seen, context = new + int(work.prefill_resident.sum()), work.decode_context + n
        rows.append((new, new * seen, new > 0, n, n * context, n > 0))
    return np.array(rows, float)


def echo(steps: Sequence[StepComposition]) -> np.ndarray:
    """Echo eqs. 6 and 7, phases added (eq. 8 with lambda fixed), with a constant for decodes, which eq. 7 lacks."""
    rows = []
    for work in steps:
        n = work.decode_requests
        mean = (work.decode_context + n) / n if n else 0.0
        ends = work.prefill_new + work.prefill_resident
        squares = float((ends**2 - work.prefill_resident**2).sum())
        rows.append((squares, work.prefill_new.sum(), max(work.decode_context_max + 1, mean) if n else 0, mean, n > 0))
    return np.array(rows, float)


def layerkv(steps: Sequence[StepComposition]) -> np.ndarray:
    """LayerKV eq. 3: tokens and their squares; it has no decode form, so a constant stands for decodes."""
    lengths = [work.prefill_new.astype(float) for work in steps]
    return np.array(
        [(n.sum(), (n**2).sum(), work.decode_requests > 0) for n, work in zip(lengths, steps, strict=True)], float
    )


def _ours(steps: Sequence[StepComposition]) -> np.ndarray:
    rows = [w.decode_requests + len(w.prefill_new) for w in steps]
    return np.column_stack([np.ones(len(steps)), rows])


LINEAR: dict[str, tuple[Features, tuple[str, ...]]] = {
    "bros": (bros, ("prefill Ln", "prefill Ln La", "prefill", "decode Ln", "decode Ln La", "decode")),
    "echo": (echo, ("l^2", "l", "longest", "mean", "decode")),
    "layerkv": (layerkv, ("l", "l^2", "decode")),
}


def fit_forms(
    steps: Sequence[StepComposition], seconds: np.ndarray, model: StepTimeModel | None = None
) -> list[FormFit]:
    """All forms on the same steps; with `model` also that model as it is, and with host terms fitted to what it leaves
    (constant and per request). ProfileError with fewer than ten steps."""
    if len(steps) < 10:
        raise ProfileError(f"{len(steps)} steps are too few for a fit with cross-validation; record ten or more")
    seconds = np.asarray(seconds, float)
    found = [_fit(name, of(steps), names, seconds) for name, (of, names) in LINEAR.items()]
    if model is not None:
        base = np.array([model.step_seconds(work) for work in steps])
        wrong = np.abs(base / seconds - 1.0)
        found.append(FormFit("profile as it is", (), (), float(wrong.mean()), float(wrong.mean()), float(wrong.max())))
        names = ("host_s", "host_request_s")
        found.append(_fit("profile + host", _ours(steps), names, seconds, base))
    return found


def _fit(form: str, features: np.ndarray, names: tuple[str, ...], seconds: np.ndarray, base=0.0) -> FormFit:
    base = np.broadcast_to(base, seconds.shape)
    used = features.any(axis=0)  # a column that no step has says nothing
    columns = features[:, used]

    def solve(chosen: np.ndarray) -> np.ndarray:
        return _residual_nnls(columns[chosen], seconds[chosen], base[chosen])

    whole = solve(np.ones(len(seconds), bool))
    wrong = np.abs((base + columns @ whole) / seconds - 1.0)
    left_out = np.empty(len(seconds))
    for part in np.array_split(np.arange(len(seconds)), FOLDS):
        kept = np.ones(len(seconds), bool)
        kept[part] = False
        left_out[part] = np.abs((base[part] + columns[part] @ solve(kept)) / seconds[part] - 1.0)
    coefficients = np.zeros(len(names))
    coefficients[used] = whole
    errors = (float(wrong.mean()), float(left_out.mean()), float(wrong.max()))
    return FormFit(form, names, tuple(coefficients.tolist()), *errors)


def _residual_nnls(features: np.ndarray, seconds: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Coefficients of what `base` leaves, errors relative to the whole time."""
    if not base.any():
        return relative_nnls(features, seconds)[0]
    from scipy.optimize import nnls

    return nnls(features / seconds[:, None], (seconds - base) / seconds)[0]
