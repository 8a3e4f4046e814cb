"""A profile: everything a run needs to know about one engine (a model on GPUs), as one small JSON
file.

load_profile("llama-3.1-8b@h100")            shipped with the package
load_profile("llama-3.1-8b@h100/operators")   another shipped form of the same engine
load_profile("qwen2.5-14b@a100-40g:tp2")     MODEL@GPU:tpN; derived from specs where none is shipped
load_profile("deepseek-v3@h200:tp4:dp2:ep")  ranks that share experts (`ranks.py`)
load_profile("llama-3.1-70b@h100:tp2:pp4")   pipeline stages, four of two ranks each
load_profile("cfg/nemo.json@h100")            a model by its config.json, or by its id in the local
load_profile("Qwen/Qwen3-4B@h100")            Hugging Face cache
load_profile("runs/my-engine.json")          a file, for example one that `twinserve calibrate`
                                             wrote
load_profile(...).scaled(decode=1.1)          the same engine, off on purpose
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass

from twinserve.formats import Format, parse_json, whole_file
from twinserve.profiles.catalog import MODELS, find_gpu, find_model, nearest
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel, SwapTimeModel
from twinserve.profiles.forms.echo import EchoModel
from twinserve.profiles.forms.efficiency import family_error, find_efficiency
from twinserve.profiles.forms.kernels import rank_model, sums_kernels
from twinserve.profiles.forms.pipeline import PipelineModel
from twinserve.profiles.forms.roofline import Efficiency
from twinserve.profiles.forms.scaled import EagerModel, ScaledModel, StepScale, check_factor
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.gpus import gpu_for
from twinserve.profiles.host import NO_HOST_TIME, HostTime
from twinserve.profiles.kv_memory.derive import BLOCK_TOKENS, ServerFlags, derive_kv_blocks
from twinserve.profiles.kv_memory.releases import (
    default_budgets,
    default_utilization,
    parse_release,
)
from twinserve.profiles.measured.model import MeasuredModel
from twinserve.profiles.names import ProfileName, list_profiles, shipped_folder
from twinserve.profiles.operators.model import OperatorForm, OperatorModel, default_capture
from twinserve.profiles.ranks import check_ranks, check_stages
from twinserve.profiles.specs import STRICT, GpuSpec, ModelSpec, ProfileError, one_line, read_json

PROFILE: Format[dict] = Format(
    "profiles", version=1, by="twinserve calibrate, or twinserve profiles", oldest=1
)
Source = Literal["measured", "derived", "published", "stated"]
# A pinned-memory copy reaches about this share of the lane rate of PCIe (25 of 32 GB/s on gen 4).
PCIE_SHARE = 0.8
# Host memory for swapped KV, per rank: an assumption about the server, not about the engine.
HOST_SWAP_BYTES = 64 * 2**30


@dataclass(frozen=True, config=STRICT)
class RooflineForm:
    """The roofline of the profile's own model, GPU and tp, with these efficiency constants."""

    efficiency: Efficiency
    form: Literal["roofline"] = "roofline"


StepModelForm = Annotated[
    RooflineForm | OperatorForm | MeasuredModel | TableModel | BrosLinearModel | EchoModel,
    Field(discriminator="form"),
]


# Fields that files leave out where they have these values.
_LEFT_OUT = {
    "step_scale": None,
    "dp": 1,
    "ep": False,
    "pp": 1,
    "num_gpu_blocks_range": None,
    "enforce_eager": False,
    "fitted_requests": None,
}


class Profile(BaseModel):
    """One engine. Sizes are of the whole engine (all `tp` x `pp` ranks), rates bytes/s in one
    direction, times seconds.

    tp, pp, dp, ep    ranks, as `ranks.py` has them; of `dp` engines this is one
    source            how the step times were obtained
    fit_error         mean absolute relative error of the fit that gave the step times, on what the
                      notes say; None = unknown. What to expect of a run: profiles/evidence.py
    fitted_requests   most requests at once in the measurements that its terms were fitted to
    num_gpu_blocks    KV blocks of `block_tokens` tokens that a scheduler may use
    num_gpu_blocks_range   between which a derived number is expected; None: not known
    enforce_eager     the engine captures no CUDA graphs: more KV memory, and derived steps take as
                      long as their launches
    pcie_bytes_per_s  achieved, all ranks together (each moves its own heads over its own link)
    step_scale        factors on the step times, if the profile is off on purpose (`scaled`)
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    # of PROFILE: what is read from a file is of the present version by then
    version: int = Field(default=PROFILE.version, ge=PROFILE.version, le=PROFILE.version)
    name: str = Field(min_length=1)
    llm: ModelSpec
    gpu: GpuSpec
    tp: int = Field(ge=1)
    dp: int = Field(default=1, ge=1)
    ep: bool = False
    pp: int = Field(default=1, ge=1)
    engine: str = "vllm"
    engine_version: str | None = None
    source: Source
    fit_error: float | None = Field(default=None, ge=0)
    fitted_requests: int | None = Field(default=None, ge=1)
    notes: str = ""
    step_model: StepModelForm
    step_scale: StepScale | None = None
    block_tokens: int = Field(default=BLOCK_TOKENS, ge=1)
    num_gpu_blocks: int = Field(ge=1, le=10**15)
    num_gpu_blocks_source: Source
    num_gpu_blocks_range: tuple[int, int] | None = None
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enforce_eager: bool = False
    pcie_bytes_per_s: float = Field(ge=1.0, allow_inf_nan=False)
    host_swap_bytes: int = Field(ge=0, le=10**18)
    max_model_len: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)

    @model_validator(mode="after")
    def _consistent(self):
        derived = isinstance(self.step_model, RooflineForm)
        check_ranks(self.llm, self.gpu.name, self.tp, self.dp, self.ep, links=derived)
        check_stages(self.llm, self.gpu.name, self.tp, self.pp, self.dp)
        if self.splits_beyond_tp and not isinstance(self.step_model, RooflineForm):
            raise ValueError(
                "step times of experts that ranks share (dp, ep) and of pipeline stages are those "
                f"of the roofline, and not of {self.step_model.form!r}"
            )
        if self.max_model_len > self.kv_capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the {self.kv_capacity_tokens} tokens"
                f" that {self.num_gpu_blocks} KV blocks hold; lower it, or use more ranks"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_empty_scale(self, dump):
        data = dump(self)
        for name, value in _LEFT_OUT.items():
            if name in data and data[name] == value:
                del data[name]
        return data

    @property
    def splits_beyond_tp(self) -> bool:
        """Whether the model lies on ranks in another way than split over `tp`: there are stages, or
        experts lie in another way than all else."""
        return self.dp > 1 or self.ep or self.pp > 1

    @property
    def most_requests(self) -> int | None:
        """Of a decode step that was measured; None: the step times are of no measured engine, or
        hold for any number."""
        if self.fitted_requests is None and isinstance(self.step_model, MeasuredModel):
            return self.step_model.batches[-1]
        return self.fitted_requests

    @property
    def gpus(self) -> int:
        """Of one engine; data-parallel ranks are engines of their own."""
        return self.tp * self.pp

    def model(self, max_num_seqs: int | None = None) -> StepTimeModel:
        """The step-time model, built anew. `max_num_seqs`: the batch limit, if it is not the
        profile's; vLLM captures CUDA graphs up to twice that many tokens."""
        model = self._unscaled(max_num_seqs)
        derived = isinstance(self.step_model, RooflineForm | OperatorForm)
        if self.enforce_eager and derived and not self.splits_beyond_tp:
            model = EagerModel(model, self.llm.layers)
        return model if self.step_scale is None else ScaledModel(model, self.step_scale)

    def _unscaled(self, max_num_seqs: int | None) -> StepTimeModel:
        if isinstance(self.step_model, RooflineForm):
            e = self.step_model.efficiency
            release = parse_release(self.engine_version) if self.engine_version else ()
            if self.pp > 1:
                return PipelineModel(self.llm, self.gpu, self.tp, self.pp, e, self.ep, release)
            return rank_model(self.llm, self.gpu, self.tp, e, self.dp, self.ep, release=release)
        if isinstance(self.step_model, OperatorForm):
            form = self.step_model
            if max_num_seqs is not None and form.capture_tokens:
                form = replace(form, capture_tokens=default_capture(max_num_seqs))
            return OperatorModel(form)
        model = self.step_model
        if max_num_seqs is not None and isinstance(model, MeasuredModel) and model.captured:
            return replace(model, captured=default_capture(max_num_seqs))
        return model

    def scaled(
        self,
        *,
        step: float = 1.0,
        prefill: float = 1.0,
        decode: float = 1.0,
        host: float = 1.0,
        pcie: float = 1.0,
        kv: float = 1.0,
    ) -> Profile:
        """The same engine with a profile that is off: factors on step times or their parts
        (`profiles/forms/scaled.py`), on the PCIe rate and on the number of KV blocks. Scaling again
        multiplies. Raises ProfileError for a factor that is not from 0.001 to 1000, also after
        scaling again, or for a host factor if the form knows no host time."""
        parts = {
            "step": step,
            "prefill": prefill,
            "decode": decode,
            "host": host,
            "pcie": pcie,
            "kv": kv,
        }
        for part, factor in parts.items():
            check_factor(part, factor)
        said = ", ".join(f"{part} x {factor:g}" for part, factor in parts.items() if factor != 1.0)
        if not said:
            return self
        if self.dp > 1:
            raise ProfileError(
                f"{self.name}: the parts of its steps are those of {self.dp} ranks together; "
                "profiles that share experts cannot be scaled"
            )
        if self.pp > 1:
            raise ProfileError(
                f"{self.name}: the parts of its steps are those of {self.pp} stages; profiles of "
                "pipeline stages cannot be scaled"
            )
        scale = StepScale(step=step, prefill=prefill, decode=decode, host=host)
        scale = scale if self.step_scale is None else self.step_scale * scale
        blocks = max(1, round(self.num_gpu_blocks * kv))
        changes = {
            "name": f"{self.name} ({said})",
            "notes": f"{self.notes} Scaled on purpose: {said}.".strip(),
            "step_scale": None if scale == StepScale() else scale,
            "fit_error": self.fit_error if scale == (self.step_scale or StepScale()) else None,
            "pcie_bytes_per_s": self.pcie_bytes_per_s * pcie,
            "num_gpu_blocks": blocks,
            "num_gpu_blocks_range": self.num_gpu_blocks_range if kv == 1.0 else None,
            "max_model_len": min(self.max_model_len, blocks * self.block_tokens),
        }
        changed = self.model_copy(update=changes)
        changed.model()  # refused here, not in a run
        return changed

    def with_host_terms(
        self, host_s: float, host_request_s: float, fit_error: float | None
    ) -> Profile:
        """A copy whose operator tables or roofline have these seconds a step and a request added to
        theirs. ProfileError for a form that has no host terms, and for a scaled profile."""
        if self.step_scale is not None:
            raise ProfileError(
                f"{self.name}: is scaled ({self.step_scale}); fit host terms to the profile that "
                "it was made of"
            )
        if not self.knows_host_time:
            raise ProfileError(
                f"{self.name}: the form {self.step_model.form!r} has no host terms; name a "
                "roofline or operator profile"
            )
        return self.model_copy(
            update={
                "step_model": self._with_host(host_s, host_request_s),
                "fit_error": fit_error,
                "source": "measured",
                "notes": f"{self.notes} Host terms fitted to recorded steps.",
            }
        )

    @property
    def loop_s(self) -> float:
        """Seconds between two steps of a live run, in our own loop (`HostTimes.loop_s`); 0 if
        that was not measured."""
        host = getattr(self.step_model, "host", None)  # of measured engines alone
        return host.loop_s if host else 0.0

    @property
    def knows_host_time(self) -> bool:
        """Whether its form has host terms. The others hold times of whole steps: what the host of
        the measured engine added is in them."""
        return isinstance(self.step_model, (RooflineForm, OperatorForm))

    def check_shared_prefix(self) -> None:
        """Raise ProfileError if its form cannot tell the savings of reading less KV. Also for
        latent attention, whose decodes may take as long as their products, which are not shared."""
        if self.dp > 1:
            raise ProfileError(
                "--shared-prefix: is not simulated on the data-parallel ranks of "
                f"{self.name}; drop it"
            )
        if self.pp > 1:
            raise ProfileError(
                f"--shared-prefix: is not simulated on the pipeline stages of {self.name}; drop it"
            )
        if self.llm.latent is not None:
            raise ProfileError(
                "--shared-prefix: is not simulated for the latent attention of "
                f"{self.llm.name}; drop it"
            )
        if not isinstance(self.step_model, (RooflineForm, OperatorForm)):
            raise ProfileError(
                f"--shared-prefix: the step times of {self.name} ({self.step_model.form}) are of "
                "whole steps, without a part for reading KV; choose --step-times roofline or "
                "operators, or drop it"
            )

    def scheduled(self, asynchronous: bool) -> Profile:
        """The same engine, scheduling so: a measured form may tell what of its steps that hides."""
        model = self.step_model
        if not isinstance(model, MeasuredModel) or model.hidden is None:
            return self
        return self.model_copy(update={"step_model": replace(model, overlaps=asynchronous)})

    def with_host_time(self, host: HostTime) -> Profile:
        """The same engine whose GPU waits so much longer for its host, on top of the profile's own
        host terms. ProfileError for a form that has none."""
        if host == NO_HOST_TIME:
            return self
        if not self.knows_host_time:
            raise ProfileError(
                f"{self.name}: its step times ({self.step_model.form}) are those of whole steps, "
                "host time included; drop --host-time"
            )
        added = self._with_host(host.step_s, host.request_s)
        return self.model_copy(update={"step_model": added})

    def _with_host(self, host_s: float, host_request_s: float) -> StepModelForm:
        form = self.step_model
        holder = form.efficiency if isinstance(form, RooflineForm) else form
        added = replace(
            holder,
            host_s=holder.host_s + host_s,
            host_request_s=holder.host_request_s + host_request_s,
        )
        return RooflineForm(added) if isinstance(form, RooflineForm) else added

    @property
    def kv_bytes_per_token(self) -> float:
        """Over all ranks; KV heads that several ranks hold count once a rank."""
        return self.llm.rank_kv_bytes_per_token(self.tp) * self.tp

    @property
    def block_bytes(self) -> float:
        return self.kv_bytes_per_token * self.block_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_gpu_blocks * self.block_tokens

    def swap_model(self) -> SwapTimeModel:
        """Time to move KV over PCIe, from the profile's achieved rate."""
        return SwapTimeModel(seconds_per_byte=1.0 / self.pcie_bytes_per_s)

    def describe(self, step_times: bool = True) -> str:
        """One line for a run's banner; step_times: with their form and origin."""
        # elsewhere it says how well a form fits what it was derived from, which is no accuracy
        known = self.source == "measured" and self.fit_error is not None
        error = f", fit error {self.fit_error:.1%} on steps left out" if known else ""
        times = f" step times {self.source} ({self.step_model.form}{error});" if step_times else ""
        return (
            f"{self.name}: {self.llm.name} on {self.gpus} x {self.gpu.name}, {self.engine}"
            f"{' ' + self.engine_version if self.engine_version else ''};"
            f"{times} {self.num_gpu_blocks} KV blocks of {self.block_tokens} tokens"
            f" ({self.num_gpu_blocks_source}{self._range()})"
        )

    def _range(self) -> str:
        if self.num_gpu_blocks_range is None:
            return ""
        low, high = self.num_gpu_blocks_range
        return f", {low} to {high}"

    @property
    def server_flags(self) -> ServerFlags:
        """The flags of the server as far as they move its KV memory."""
        return ServerFlags(
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.gpu_memory_utilization,
            parse_release(self.engine_version),
            self.enforce_eager,
        )


def load_profile(name_or_path: str | Path) -> Profile:
    """A file (anything that ends in .json), a shipped profile, or one derived on the fly, in this
    order.

    ProfileError (one line, with the file and field, or the nearest known name) otherwise.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or text.lower().endswith(".json"):
        return _read(read_json(Path(text)), text)
    name = ProfileName.parse(text)
    shipped = shipped_folder() / name.file_name
    other = name.dp > 1 or name.ep or name.pp > 1
    if name.model in MODELS and shipped.is_file() and not other:
        return _read(parse_json(shipped.read_text(encoding="utf-8")), name.file_name)
    if name.form:
        find_model(name.model)
        known = [str(n) for n in map(ProfileName.parse, list_profiles()) if n.form == name.form]
        raise ProfileError(f"no shipped profile {str(name)!r}{nearest(str(name), known)}")
    return derive_profile(name.model, name.gpu, name.tp, name.dp, name.ep, pp=name.pp)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write JSON to `path` so that a reader sees the old file or the whole new one; folders are
    created."""
    text = json.dumps(profile.model_dump(mode="json"), indent=2) + "\n"
    # rows of a table on one line each: a file of a thousand numbers stays readable
    text = re.sub(r"\[\s+([^\[\]{}\"]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def derive_profile(
    model: str | ModelSpec,
    gpu: str | GpuSpec,
    tp: int = 1,
    dp: int = 1,
    ep: bool = False,
    *,
    pp: int = 1,
    utilization: float | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    num_gpu_blocks: int | None = None,
    num_gpu_blocks_source: Source = "measured",
    engine_version: str | None = None,
    enforce_eager: bool = False,
    efficiency: Efficiency | None = None,
) -> Profile:
    """A roofline profile from specs alone: of one engine of `tp` x `pp` GPUs, of `dp` that share
    experts.
    `num_gpu_blocks`, if given, is taken as it is, from `num_gpu_blocks_source`.

    Token budget, batch limit and utilisation default to those of `vllm serve` of `engine_version`
    (None: the latest that is known) on such a GPU (`kv_memory/releases.py`). `max_model_len`
    defaults to the model's, or to what the KV pool holds if that is less.
    """
    llm = find_model(model) if isinstance(model, str) else model
    device = gpu_for(llm, find_gpu(gpu) if isinstance(gpu, str) else gpu)
    release = parse_release(engine_version)
    tokens, requests = default_budgets(device, release)
    budget = tokens if max_num_batched_tokens is None else max_num_batched_tokens
    seqs = requests if max_num_seqs is None else max_num_seqs
    share = default_utilization(release) if utilization is None else utilization
    check_ranks(llm, device.name, tp, dp, ep)
    check_stages(llm, device.name, tp, pp, dp)
    blocks, ends = num_gpu_blocks, None
    if blocks is None:
        flags = ServerFlags(budget, seqs, share, release, enforce_eager)
        found = derive_kv_blocks(llm, device, tp, flags, dp, ep, pp)
        blocks, ends = found.blocks, (found.low, found.high)
    pool = blocks * BLOCK_TOKENS
    error, basis = family_error(device.family)
    fields = {
        "name": str(ProfileName(llm.name, device.name, tp, dp=dp, ep=ep, pp=pp)),
        "llm": llm,
        "gpu": device,
        "tp": tp,
        "dp": dp,
        "ep": ep,
        "pp": pp,
        "source": "derived",
        "fit_error": error if efficiency is None else None,
        "notes": (
            "Roofline from specs; efficiency constants are those of the GPU's family, fit_error is"
            f" {basis}."
        ),
        "step_model": RooflineForm(efficiency or find_efficiency(device, sums_kernels(llm))),
        "num_gpu_blocks": blocks,
        "num_gpu_blocks_source": "derived" if ends else num_gpu_blocks_source,
        "num_gpu_blocks_range": ends,
        "gpu_memory_utilization": share,
        "enforce_eager": enforce_eager,
        "pcie_bytes_per_s": device.pcie_bytes_per_s * PCIE_SHARE * tp * pp,
        "host_swap_bytes": HOST_SWAP_BYTES * tp * pp,
        "max_model_len": min(llm.max_positions, pool) if max_model_len is None else max_model_len,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "engine_version": engine_version,
    }
    return _validated(fields, f"{llm.name}@{device.name}")


def _read(data: dict, where: str) -> Profile:
    """A profile as a file has it."""
    if "model_type" in data or "architectures" in data:
        raise ProfileError(
            f"{where}: is a model's config.json, not a profile; name its GPU as well: {where}@h100"
        )
    return _validated(PROFILE.read(data, where, ProfileError), where)


def _validated(data: dict, where: str) -> Profile:
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{where}: {one_line(error)}") from None
