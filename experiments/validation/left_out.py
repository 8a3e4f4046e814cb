"""The forms of step times as if the marks of an engine, or of its GPU, had not been measured. The
expected error of another engine, or another GPU, rests on them.

    operators   two host terms, fitted to the remaining marks of all GPUs
    roofline    the constants of the family, fitted to its kernel tables and its remaining marks; if
                the whole GPU is left out, the constants of another family
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from scipy.optimize import nnls

from twinserve.experiments.validation.marks import MARKS, OWN
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.efficiency import FAMILIES, FAMILY_FIT_ERROR
from twinserve.profiles.forms.efficiency_fit import BOUNDS, Sample, fit_efficiency, operator_samples
from twinserve.profiles.forms.roofline import Efficiency, RooflineModel
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.names import ProfileName, list_profiles
from twinserve.profiles.operators.model import OperatorForm, OperatorModel
from twinserve.profiles.profile import Profile, load_profile
from twinserve.profiles.specs import GpuSpec

# What the constants of a family were fitted to: GPUs with kernel tables, and models on them.
TABLES = {"hopper": ("h100", "h200"), "ampere": ("a100-80g",)}
TABLED = (
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", 1),
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", 2),
    ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B", 4),
    ("qwen3-32b", "Qwen/Qwen3-32B", 2),
)


def operators_of(engine: str) -> Profile | None:
    """The shipped profile of operator tables of MODEL@GPU[:tpN]; None without one."""
    for name in (f"{engine}/operators", engine):
        if name in list_profiles():
            profile = load_profile(name)
            if isinstance(profile.step_model, OperatorForm):
                return profile
    return None


def gpu_of(engine: str) -> GpuSpec:
    return find_gpu(ProfileName.parse(engine).gpu)


def operators_without(engine: str, whole_gpu: bool) -> StepTimeModel | None:
    """Operators of `engine` with host terms that have not seen its marks, or none of its GPU."""
    profile = operators_of(engine)
    if profile is None:
        return None
    mine, rows, rest = gpu_of(engine), [], []
    for mark in MARKS:
        if gpu_of(mark.engine) == mine if whole_gpu else mark.engine == engine:
            continue
        work, seconds = mark.step
        kernels = _kernels(mark.engine).step_seconds(work)
        rows.append([1 / seconds, mark.requests / seconds])
        rest.append(1 - kernels / seconds)
    (host, request), _ = nnls(rows, rest)
    return OperatorModel(replace(profile.step_model, host_s=host, host_request_s=request))


@cache
def _kernels(engine: str) -> OperatorModel:
    form = operators_of(engine).step_model
    return OperatorModel(replace(form, host_s=0.0, host_request_s=0.0))


def roofline_without(engine: str) -> StepTimeModel | None:
    """The roofline of `engine` with constants that have not seen its marks; None where its family
    has no other marks. Needs aiconfigurator-core."""
    name, gpu = ProfileName.parse(engine), gpu_of(engine)
    found = fitted(gpu.family, without=engine)
    if found is None:
        return None
    return RooflineModel(find_model(name.model), gpu, name.tp, found)


def fitted(family: str, without: str = "") -> Efficiency | None:
    """The constants of a family, as `efficiency.csv` has them; without what was measured of one
    engine. None where nothing is left."""
    measured = [mark for mark in (*MARKS, *OWN) if gpu_of(mark.engine).family == family]
    kept = [_sample(mark) for mark in measured if mark.engine != without]
    if not kept or family not in TABLES:
        return None
    least = 0.0 if family == "hopper" else BOUNDS["host_s"][0]  # steps of one request
    return fit_efficiency(_tables(family), kept, least_host_s=least)


def rooflines_of_other_families(engine: str) -> Iterator[StepTimeModel]:
    """The roofline of `engine` with the constants of each other family that has marks."""
    name, gpu = ProfileName.parse(engine), gpu_of(engine)
    for family in FAMILY_FIT_ERROR:
        if family != gpu.family:
            yield RooflineModel(find_model(name.model), gpu, name.tp, FAMILIES[family])


def _sample(mark) -> Sample:
    name = ProfileName.parse(mark.engine)
    return Sample(find_model(name.model), gpu_of(mark.engine), name.tp, *mark.step)


@cache
def _tables(family: str) -> list[Sample]:
    return [
        sample
        for gpu in TABLES[family]
        for model, config, tp in TABLED
        for sample in operator_samples(find_model(model), config, find_gpu(gpu), SYSTEMS[gpu], tp)
    ]
