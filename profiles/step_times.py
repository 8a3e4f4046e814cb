"""The form of a run's step times, `--step-times`, and its origin.

auto       what the profile's name gives: the file that is shipped, or the roofline
roofline   derived from the specs of model and GPU
operators  composed from kernel tables: shipped, or made of aiconfigurator-core's if that is
           installed
measured   fitted to steps of the engine itself: a profile of `twinserve calibrate` has them
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from twinserve.profiles.evidence import FORMS, expected_errors, own_errors
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.names import ProfileName, list_profiles
from twinserve.profiles.profile import Profile, derive_profile, load_profile
from twinserve.profiles.specs import ProfileError

StepTimes = Literal["auto", "roofline", "operators", "measured"]
# Of a profile, what is about the times of its steps; the rest stays as it was.
_OF_STEPS = ("source", "fit_error", "notes", "step_model")


@dataclass(frozen=True)
class Choice:
    """A profile with the step times that were asked for, and why those."""

    profile: Profile
    why: str


def choose(name: str, wanted: StepTimes = "auto") -> Choice:
    """Return the profile of this name or file with step times of the form `wanted`. Raises
    ProfileError, one line, if it cannot be had."""
    profile = load_profile(name)
    if wanted == "auto":
        return Choice(profile, _why(name, profile))
    if wanted == "measured":
        if profile.source != "measured":
            raise ProfileError(
                f"--step-times measured: {name} has none, its step times are {profile.source} "
                f"({profile.step_model.form}); measure them with `twinserve calibrate`, and name "
                "the file that it writes with --profile"
            )
        return Choice(profile, "as asked for")
    if profile.step_model.form == wanted:
        return Choice(profile, "as asked for")
    _refuse_other_name(name, profile, wanted)
    other = _roofline(profile) if wanted == "roofline" else _operators(profile)
    return Choice(_with_steps_of(other, profile), "as asked for")


def _refuse_other_name(name: str, profile: Profile, wanted: str) -> None:
    """A name with /FORM has said already which one."""
    if not name.lower().endswith(".json") and ProfileName.parse(name).form:
        raise ProfileError(
            f"--step-times {wanted}: {name} names step times of {profile.step_model.form}; drop "
            f"/{ProfileName.parse(name).form} or --step-times"
        )


def _roofline(profile: Profile) -> Profile:
    found = derive_profile(
        profile.llm, profile.gpu, profile.tp, profile.dp, profile.ep, pp=profile.pp
    )
    found.model()  # a mixture of experts is refused here, not in a run
    return found


def _operators(profile: Profile) -> Profile:
    """Shipped under the other name of the engine, or made now."""
    if profile.splits_beyond_tp:
        raise ProfileError(
            "--step-times operators: kernel tables lack ranks that share experts, and pipeline "
            f"stages ({profile.name}); choose --step-times roofline"
        )
    engine = ProfileName(profile.llm.name, profile.gpu.name, profile.tp)
    for name in (f"{engine}/operators", str(engine)):
        if name in list_profiles():
            found = load_profile(name)
            if found.step_model.form == "operators" and found.llm == profile.llm:
                return found
    # with scipy and all: seldom needed
    from twinserve.profiles.operators.shipped import operator_profile

    if profile.gpu.name not in SYSTEMS:
        raise ProfileError(
            f"--step-times operators: there are no kernel tables of {profile.llm.name} on "
            f"{profile.gpu.name}; choose --step-times roofline, or a GPU of "
            f"{', '.join(sorted(SYSTEMS))}"
        )
    if find_spec("aiconfigurator_core") is None:
        raise ProfileError(
            f"--step-times operators: no tables of {engine} are shipped; making them needs pip "
            "install 'twinserve[profiles]', or choose --step-times roofline"
        )
    return operator_profile(
        profile.llm, profile.gpu.name, profile.tp, max_num_seqs=profile.max_num_seqs
    )


def _with_steps_of(other: Profile, profile: Profile) -> Profile:
    """`profile`, KV room and limits included, with the step times of `other`."""
    changes = {field: getattr(other, field) for field in _OF_STEPS}
    changed = profile.model_copy(update=changes)
    changed.model()  # a scale that the form cannot have is refused here
    return changed


def _why(name: str, profile: Profile) -> str:
    """Why the name gives this form, in a few words."""
    if str(name).lower().endswith(".json"):
        return "as the file has them"
    form, errors, parsed = profile.step_model.form, own_errors(profile), ProfileName.parse(name)
    if form in errors and len(errors) == len(FORMS):
        (other,) = (one for one in FORMS if one != form)
        mine, theirs = f"{errors[form]:.1%}", f"{errors[other]:.1%}"
        if not parsed.form and errors[form] <= errors[other]:
            return f"nearer to its decode marks than {other}, {mine} against {theirs}"
        if not parsed.form:
            return f"as shipped, though {other} is nearer to its marks, {theirs} against {mine}"
    if parsed.form:
        return "as named"
    if str(parsed) in list_profiles():
        return "as shipped"
    return "as no tables of it are shipped" + _advice(profile)


def _advice(profile: Profile) -> str:
    """Which form is surer of such an engine, where tables can be made for it."""
    if profile.gpu.name not in SYSTEMS or profile.splits_beyond_tp:
        return ""
    ours, tables = expected_errors(profile), expected_errors(profile, "operators")
    pairs = [(ours.decode, tables.decode), (ours.prefill, tables.prefill)]
    if any(theirs.error >= mine.error or not theirs.known for mine, theirs in pairs):
        return ""
    errors = " and ".join(f"{theirs.error:.0%}" for _, theirs in pairs)
    return f" (--step-times operators is surer: {errors})"
