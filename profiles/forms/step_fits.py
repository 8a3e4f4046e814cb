"""The published latency forms and ours, fitted to the same recorded steps, with the error on steps
that a fit has not seen.

Every form is linear in its coefficients, which are not negative: one `nnls` on relative errors
(`relative_nnls`). Cross-validation leaves out each of five contiguous parts of the file in turn:
neighbouring steps are alike, so parts that are drawn at random would be half seen. `fitted_profile`
puts a fit into a profile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.profile import Profile
from twinserve.profiles.sampling import relative_nnls
from twinserve.profiles.specs import ProfileError

FOLDS = 5
FITTED = ("host", "bros", "table")  # what `fitted_profile` can make
Features = Callable[[Sequence[StepComposition]], np.ndarray]


@dataclass(frozen=True)
class FormFit:
    """A fitted form. errors: mean absolute relative; error on all steps, cross_error on parts left
    out.

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
    """Echo eqs. 6 and 7, phases added (eq. 8 with lambda fixed), with a constant for decodes, which
    eq. 7 lacks."""
    rows = []
    for work in steps:
        n = work.decode_requests
        mean = (work.decode_context + n) / n if n else 0.0
        ends = work.prefill_new + work.prefill_resident
        squares = float((ends**2 - work.prefill_resident**2).sum())
        rows.append(
            (
                squares,
                work.prefill_new.sum(),
                max(work.decode_context_max + 1, mean) if n else 0,
                mean,
                n > 0,
            )
        )
    return np.array(rows, float)


def layerkv(steps: Sequence[StepComposition]) -> np.ndarray:
    """LayerKV eq. 3: tokens and their squares; it has no decode form, so a constant stands for
    decodes."""
    lengths = [work.prefill_new.astype(float) for work in steps]
    return np.array(
        [
            (n.sum(), (n**2).sum(), work.decode_requests > 0)
            for n, work in zip(lengths, steps, strict=True)
        ],
        float,
    )


def _ours(steps: Sequence[StepComposition]) -> np.ndarray:
    rows = [w.decode_requests + len(w.prefill_new) for w in steps]
    return np.column_stack([np.ones(len(steps)), rows])


LINEAR: dict[str, tuple[Features, tuple[str, ...]]] = {
    "bros": (
        bros,
        ("prefill Ln", "prefill Ln La", "prefill", "decode Ln", "decode Ln La", "decode"),
    ),
    "echo": (echo, ("l^2", "l", "longest", "mean", "decode")),
    "layerkv": (layerkv, ("l", "l^2", "decode")),
}


def fit_forms(
    steps: Sequence[StepComposition], seconds: np.ndarray, model: StepTimeModel | None = None
) -> list[FormFit]:
    """Fit all forms to the same steps, and a table of tokens (`TableModel`) if there are enough.
    With `model`, also that model unchanged, and with host terms fitted to its remainder (constant
    and per request). Raises ProfileError with fewer than ten steps."""
    if len(steps) < 10:
        raise ProfileError(
            f"{len(steps)} steps are too few for a fit with cross-validation; record ten or more"
        )
    seconds = np.asarray(seconds, float)
    found = [_fit(name, of(steps), names, seconds) for name, (of, names) in LINEAR.items()]
    try:
        found.append(_fit_table(steps, seconds))
    except ProfileError:
        pass  # steps of one size only
    if model is not None:
        found.append(as_it_is("profile as it is", model, steps, seconds))
        base = predictions(model, steps)
        found.append(
            _fit("profile + host", _ours(steps), ("host_s", "host_request_s"), seconds, base)
        )
    return found


def predictions(model: StepTimeModel, steps: Sequence[StepComposition]) -> np.ndarray:
    """float64[m], seconds."""
    return np.array([model.step_seconds(work) for work in steps], np.float64)


def as_it_is(
    form: str, model: StepTimeModel, steps: Sequence[StepComposition], seconds: np.ndarray
) -> FormFit:
    """Return the errors of a model that saw none of these steps."""
    wrong = np.abs(predictions(model, steps) / seconds - 1.0)
    return FormFit(form, (), (), float(wrong.mean()), float(wrong.mean()), float(wrong.max()))


def fitted_profile(
    profile: Profile,
    form: str,
    fits: Sequence[FormFit],
    steps: Sequence[StepComposition],
    seconds: np.ndarray,
) -> Profile:
    """`profile` with step times fitted to these steps; `fits` is what `fit_forms` found, with the
    profile's model.

    form   host: the profile's own form with host terms added (operators and roofline); bros: BROS's
           form, both phases; table: piecewise linear in tokens. Echo's and LayerKV's forms describe
           no whole engine step.
    ProfileError if the profile or the steps cannot carry that form.
    """
    by_name = {fit.form: fit for fit in fits}
    if form == "host":
        fit = by_name["profile + host"]
        return profile.with_host_terms(*fit.coefficients, fit_error=fit.cross_error)
    if form == "bros":
        fit = by_name["bros"]
        values = fit.coefficients
        if not (any(values[:3]) and any(values[3:])):
            raise ProfileError(
                "the steps hold one phase only, and BROS's form needs prompts and decodes; "
                "choose --form table"
            )
        return _replaced(
            profile,
            BrosLinearModel(PhaseCost(*values[:3]), PhaseCost(*values[3:])),
            fit,
            "BROS's form",
        )
    if form == "table":
        model = TableModel.fit(steps, seconds)
        return _replaced(profile, model, by_name["table"], "A table by tokens")
    raise ProfileError(f"a profile cannot hold the form {form!r}; choose {', '.join(FITTED)}")


def _replaced(profile: Profile, model, fit: FormFit, what: str) -> Profile:
    changes = {"step_model": model, "fit_error": fit.cross_error, "source": "measured"}
    return profile.model_copy(update=changes | {"notes": f"{what}, fitted to recorded steps."})


def _fit_table(steps: Sequence[StepComposition], seconds: np.ndarray) -> FormFit:
    def predict(kept: np.ndarray, asked: np.ndarray) -> np.ndarray:
        model = TableModel.fit([steps[i] for i in kept], seconds[kept])
        return predictions(model, [steps[i] for i in asked])

    whole = TableModel.fit(steps, seconds)
    names = (*(f"f({t})" for t in whole.tokens), "request", "context", "pair")
    values = (*whole.token_s, whole.request_s, whole.context_s, whole.pair_s)
    return _validated("table", names, values, predict, seconds)


def _fit(
    form: str, features: np.ndarray, names: tuple[str, ...], seconds: np.ndarray, base=0.0
) -> FormFit:
    base = np.broadcast_to(base, seconds.shape)
    used = features.any(axis=0)  # a column that no step has says nothing
    columns = features[:, used]

    def solve(chosen: np.ndarray) -> np.ndarray:
        return _residual_nnls(columns[chosen], seconds[chosen], base[chosen])

    def predict(kept: np.ndarray, asked: np.ndarray) -> np.ndarray:
        return base[asked] + columns[asked] @ solve(kept)

    coefficients = np.zeros(len(names))
    coefficients[used] = solve(np.arange(len(seconds)))
    return _validated(form, names, tuple(coefficients.tolist()), predict, seconds)


def _validated(
    form: str,
    names: tuple[str, ...],
    coefficients: tuple[float, ...],
    predict: Callable[[np.ndarray, np.ndarray], np.ndarray],
    seconds: np.ndarray,
) -> FormFit:
    """predict(kept, asked): a fit to the steps of one index array, asked for those of another
    one."""
    everyone = np.arange(len(seconds))
    wrong = np.abs(predict(everyone, everyone) / seconds - 1.0)
    left_out = np.empty(len(seconds))
    for part in np.array_split(everyone, FOLDS):
        kept = np.delete(everyone, part)
        left_out[part] = np.abs(predict(kept, part) / seconds[part] - 1.0)
    return FormFit(
        form, names, coefficients, float(wrong.mean()), float(left_out.mean()), float(wrong.max())
    )


def _residual_nnls(features: np.ndarray, seconds: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Coefficients of what `base` leaves, errors relative to the whole time."""
    if not base.any():
        return relative_nnls(features, seconds)[0]
    from scipy.optimize import nnls

    return nnls(features / seconds[:, None], (seconds - base) / seconds)[0]
