"""The shipped profiles whose step times are operator tables, and how their files are made again:

python -m twinserve.profiles.operators.shipped DIR [FOLDER]

Needs aiconfigurator-core; FOLDER holds the per-layer tables (steps/rtx_layer_profile), without it
those are left out.

Collective operations: points of the tables that ship with aiconfigurator-core 0.12.0 (Apache-2.0),
16 bits, two RTX PRO 6000 over PCIe, microseconds by message bytes. The tables count elements
(`message_size`): vLLM leaves messages of 8 MB to NCCL, and their all-reduces change at 4 Mi
elements; int8 takes half as long as 16 bits at one size. vLLM's own all-reduce, inside CUDA graphs,
was measured under 0.19.0 and 0.24.0 on hosts with 15 and 35 GB/s, as PCIe topologies differ. The
table of 0.19.0 is taken: the measured runs are of that release, and agree with it. Gathers and
scatters were measured on the faster host alone.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.names import ProfileName
from twinserve.profiles.operators.aic import form_from_aiconfigurator, measured_tokens
from twinserve.profiles.operators.bounds import SMS
from twinserve.profiles.operators.interpolation import Curve
from twinserve.profiles.operators.layers import form_from_layers
from twinserve.profiles.operators.model import OperatorForm, default_capture
from twinserve.profiles.profile import Profile, derive_profile, save_profile
from twinserve.profiles.shipped import REPLACED, ROWS, SHIPPED, engine_settings
from twinserve.profiles.specs import ModelSpec, ProfileError

MICRO = 1e-6
HOSTS_APART = 2.4  # times, messages of 8 MB and more

BYTES = np.array([2.0**k for k in range(13, 29)])  # 8 KiB to 256 MiB
_ALLREDUCE = (
    19.1, 20.5, 20.6, 22.3, 27.5, 39.3, 55.5, 91.5, 157.5, 295.9, 567.2, 1117.6, 2213.9, 4406.2,
    8778.1, 17549.9,
)  # fmt: skip
PCIE_PAIR_ALLREDUCE_S = MICRO * np.array(_ALLREDUCE)
_GATHER = (
    6.2, 6.2, 6.3, 8.3, 10.3, 14.6, 24.0, 31.2, 47.2, 80.2, 145.5, 277.1, 539.9, 1066.6, 2112.6,
    4188.5,
)  # fmt: skip
_SCATTER = (
    6.2, 6.2, 7.3, 7.9, 8.4, 13.6, 22.2, 31.2, 48.6, 84.0, 153.6, 293.6, 574.3, 1131.6, 2205.6,
    4207.8,
)  # fmt: skip


def _on_the_slower_host(micros: tuple[float, ...]) -> np.ndarray:
    """Seconds: the start stays, the rest goes at its rate."""
    return MICRO * (micros[0] + HOSTS_APART * (np.array(micros) - micros[0]))


PCIE_PAIR_GATHER_S = _on_the_slower_host(_GATHER)
PCIE_PAIR_SCATTER_S = _on_the_slower_host(_SCATTER)


def tensor_parallel_pair(llm: ModelSpec):
    """(seconds of all all-reduces by tokens, seconds to gather logits by rows) of two ranks over
    PCIe.

    One all-reduce after the embedding and two a layer. Past the largest message time goes on as
    between the last two.
    """
    allreduce = Curve(BYTES, PCIE_PAIR_ALLREDUCE_S)

    def comm(tokens: np.ndarray) -> np.ndarray:
        size = tokens * llm.hidden * llm.dtype_bytes
        return (2 * llm.layers + 1) * allreduce.of(size)

    def gather(rows: np.ndarray) -> np.ndarray:
        return np.interp(rows * llm.vocab * llm.dtype_bytes, BYTES, PCIE_PAIR_GATHER_S)

    return comm, gather


def expert_parallel_pair(llm: ModelSpec):
    """Return the seconds of all layers' gathers and scatters, by the tokens of each of two
    expert-parallel ranks. Hidden states and router logits are gathered, expert outputs reduced and
    scattered."""

    def comm(tokens: np.ndarray) -> np.ndarray:
        hidden, logits = (
            2 * tokens * width * llm.dtype_bytes for width in (llm.hidden, llm.experts)
        )
        layer = np.interp(hidden, BYTES, PCIE_PAIR_GATHER_S) + np.interp(
            hidden, BYTES, PCIE_PAIR_SCATTER_S
        )
        return llm.layers * (layer + np.interp(logits, BYTES, PCIE_PAIR_GATHER_S))

    return comm


# The two constants that aiconfigurator's tables leave out, fitted (nnls, relative errors) to the 17
# decode marks of H100, A100 and L40S together: none a GPU, none a model. Mean error 2.9 % on those
# marks, 3.5 % (largest 12 %) where an engine's marks are left out of the fit. Since `bounds` has
# the L40S read its KV from memory: 2.8 and 3.4 %, and a fit would give 0.40 ms and 7.3 us.
HOST_S, HOST_REQUEST_S = 0.42e-3, 7.1e-6
MARKS_ERROR = 0.029
MARKED = ("h100", "a100-80g", "l40s")
# A GPU without marks: the mean error where those of one of the three are predicted with host terms
# fitted to the others (H100 6.0 %, A100 3.8 %, L40S 2.1 %; largest 21 %). Since `bounds`: 4.5 %
# (5.3, 3.8, 1.3; largest 19 %). Files keep the larger error, and with it their bits.
UNSEEN_ERROR = 0.05

AIC_NOTE = (
    "Operators composed from the tables of aiconfigurator-core 0.12.0 (Apache-2.0, vLLM 0.24.0; "
    "A100: 0.14.0), with"
    " host terms fitted to public decode marks of H100, A100 and L40S; fit_error is the mean "
    "error on those marks"
    "{unseen}. Prefill is not validated."
)
_UNSEEN = " where the GPU's own are left out of the fit (largest 21 %): there are none of this GPU"
# RTX PRO 6000, one card: no marks, but a measured run of Llama-3.1-8B (docs/validation.md),
# simulated with these tables and the same host terms; neither has seen it.
RUN_ERROR = 0.015
RUN_NOTE = (
    "Operators composed from the tables of aiconfigurator-core 0.12.0 (Apache-2.0, vLLM 0.24.0), "
    "with host terms fitted"
    " to public decode marks of H100, A100 and L40S; fit_error is that of the mean TPOT of a "
    "measured run of"
    " Llama-3.1-8B on this GPU (vLLM 0.19.0), simulated with such a profile; other models are "
    "not validated."
)
_NO_QUANTISED = " No error is claimed: no mark is of quantised weights."
_NO_MIXTURE = " No error is claimed: no mark is of a mixture of experts."
# What the marks say nothing about, though they are of that GPU: no error is claimed.
UNMARKED = {
    ("llama-3.1-70b", "l40s", 8): (
        " No error is claimed: the marks of L40S are of one GPU. The all-reduce (vLLM 0.14.0) "
        "reaches 2 to 3 GB/s over"
        " eight L40S; on a server that connects them better, steps are much shorter."
    )
}
LAYER_NOTE = (
    "Operators composed from numbers derived from per-layer kernel times of vLLM 0.19.0 "
    "(LLMServingSim 2 @ 5daddb21,"
    " MIT, (c) 2024 CASYS Lab KAIST); nothing fitted to a run. {comm}fit_error is the error of "
    "the mean TPOT"
    " of a measured run (docs/validation.md)."
)

# (model, GPU, tp); the plain name where no roofline file has it, or where operators meet the marks
# better.
AIC = tuple(key for key, row in ROWS.items() if row["operators"] == "aic")


@dataclass(frozen=True)
class Layers:
    """A profile from per-layer tables. stem: of the files; parallel: None, "tp" or "ep" (a pair
    over PCIe)."""

    stem: str
    parallel: str | None
    fit_error: float


LAYERS = {
    key: Layers(row["stem"], row["parallel"] or None, float(row["fit_error"]))
    for key, row in ROWS.items()
    if row["operators"] == "layers"
}


def operator_profile(
    model: str | ModelSpec,
    gpu: str,
    tp: int = 1,
    *,
    form: str = "",
    fit_error: float | None = None,
    **engine,
) -> Profile:
    """A profile of any model on a GPU that aiconfigurator has tables for. `engine`: as for
    derive_profile."""
    base = derive_profile(model, gpu, tp, **engine)
    if base.gpu.name not in SYSTEMS:
        raise ProfileError(
            f"no operator tables for GPU {gpu!r}; there are some for {', '.join(sorted(SYSTEMS))}"
        )
    tables = form_from_aiconfigurator(
        base.llm,
        base.gpu.name,
        tp,
        capture_tokens=default_capture(base.max_num_seqs),
        host_s=HOST_S,
        host_request_s=HOST_REQUEST_S,
    )
    note, known = _known_error(base)
    return _with_tables(base, tables, note, known if fit_error is None else fit_error, form)


def _known_error(base: Profile) -> tuple[str, float | None]:
    """What the notes say and the error that was measured on this GPU, or None."""
    llm, gpu, tp = base.llm, base.gpu.name, base.tp
    if (llm.name, gpu, tp) in UNMARKED:
        return AIC_NOTE.format(unseen="") + UNMARKED[llm.name, gpu, tp], None
    if llm.weights is not None:
        return AIC_NOTE.format(unseen="") + _NO_QUANTISED, None
    if gpu == "rtxpro6000" and tp == 1 and not llm.experts:
        return RUN_NOTE, RUN_ERROR
    if llm.experts:
        return AIC_NOTE.format(unseen="") + _NO_MIXTURE, None
    if gpu in MARKED:
        return AIC_NOTE.format(unseen=""), MARKS_ERROR
    return AIC_NOTE.format(unseen=_UNSEEN), UNSEEN_ERROR


def shipped_operators(model: str, gpu: str, tp: int) -> Profile:
    """The profile of one entry of AIC, computed."""
    key = (model, gpu, tp)
    form = "operators" if key in SHIPPED and key not in REPLACED else ""
    return operator_profile(model, gpu, tp, form=form, **engine_settings(key))


def layer_profile(key: tuple[str, str, int], folder: Path) -> Profile:
    """The profile of one entry of LAYERS, computed from the tables in `folder`."""
    found, llm, gpu = LAYERS[key], find_model(key[0]), find_gpu(key[1])
    base = derive_profile(llm, gpu, key[2], **engine_settings(key))
    more, note, form = {}, "", ""
    if gpu.name in SYSTEMS:
        ranks = 2 if found.parallel == "ep" else 1
        more["measured"] = measured_tokens(llm, gpu.name, key[2], expert_ranks=ranks)
        note = (
            "GEMMs, norms and experts by tokens: aiconfigurator-core 0.12.0 (Apache-2.0, vLLM "
            "0.24.0). "
        )
    if found.parallel == "tp":
        more["comm"], more["gather"] = tensor_parallel_pair(llm)
        note += (
            "All-reduce: vLLM 0.19.0 on one PCIe host; another is 2.4 times as fast "
            "(profiles/operators/shipped.py). "
        )
    elif found.parallel == "ep":
        more["comm"] = expert_parallel_pair(llm)
        form = "ep2"
        note += "One of two data-parallel ranks that share the experts (EP2) over PCIe. "
    tables = form_from_layers(
        folder,
        found.stem,
        llm,
        key[2],
        sms=SMS[gpu.name],
        capture_tokens=default_capture(base.max_num_seqs),
        **more,
    )
    return _with_tables(base, tables, LAYER_NOTE.format(comm=note), found.fit_error, form)


def names() -> list[str]:
    """Every name that this module gives a file."""
    found = [
        ProfileName(*key, "operators" if key in SHIPPED and key not in REPLACED else "")
        for key in AIC
    ]
    found += [
        ProfileName(*key, "ep2" if entry.parallel == "ep" else "") for key, entry in LAYERS.items()
    ]
    return sorted(map(str, found))


def _with_tables(
    base: Profile, tables: OperatorForm, notes: str, fit_error: float | None, form: str
) -> Profile:
    name = ProfileName.parse(base.name)
    return base.model_copy(
        update={
            "name": str(ProfileName(name.model, name.gpu, name.tp, form)),
            "step_model": tables,
            "source": "derived",
            "fit_error": fit_error,
            "notes": notes,
        }
    )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m twinserve.profiles.operators.shipped DIR [FOLDER]")
    made = [shipped_operators(*key) for key in AIC]
    if len(sys.argv) == 3:
        made += [layer_profile(key, Path(sys.argv[2])) for key in LAYERS]
    for profile in made:
        save_profile(profile, Path(sys.argv[1]) / ProfileName.parse(profile.name).file_name)
    print(f"{len(made)} profiles written")
