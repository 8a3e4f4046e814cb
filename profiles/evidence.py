"""The expected error of a profile's step times, from measurements near it.

`data/evidence.json` has the marks: times measured on real engines, each with the error of our
prediction by form of step times (`python -m twinserve.experiments.validation.evidence`).
`expected_errors` finds the marks nearest to a profile for each kind of step:

    decode_small   decodes of fewer than LARGE_BATCH requests
    decode_large   decodes of as many or more
    prefill        steps with LEAST_PROMPT tokens of prompts or more

Nearest first: this engine; its GPU; GPUs of its family; as soon as there are ENOUGH. Marks of other
engines count with the errors of constants that had not seen them. Dense models and mixtures of
experts say nothing of each other, nor does one rank of many. If nothing is near, the error is not
known, and the largest seen anywhere stands for it. Every mark is of 16 bits: quantised models and
mixtures have the errors on servers of other people, by kind. An error is the largest of the marks
found, since a mark is a mean over steps of one size. Servers of the same kind that were farther off
make it wider, except for an engine with marks.

Errors on servers of other people are by form, step, kind of model and GPU family. They are those
that 90 % of the measured points keep; a source has the weight of ten points at most. If all points
are of one source, the error is 1.2 times that in logarithms
(`twinserve.experiments.step_times.main`; a test compares them).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from twinserve.formats import shipped_json
from twinserve.profiles.catalog import MODELS
from twinserve.profiles.forms.efficiency import BORROWED
from twinserve.profiles.measured.model import MeasuredModel
from twinserve.profiles.names import EVIDENCE_FILE, ProfileName
from twinserve.profiles.profile import Profile
from twinserve.profiles.specs import ModelSpec

# (form, decode or prefill, kind, GPU family): (relative error, rounded up; points)
SERVER_ERRORS: dict[tuple[str, str, str, str], tuple[float, int]] = {
    ("operators", "decode", "dense 16 bits", "hopper"): (0.099, 95),
    ("operators", "decode", "dense fp8", "blackwell"): (0.193, 60),
    ("operators", "decode", "dense fp8", "hopper"): (0.156, 98),
    ("operators", "decode", "dense nvfp4", "blackwell"): (0.154, 60),
    ("operators", "decode", "mixture 16 bits", "ampere"): (0.245, 10),
    ("operators", "decode", "mixture fp8", "hopper"): (0.437, 41),
    ("operators", "decode", "mixture mxfp4", "blackwell"): (0.651, 66),
    ("operators", "decode", "mixture mxfp4", "hopper"): (0.138, 107),
    ("operators", "prefill", "dense 16 bits", "ampere"): (0.378, 6),
    ("operators", "prefill", "dense fp8", "blackwell"): (0.358, 8),
    ("operators", "prefill", "dense fp8", "hopper"): (0.254, 14),
    ("operators", "prefill", "dense nvfp4", "blackwell"): (0.474, 8),
    ("operators", "prefill", "mixture mxfp4", "blackwell"): (0.834, 8),
    ("operators", "prefill", "mixture mxfp4", "hopper"): (0.966, 14),
    ("roofline", "decode", "dense 16 bits", "ada-geforce"): (0.142, 8),
    ("roofline", "decode", "dense 16 bits", "hopper"): (0.081, 95),
    ("roofline", "decode", "dense fp8", "blackwell"): (0.124, 60),
    ("roofline", "decode", "dense fp8", "hopper"): (0.121, 98),
    ("roofline", "decode", "dense nvfp4", "blackwell"): (0.133, 60),
    ("roofline", "decode", "mixture 16 bits", "ampere"): (0.173, 10),
    ("roofline", "decode", "mixture fp8", "blackwell"): (0.229, 146),
    ("roofline", "decode", "mixture fp8", "hopper"): (0.227, 95),
    ("roofline", "decode", "mixture int4", "blackwell"): (0.167, 17),
    ("roofline", "decode", "mixture int4", "hopper"): (0.053, 15),
    ("roofline", "decode", "mixture mxfp4", "blackwell"): (0.271, 66),
    ("roofline", "decode", "mixture mxfp4", "hopper"): (0.19, 107),
    ("roofline", "decode", "mixture nvfp4", "blackwell"): (0.089, 154),
    ("roofline", "prefill", "dense 16 bits", "ampere"): (0.16, 9),
    ("roofline", "prefill", "dense fp8", "blackwell"): (0.288, 8),
    ("roofline", "prefill", "dense fp8", "hopper"): (0.227, 14),
    ("roofline", "prefill", "dense nvfp4", "blackwell"): (0.471, 8),
    ("roofline", "prefill", "mixture mxfp4", "ampere"): (0.239, 12),
    ("roofline", "prefill", "mixture mxfp4", "blackwell"): (0.39, 8),
    ("roofline", "prefill", "mixture mxfp4", "hopper"): (0.314, 14),
}


def kind_of_weights(llm: ModelSpec) -> str:
    """dense or mixture, and the format of its weights."""
    weights = "16 bits" if llm.weights is None else llm.weights.name
    return f"{'mixture' if llm.experts else 'dense'} {weights}"


LARGE_BATCH = 32  # requests
LEAST_PROMPT = 256  # tokens
ENOUGH = 3  # marks to take their largest error for that of all steps
KINDS = ("decode_small", "decode_large", "prefill")
FORMS = ("roofline", "operators")
PAGE = "docs/profiles.md"


@dataclass(frozen=True)
class Mark:
    """A measured time and the errors of ours, ours / measured - 1 by form.

    engine         MODEL@GPU[:tpN], with /FORM where only that profile stands for it
    kind           of KINDS
    size           requests that decode, or tokens of a step with prompts; None: of all sizes
    steps          that it is the mean of; None: not known
    measured_ms    milliseconds of a step; None: only the ratio to ours is known
    unseen_engine  errors of constants fitted without the marks of this engine
    unseen_gpu     errors of constants fitted without any mark of this GPU
    """

    engine: str
    kind: str
    size: int | None
    steps: int | None
    measured_ms: float | None
    source: str
    errors: dict[str, float]
    unseen_engine: dict[str, float] = field(default_factory=dict)
    unseen_gpu: dict[str, float] = field(default_factory=dict)
    model_kind: str = ""
    gpu: str = ""
    family: str = ""
    tp: int = 1

    def is_of(self, profile: Profile) -> bool:
        """Whether it was measured on the profile's engine."""
        if (self.gpu, self.tp) != (profile.gpu.name, profile.tp) or profile.splits_beyond_tp:
            return False
        model = ProfileName.parse(self.engine).model
        # a config.json may bear its name
        return model == profile.llm.name and MODELS.get(model) == profile.llm


@dataclass(frozen=True)
class StepError:
    """Expected relative error of a kind of steps. known: something measured is near; source: what,
    in a few words."""

    error: float
    source: str
    known: bool = True

    def __str__(self) -> str:
        if self.known:
            return f"{self.error:.0%} ({self.source})"
        return f"not known, taken as {self.error:.0%} ({self.source})"


@dataclass(frozen=True)
class ExpectedErrors:
    """By kind of step."""

    decode_small: StepError
    decode_large: StepError
    prefill: StepError

    @property
    def decode(self) -> StepError:
        """Of decodes of any number: the larger one, and the less known."""
        both = (self.decode_small, self.decode_large)
        return max(both, key=lambda one: (not one.known, one.error))

    def __str__(self) -> str:
        return f"decodes {self.decode}, prompts {self.prefill}"


def kind_of_model(llm: ModelSpec) -> str:
    """dense GQA, dense MHA, either with windows, or MoE."""
    if llm.experts:
        return "MoE"
    heads = "dense MHA" if llm.kv_heads == llm.heads else "dense GQA"
    return f"{heads} (windows)" if llm.window else heads


@cache
def marks() -> tuple[Mark, ...]:
    """All of evidence.json."""
    found = shipped_json("twinserve.profiles.data", EVIDENCE_FILE)
    return tuple(Mark(**mark) for mark in found["marks"])


def expected_errors(profile: Profile, form: str | None = None, decodes: int = 0) -> ExpectedErrors:
    """Of the profile's step times. If it is off on purpose, those of the profile before that.

    form     of step times of this form (of FORMS) in their place
    decodes  most requests that decode at once. Beyond what was measured, the errors on what was
             say nothing: then they are no smaller than those of step times that were not measured
    """
    errors = _within(profile, form)
    if form is None and decodes > (profile.most_requests or decodes):
        form = profile.step_model.form
        wider = {
            kind: _beyond(getattr(errors, kind), _expected(profile, kind, form), profile, decodes)
            for kind in ("decode_small", "decode_large")
        }
        errors = replace(errors, **wider)
    return errors


def _beyond(own: StepError, other: StepError, profile: Profile, decodes: int) -> StepError:
    wider = max(own.error, other.error)
    source = f"measured up to {profile.most_requests:,} requests at once, here {decodes:,}; "
    return StepError(wider, source + other.source, known=False)


def _within(profile: Profile, form: str | None) -> ExpectedErrors:
    if form is None or form == profile.step_model.form:
        own = {kind: _cross_validated(profile, kind) for kind in KINDS}
    else:
        own = {}
    form = form or profile.step_model.form
    return ExpectedErrors(
        **{kind: own.get(kind) or _expected(profile, kind, form) for kind in KINDS}
    )


def own_errors(profile: Profile) -> dict[str, float]:
    """Mean absolute error on the decode marks of the profile's engine, by form that has some."""
    mine = [m for m in marks() if m.is_of(profile) and m.kind != "prefill"]
    found = {form: [abs(m.errors[form]) for m in mine if form in m.errors] for form in FORMS}
    return {form: sum(errors) / len(errors) for form, errors in found.items() if errors}


def _expected(profile: Profile, kind: str, form: str) -> StepError:
    near = [mark for mark in marks() if mark.kind == kind and form in mark.errors]
    near = [m for m in near if (m.model_kind == "MoE") == bool(profile.llm.experts)]
    if profile.llm.weights is not None or profile.llm.kv_dtype_bytes is not None:
        near = []  # every mark is of 16 bits
    of_servers = _of_servers(profile, kind, form)
    few: list[tuple[list[Mark], str]] = []
    for found, place in _places(near, profile):
        if len(found) >= ENOUGH:
            errors = [_error(mark, form, profile) for mark in found]
            said = f"largest of {len(found)} marks {place}{_reach(found)}"
            marked = StepError(max(errors), said)
            if found[0].is_of(profile) or of_servers is None:
                return marked
            return max(marked, of_servers, key=lambda one: one.error)
        if found:
            few.append((found, place))
    if of_servers is not None:
        return of_servers
    return _of_few(profile, kind, form, *few[-1]) if few else _fallback(profile, kind, form)


def _of_servers(profile: Profile, kind: str, form: str) -> StepError | None:
    """Of models of its kind on the GPU's family; None if no server had such."""
    if profile.llm.kv_dtype_bytes is not None and profile.llm.weights is None:
        return None
    step, family = "prefill" if kind == "prefill" else "decode", profile.gpu.family
    said = kind_of_weights(profile.llm)
    found = SERVER_ERRORS.get((form, step, said, family))
    if found is None:
        return None
    error, points = found
    return StepError(error, f"kept by 90 % of {points} points of servers, {said}, {family}")


def _places(near: Sequence[Mark], profile: Profile) -> Iterator[tuple[list[Mark], str]]:
    """Yield marks at growing distance from the profile, with the place in words."""
    yield [mark for mark in near if mark.is_of(profile)], "of this engine"
    gpu = profile.gpu
    on_gpu = _of_enough_ranks([mark for mark in near if mark.gpu == gpu.name], profile)
    yield on_gpu, f"on {gpu.name}{_not_of(on_gpu, profile)}"
    of_family = _of_enough_ranks([mark for mark in near if mark.family == gpu.family], profile)
    gpus = ", ".join(sorted({mark.gpu for mark in of_family}))
    without = "" if gpu.name in gpus.split(", ") else f", none on {gpu.name}"
    yield of_family, f"on {gpus}{without}{_not_of(of_family, profile)}"


def _of_enough_ranks(found: list[Mark], profile: Profile) -> list[Mark]:
    """Return all marks, or none if they do not show what so many ranks exchange."""
    most = max((mark.tp for mark in found), default=1)
    return found if profile.tp == 1 or (most > 1 and profile.tp <= 2 * most) else []


def _not_of(found: Sequence[Mark], profile: Profile) -> str:
    kind = kind_of_model(profile.llm)
    return "" if any(mark.model_kind == kind for mark in found) else f", none of a {kind} model"


def _reach(found: Sequence[Mark]) -> str:
    """How far marks of prompts go."""
    sizes = [mark.size for mark in found if mark.kind == "prefill" and mark.size is not None]
    return f", none above {max(sizes):,} tokens" if sizes else ""


def _error(mark: Mark, form: str, profile: Profile) -> float:
    """Of its own engine, what it is; of another one the larger, with or without its marks."""
    unseen = 0.0 if mark.is_of(profile) else mark.unseen_engine.get(form, 0.0)
    return max(abs(mark.errors[form]), abs(unseen))


def _of_few(profile: Profile, kind: str, form: str, found: list[Mark], place: str) -> StepError:
    """Too few marks to tell: at least the largest error of an engine that a fit had not seen."""
    elsewhere = [abs(m.unseen_engine.get(form, 0.0)) for m in marks() if m.kind == kind]
    error = max(*elsewhere, *(_error(mark, form, profile) for mark in found))
    many = "one mark" if len(found) == 1 else f"{len(found)} marks"
    return StepError(error, f"largest of engines left out of a fit; {many} {place}{_reach(found)}")


def _cross_validated(profile: Profile, kind: str) -> StepError | None:
    """What a fit to the engine's own steps says of steps that it has not seen."""
    if profile.source != "measured":
        return None
    form = profile.step_model
    if isinstance(form, MeasuredModel) and form.fit is not None:
        known = form.fit.errors
        parts = ("decode",) if kind != "prefill" else ("prefill", "prefills", "chunk", "mixed")
        errors = [known[part] for part in parts if part in known]
        if errors:
            return StepError(max(errors), "mean on steps of this engine that the fit left out")
    elif profile.fit_error is not None and kind != "prefill":
        return StepError(profile.fit_error, "mean on steps of this engine that the fit left out")
    return None


def _fallback(profile: Profile, kind: str, form: str) -> StepError:
    """Return the largest error seen of this form, or of any form if it has none."""
    forms = (form,) if form in FORMS else FORMS
    # Constants from another family, or host terms from another GPU: how far such were off.
    strange = form == "operators" or profile.gpu.family in BORROWED
    seen: list[tuple[float, str]] = []
    for mark in marks():
        kept = [mark.errors, mark.unseen_engine] + ([mark.unseen_gpu] if strange else [])
        if (mark.kind == "prefill") == (kind == "prefill"):
            seen += [(abs(e[f]), mark.engine) for e in kept for f in forms if f in e]
    error, engine = max(seen)
    return StepError(error, f"the largest seen, on {engine}", known=False)


def recorded(profile: Profile, decodes: int = 0) -> dict[str, Any]:
    """For results: the profile's form of step times, and of decodes and prompts the relative error
    to be expected, whether it is known, and from what. decodes: most at once."""
    of = {"profile": profile.name, "form": profile.step_model.form}
    return of | described(expected_errors(profile, decodes=decodes))


def described(errors: ExpectedErrors) -> dict[str, dict[str, Any]]:
    """Of decodes and prompts, as `recorded` has them."""
    return {"decode": asdict(errors.decode), "prefill": asdict(errors.prefill)}


def describe_step_times(profile: Profile, why: str) -> str:
    """One line for a run's banner: form, why that one, and how sure it is."""
    form, errors = profile.step_model.form, expected_errors(profile)
    origin = "" if form == profile.source else f" ({profile.source})"
    scaled = "" if profile.step_scale is None else f", then {profile.step_scale}"
    return f"step times: {form}{origin}, {why}{scaled}; expected error: {errors} ({PAGE})"
