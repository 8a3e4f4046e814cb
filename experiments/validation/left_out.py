"""The forms of step times as if the marks of an engine, or of its GPU, had not been measured. The
expected error of another engine, or another GPU, rests on them.

    operators   two host terms, fitted to the remaining marks of all GPUs
    roofline    the constants of the family, fitted to its kernel tables and its remaining marks; if
                the whole GPU is left out, the constants of another family
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

from twinserve.experiments.study.claims import texts
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.composition import StepComposition, StepTimeModel, decode_work, prefill_work
from twinserve.profiles.forms.efficiency import FAMILIES, FAMILY_FIT_ERROR
from twinserve.profiles.forms.kernel_rates import measures_messages
from twinserve.profiles.forms.roofline import Efficiency, RooflineModel
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.names import ProfileName, list_profiles
from twinserve.profiles.operators.model import OperatorForm, OperatorModel
from twinserve.profiles.profile import Profile, load_profile
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError

# Fit a GPU family's efficiency constants to measurements: one least-squares fit for all models.
# Two kinds of samples. *Kernel* samples are sums of measured operator times (the tables of
# aiconfigurator-core, or any other). They lack scheduler and host, and were taken on an idle GPU.
# *Engine* samples are measured steps of a serving engine: host overhead included, at clocks that
# hold under load. The fit minimises the relative error of both together, the engine samples (few)
# weighted to count as much as the tables.
# What an engine under load keeps of the compute rate that operator tables show. Assumed, not
# fitted: tensor clocks fall under sustained load. Two prefill-bearing H100 steps bracket it: with
# 0.85 a 483-token step of Llama-2-70B TP4 comes out 6 % short and a 577-token step of CodeLlama-34B
# TP2 30 % long.
SUSTAINED = 0.85

# Searched ranges. host_s has a floor where no step of few requests was measured: a fit without it
# gives all of a slow GPU's overhead to the per-request term.
BOUNDS: dict[str, tuple[float, float]] = {
    "gemm_mfu": (0.3, 1.1),
    "gemm_half_tokens": (0.0, 200.0),
    "gemm_mbu": (0.5, 0.95),
    "kv_mbu": (0.4, 0.95),
    "attention_mfu": (0.2, 1.0),
    "allreduce_s": (3e-6, 12e-6),
    "link_share": (0.1, 1.0),
    "layer_s": (20e-6, 60e-6),
    "host_s": (0.5e-3, 4e-3),
    "host_request_s": (2e-6, 80e-6),
}
MESSAGES = ("allreduce_s", "link_share")
START = Efficiency(
    gemm_mfu=0.65,
    gemm_half_tokens=60,
    gemm_mbu=0.8,
    kv_mbu=0.75,
    attention_mfu=0.55,
    elementwise_mbu=0.8,
    layer_s=35e-6,
    allreduce_s=6e-6,
    link_share=0.6,
    host_s=1e-3,
    host_request_s=10e-6,
)


@dataclass(frozen=True)
class Sample:
    """One measured step: what was computed, on what, and how long it took (seconds)."""

    llm: ModelSpec
    gpu: GpuSpec
    tp: int
    work: StepComposition
    seconds: float


def relative_errors(samples: Sequence[Sample], efficiency: Efficiency) -> np.ndarray:
    """float64[samples]: predicted / measured - 1."""
    models: dict[tuple[str, str, int], RooflineModel] = {}
    predicted = np.empty(len(samples))
    for i, sample in enumerate(samples):
        key = (sample.llm.name, sample.gpu.name, sample.tp)
        if key not in models:
            models[key] = RooflineModel(sample.llm, sample.gpu, sample.tp, efficiency)
        predicted[i] = models[key].step_seconds(sample.work)
    return predicted / np.array([s.seconds for s in samples]) - 1.0


def fit_efficiency(
    kernels: Sequence[Sample],
    engine: Sequence[Sample] = (),
    *,
    sustained: float = SUSTAINED,
    least_host_s: float = BOUNDS["host_s"][0],
) -> Efficiency:
    """The constants of one GPU family; `elementwise_mbu` is kept from START.

    Without engine samples the host terms stay at START's, and those of messages where these are
    measured. `sustained` multiplies the compute rates that the kernel samples show; the result has
    it applied. ProfileError with fewer samples than constants.
    """
    kept = MESSAGES if all(measures_messages(s.gpu) for s in (*kernels, *engine)) else ()
    names = [n for n in BOUNDS if n not in kept and (engine or not n.startswith("host"))]
    bounds = BOUNDS | {"host_s": (least_host_s, BOUNDS["host_s"][1])}
    if len(kernels) + len(engine) < len(names):
        raise ProfileError(
            f"{len(kernels) + len(engine)} samples cannot fix {len(names)} constants"
        )
    x0 = np.array([getattr(START, n) for n in names])
    weight = np.sqrt(2.0 * max(len(kernels), 1) / max(len(engine), 1))

    def constants(x: np.ndarray) -> Efficiency:
        return replace(START, **dict(zip(names, (x * x0).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        found = constants(x)
        bare = replace(found, host_s=0.0, host_request_s=0.0)
        parts = [np.log1p(relative_errors(kernels, bare))] if kernels else []
        if engine:
            parts.append(weight * np.log1p(relative_errors(engine, _derated(found, sustained))))
        return np.concatenate(parts)

    low, high = (np.array([bounds[n][side] for n in names]) / x0 for side in (0, 1))
    # soft_l1: a few operator points sit on kernel-selection steps that no smooth form follows.
    fit = least_squares(
        residuals,
        np.ones(len(names)),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
    )
    return _derated(constants(fit.x), sustained)


def operator_samples(
    llm: ModelSpec, config: str, gpu: GpuSpec, system: str, tp: int
) -> Iterator[Sample]:
    """Kernel samples from aiconfigurator-core (the [profiles] extra): prefills, chunks on a prefix,
    decodes.

    `config` is the Hugging Face name or folder and `system` the GPU as aiconfigurator names them.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise ProfileError(
            "operator tables need aiconfigurator-core: pip install aiconfigurator-core"
        ) from None
    tables = EngineHandle.compile(config, system, "vllm", tp_size=tp)
    chunks = [(2**k, 0) for k in range(6, 15)]
    for new, resident in [*chunks, (512, 4096), (2048, 2048), (2048, 16384), (2048, 65536)]:
        ms = tables.predict_prefill_latency(1, new + resident, resident)
        yield Sample(llm, gpu, tp, prefill_work(new, resident), ms / 1e3)
    for requests in (1, 4, 8, 16, 32, 64, 128, 256):
        for context in (128, 512, 1024, 2048, 4096):
            ms = tables.decode_step_latency(requests, context, 2)
            yield Sample(llm, gpu, tp, decode_work(requests, context), ms / 1e3)


def _derated(efficiency: Efficiency, sustained: float) -> Efficiency:
    return replace(
        efficiency,
        gemm_mfu=efficiency.gemm_mfu * sustained,
        attention_mfu=efficiency.attention_mfu * sustained,
    )


# -- measurements of decode steps on vLLM, one number each (`data.yaml`) ---------------------------
class Mark(NamedTuple):
    """engine: MODEL@GPU[:tpN]; requests that decode, tokens of context each, milliseconds."""

    engine: str
    requests: int
    context: int
    ms: float

    @property
    def step(self) -> tuple[StepComposition, float]:
        """Its work and its seconds."""
        return decode_work(self.requests, self.context), self.ms * 1e-3


MARKS, OWN = (
    tuple(Mark(*row) for row in rows)
    for data in [texts(__file__, "data.yaml")]
    for rows in (data.MARKS, data.OWN)
)


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
