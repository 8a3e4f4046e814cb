"""The settings of a run: the source of the command line's flags, and part of run.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from twinserve.errors import TwinserveError
from twinserve.sim.serve_line.words import human_integer
from twinserve.sim.setup.option_groups import grouped

DEFAULT_PROFILE = "llama-3.1-8b@h100:tp4"
StepTimesName = Literal["auto", "roofline", "operators", "measured"]
EstimatorName = Literal[
    "paper",
    "perfect",
    "bros",
    "echo",
    "echo-printed",
    "echo-total",
    "echo-sum",
    "layerkv",
    "roofline",
]
DEFAULT_ROUTER = "least-requests"
# settings; one at most
KV_SIZES = (
    "kv_from_log", "gpu_memory_utilization", "num_blocks", "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
)  # fmt: skip
RANKS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "enable_expert_parallel",
)  # fmt: skip
GENERATED_RATE = 10.0  # requests a second of a generated trace, if nothing sets it


def below(base: dict, given: dict) -> dict:
    """Return `base` with the settings of `given`. These also replace the settings they exclude."""
    kept = dict(base)
    if any(given.get(name) is not None for name in KV_SIZES):
        kept = {name: value for name, value in kept.items() if name not in KV_SIZES}
    if given.get("fleet") is not None:
        kept.pop("replicas", None)
    return {**kept, **given}


class SettingsError(TwinserveError, ValueError):
    """Settings that contradict each other or make no sense, in one line."""


def settings_line(error: ValidationError) -> str:
    """Return the first error of a settings model, with the flag's name."""
    first = error.errors()[0]
    where = "".join(f"--{str(part).replace('_', '-')}" for part in first["loc"][:1])
    said = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = f" (given: {given!r})" if where and isinstance(given, (str, int, float)) else ""
    return f"{where}: {said}{shown}" if where else said


@grouped
@Parameter(name="*")
class SimulationConfig(BaseModel):
    """Every setting that changes a simulation's result, and no other."""

    # Its validators are built when the first settings are checked: a page of help needs none.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    policy: Annotated[tuple[str, ...], Parameter(name=["--policy", "-p"], negative="")] = ("vllm",)
    """Policy, with options after a colon: bros:chunk=2048,kv=paged; one of your own as
    FILE.py:Class. Several give one table over the same requests."""
    trace: Annotated[str, Parameter(name=["--trace", "-t"])] = "mooncake"
    "Trace name or file (see: twinserve trace list)."
    format: str | None = None
    "Format of the trace file, if its content does not show it."
    columns: str | None = None
    "Columns of a CSV file that is the trace: arrival=ts,prompt=in,output=out (docs/traces.md)."
    seed: int = Field(0, ge=0)
    """Seed of everything random: generated arrivals and lengths, the best-effort pool, spreading of
    ticks."""
    raw_arrivals: Annotated[bool, Parameter(negative="")] = False
    "Keep arrivals on the coarse ticks of the recording."
    offline: Annotated[bool, Parameter(negative="")] = False
    "Never download: use a local copy of the trace, or its embedded replica."

    rate: float | None = Field(None, gt=0)
    "Requests a second of a generated trace (sharegpt, lmsys, poisson). [default: 10]"
    duration: float | None = Field(None, gt=0)
    "Seconds of a generated trace. [default: 600]"
    requests: int | None = Field(None, ge=1)
    "Only the first N requests."
    rate_scale: float | None = Field(None, gt=0)
    "Speed up the arrivals of a recorded trace by this factor. [default: 1, as recorded]"
    load: float | None = Field(None, gt=0)
    """Set the arrival rate to this share of the estimated capacity of all replicas, best-effort
    pool not counted. By default arrivals stay as they are."""
    window: Annotated[tuple[float, float] | None, Parameter(negative="")] = None
    "Only arrivals from START to END, in seconds of the recording."
    cap_length: int | None = Field(None, ge=2)
    "Cut prompt plus output of longer requests to this many tokens."
    pool: int = Field(0, ge=0, le=1_000_000)
    """Best-effort closed loop: requests in each batch; the next batch comes when the last one has
    ended. 0: none."""
    client_timeout: float | None = Field(None, gt=0)
    "Seconds after which a client cancels an unfinished request."
    slo: str | None = None
    """Objectives: in seconds, ttft=0.4,tpot=0.2, and k=5 for max(ttft, k x isolated prefill); or
    with units, classes, percentiles, "rt: ttft p90 < 1 s, tpot < 50 ms; be: e2el < 60 s"; or
    none."""

    from_vllm: Annotated[str | None, Parameter(negative="")] = Field(None, exclude=True)
    """Take the settings of a server: its command line in quotes, or a file with it
    (script, manifest, compose, chart's values; docs/from_vllm.md). Flags given here win."""
    as_model: str | None = Field(None, exclude=True)
    "Model of --from-vllm if that names a path: of the catalogue, or as --profile takes it."
    gpu: str | None = Field(None, exclude=True)
    "GPU of --from-vllm if that names none: h100, or a node's label."
    tensor_parallel_size: int | None = Field(None, ge=1, exclude=True)
    "Tensor-parallel ranks (:tpN), instead of the profile's."
    pipeline_parallel_size: int | None = Field(None, ge=1, exclude=True)
    "Pipeline stages (:ppN), instead of the profile's."
    data_parallel_size: int | None = Field(None, ge=1, exclude=True)
    "Engines of a server: replicas, or ranks that step together for a mixture of experts (:dpN)."
    enable_expert_parallel: bool | None = Field(None, exclude=True)
    "Expert parallelism: each rank has whole experts (:ep)."
    profile: str = DEFAULT_PROFILE
    """Model and hardware: a shipped profile, MODEL@GPU[:tpN][:dpN][:ep], or a profile file. MODEL:
    of the catalogue, a config.json, or an id in the local Hugging Face cache."""
    step_times: StepTimesName = "auto"
    """Form of the step times: what the profile's name gives (auto), derived from specs (roofline),
    from kernel tables (operators), or fitted to the engine's own steps (docs/profiles.md)."""
    shared_prefix: Annotated[bool, Parameter(negative="")] = False
    """Attention reads a prefix that decodes share from KV memory once, as cascade attention does
    (docs/profiles.md). Policies ignore this."""
    front_end: str = "none"
    """The time between clients and the engine (HTTP, tokenising, detokenising): none, vllm with
    options after a colon (docs/profiles.md), or a file of `twinserve calibrate --front-end`. TTFT
    then is the client's (docs/metrics.md)."""
    replicas: int = Field(1, ge=1, le=4096)
    "Number of replicas."
    router: Annotated[str, Parameter(name=["--router", "-r"])] = DEFAULT_ROUTER
    """Router of requests to replicas, with options after a colon: llm-d:prefix=5,age=0.2; one of
    your own as FILE.py:Class (docs/routers.md)."""
    fleet: str | None = None
    """File with pools of replicas that differ, instead of --replicas (docs/fleet.md)."""
    failures: str | None = None
    """File with what goes wrong, in YAML or CSV: replica, kind, at_s, until_s, factor, grace_s
    (docs/fleet.md)."""
    mttf: float | None = Field(None, gt=0, le=1e9)
    "Mean seconds from when a replica is up to its crash, drawn for each; needs --mttr."
    mttr: float | None = Field(None, ge=0, le=1e9)
    "Mean seconds from such a crash until the replica starts up again."
    on_failure: Literal["error", "retry", "migrate"] = "error"
    """What happens to requests whose replica fails: they end (error), start again on another
    replica (retry), or continue there with their tokens (migrate)."""
    retries: int = Field(3, ge=0, le=10**6)
    "Failures that one request survives, with --on-failure retry or migrate."
    detection: float = Field(0.0, ge=0, le=1e6)
    "Seconds from a crash until the router learns of it; until then it sends requests there."
    autoscale: str | None = None
    """Autoscaler of --replicas, with options after a colon: fixed, wva, dynamo:ttft=0.3, perfect
    (docs/fleet.md)."""
    min_replicas: int = Field(1, ge=1, le=4096)
    "Fewest replicas of an autoscaler."
    max_replicas: int = Field(16, ge=1, le=4096)
    "Most replicas of an autoscaler."
    grace: float | None = Field(None, ge=0, le=1e6)
    """Seconds after which a drained replica loses its last requests, as --on-failure says.
    [default: never]"""
    start_up: float = Field(60.0, ge=0, le=1e6)
    "Seconds from the start of a replica that returns, or is added, to its first request."
    block_tokens: int = Field(16, ge=1)
    "Tokens in a KV block."
    num_blocks: int | None = Field(None, ge=1, le=10**15)
    "KV blocks of one replica that requests can use, instead of the profile's."
    num_gpu_blocks_override: int | None = Field(None, ge=2, le=10**15, exclude=True)
    "KV blocks as vLLM counts them: --num-blocks plus the null block."
    kv_cache_memory_bytes: int | None = Field(None, ge=1, le=10**15)
    "Bytes of KV memory of each GPU, instead of a share of its memory: 20G is 20 x 2^30."
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    "Share of each GPU's memory that vLLM may use, instead of the profile's."
    engine_version: str | None = None
    """Release of vLLM, as 0.19: its KV memory, its defaults, and the rules of policy vllm.
    [default: the profile's, or 0.32]"""
    enforce_eager: Annotated[bool, Parameter(negative="")] = False
    "Reserve no memory for CUDA graphs. Step times stay as they are."
    max_model_len: int | None = Field(None, ge=1)
    "Longest request, prompt and output, instead of the profile's."
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    "Type of the KV cache: the model's (auto), or FP8, which holds twice the tokens."
    kv_from_log: str | None = None
    """File with the log of a vLLM server's start, whose lines on memory give the KV blocks
    (docs/profiles.md)."""
    host_blocks: int | None = Field(None, ge=0, le=10**15)
    "Blocks of host memory for swapped KV, instead of the profile's."
    kv_offloading_size: float | None = Field(None, gt=0, le=1e9)
    """GiB of host memory of a replica for KV blocks that leave the device, found again by their
    text, as vLLM's OffloadingConnector has it (docs/kv_transfer.md). [default: none]"""
    kv_offloading_backend: Literal["native", "lmcache"] = "native"
    "Kind of tier: vLLM's own (native). lmcache is not simulated."
    kv_offloading_options: str | None = None
    """Options of the tier: eviction_policy=arc,store_threshold=2,blocks_per_chunk=4,
    offload_prompt_only=false,shared=true."""
    max_num_seqs: int | None = Field(None, ge=1)
    "Most requests in a batch, instead of the profile's."
    max_num_batched_tokens: int | None = Field(None, ge=1)
    "Most new tokens in a step, instead of the profile's."
    kv: str | None = None
    """KV ledger for every policy that names none (kv=) itself: paged, bidirectional, ...
    (docs/policies.md)."""
    prefix_caching: bool | None = None
    "Prefix caching for every policy, instead of each policy's own default."
    estimator: EstimatorName = "paper"
    """Estimate of step times that policies use: their paper's form, the simulator's own model
    (perfect), or one form for all."""
    pcie_contention: bool = True
    "Without NVLink, KV transfers share the PCIe link with a step's all-reduces (docs/layerkv.md)."
    speculate: str | None = None
    """Speculative decoding: drafts a request, the drafter, and the share accepted, as
    k=3,method=eagle,acceptance=0.7 (docs/policies.md)."""
    cold_start: float = Field(0.0, ge=0, le=3600)
    "Extra seconds of each engine's first step, which loads kernels."
    decision_time: Literal["none", "measured", "profile"] = "none"
    """Time that planning adds to each simulated step: none, the time our own planning took
    (measured: not reproducible), or the time that `calibrate` measured around the engine
    (profile)."""
    async_scheduling: bool = True
    """Plan each step while the one before it runs, before its tokens are known. Without this
    option: yes, unless --engine-version is before 0.14, as in vLLM."""
    host_time: str = "auto"
    """Time the GPU waits for the host: auto (nothing with asynchronous scheduling, vLLM's time with
    synchronous), none, or a step's and each request's, as 0.9ms+39us (docs/profiles.md)."""
    exact: Annotated[bool, Parameter(negative="")] = False
    """Plan every step by itself, without the fast path over runs of identical decode steps. Same
    results, slower."""

    def __init__(self, **settings: Any) -> None:
        """Raise SettingsError for the first invalid setting."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(settings_line(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _with_server(cls, given: Any) -> Any:
        """Put the settings of --from-vllm below the given ones."""
        if not isinstance(given, dict):
            return given
        text = given.get("from_vllm")
        if text is None:
            for name in ("as_model", "gpu"):
                if given.get(name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{flag} goes with --from-vllm; write --profile MODEL@GPU:tpN")
            return given
        from twinserve.sim.serve_line.settings import from_vllm  # help need not load it

        found = from_vllm(text, given)
        if found.front_end is not None:
            given = given | {"front_end": found.front_end}
        return below(found.settings, given)

    @field_validator(
        "max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", mode="before"
    )
    @classmethod
    def _human_integer(cls, given: object) -> object:
        """Read a number as vLLM does: 32k is 32,000, 32K is 32,768."""
        return human_integer(given) if isinstance(given, str) else given

    @field_validator("policy")
    @classmethod
    def _some_policy(cls, policy: tuple[str, ...]) -> tuple[str, ...]:
        if not policy:
            raise ValueError("at least one is needed")
        return policy

    @field_validator("host_time")
    @classmethod
    def _some_host_time(cls, text: str) -> str:
        if text not in ("auto", "none"):
            from twinserve.profiles.host import host_time  # help and version need not load it

            host_time(text, asynchronous=True)
        return text

    @field_validator("engine_version")
    @classmethod
    def _some_release(cls, text: str | None) -> str | None:
        if text is not None:
            from twinserve.profiles.kv_memory.releases import is_known  # as above

            if not is_known(text):
                raise ValueError("give a release of vLLM from 0.6.6 to 0.32, as 0.19")
        return text

    def _take_ranks(self) -> None:
        """Move the ranks into the profile's name: runs and their files use nothing else."""
        given = {name: vars(self)[name] for name in RANKS if vars(self)[name] is not None}
        if not given:
            return
        from twinserve.profiles.names import with_ranks  # help and version need not load it

        tp, pp, dp, ep = map(given.get, RANKS)
        if dp is not None:
            if self.from_vllm is not None:
                raise ValueError("--data-parallel-size goes into the line of --from-vllm")
            vars(self)["replicas"] = self.replicas * dp
        vars(self)["profile"] = with_ranks(self.profile, tp, pp, dp, ep)
        vars(self).update(dict.fromkeys(given))
        self.model_fields_set.difference_update(given)
        self.model_fields_set.update(["profile"] + ["replicas"] * (dp is not None))

    def _take_release(self) -> None:
        """Set the default of that vLLM release if no option sets one."""
        if self.engine_version is not None and "async_scheduling" not in self.model_fields_set:
            from twinserve.profiles.kv_memory.releases import ASYNCHRONOUS, parse_release

            release = parse_release(self.engine_version)
            vars(self)["async_scheduling"] = release >= ASYNCHRONOUS

    @model_validator(mode="after")
    def _no_contradictions(self) -> SimulationConfig:
        self._take_ranks()
        self._take_release()
        if self.load is not None and (self.rate is not None or self.rate_scale is not None):
            other = "--rate" if self.rate is not None else "--rate-scale"
            raise ValueError(f"--load and {other} both set the arrival rate; give one of them")
        if self.window is not None and not 0 <= self.window[0] < self.window[1]:
            raise ValueError(
                f"--window {self.window[0]} {self.window[1]} is empty; START must be before END"
            )
        if self.fleet is not None and self.replicas != 1:
            raise ValueError(
                "--fleet and --replicas both say how many replicas there are; drop --replicas"
            )
        self._check_failures()
        if self.kv_offloading_backend != "native":
            raise ValueError(
                "--kv-offloading-backend lmcache: its tier is not simulated; use native"
            )
        if self.kv_offloading_options is not None and self.kv_offloading_size is None:
            raise ValueError(
                "--kv-offloading-options: nothing is offloaded; give --kv-offloading-size"
            )
        given = [f"--{s.replace('_', '-')}" for s in KV_SIZES if getattr(self, s) is not None]
        if len(given) > 1 and given != ["--kv-from-log", "--gpu-memory-utilization"]:
            raise ValueError(f"{given[0]} and {given[1]} both set the KV memory; drop one")
        if self.num_gpu_blocks_override is not None:  # runs and their files know num_blocks alone
            vars(self)["num_blocks"] = self.num_gpu_blocks_override - 1
            vars(self)["num_gpu_blocks_override"] = None
            self.model_fields_set.add("num_blocks")
            self.model_fields_set.remove("num_gpu_blocks_override")
        if self.kv == "bidirectional" and self.prefix_caching:
            raise ValueError(
                "--kv bidirectional has no prefix caching; drop --prefix-caching or choose --kv "
                "paged"
            )
        return self

    @property
    def changes_replicas(self) -> str | None:
        """The flag that adds, removes or changes replicas during the run, or None."""
        for name in ("failures", "mttf", "autoscale"):
            if getattr(self, name) is not None:
                return f"--{name}"
        return None

    def _check_failures(self) -> None:
        if self.failures is not None and self.mttf is not None:
            raise ValueError("--failures and --mttf both say when replicas fail; drop one")
        if (self.mttf is None) != (self.mttr is None):
            there, lacks = ("mttf", "mttr") if self.mttr is None else ("mttr", "mttf")
            raise ValueError(f"--{there} needs --{lacks}; give both")
        self._check_used()

    def _check_used(self) -> None:
        """Raise ValueError for a setting of failures or of autoscaling in a run without these."""
        fails = self.failures is not None or self.mttf is not None
        scales = self.autoscale is not None
        either = "nothing fails and nothing scales; give --failures, --mttf or --autoscale"
        no_failure = "nothing fails; give --failures or --mttf"
        for names, used, said in (
            (("retries", "detection"), fails, no_failure),
            (("min_replicas", "max_replicas", "grace"), scales, "nothing scales; give --autoscale"),
            (("on_failure",), fails or self.grace is not None, no_failure),
            (("start_up",), fails or scales, either),
        ):
            for name in names:
                if not used and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"--{name.replace('_', '-')}: {said}")


# The engines of the papers schedule synchronously. What their hosts take is not known, and their
# profiles have no more of it than they have for vLLM.
PAPERS_ENGINE: dict = {"async_scheduling": False, "host_time": "none"}

PRESETS: dict[str, dict] = {
    # BROS, Sec. VII-A: hybrid workload on Qwen2.5-14B, two A100-40G. The pool's size is not in the
    # paper.
    "bros-hybrid": {
        "trace": "sharegpt",
        "rate": 10.0,
        "duration": 600.0,
        "pool": 128,
        "profile": "qwen2.5-14b@a100-40g:tp2",
        "slo": "ttft=0.4,tpot=0.2",
        **PAPERS_ENGINE,
    }
}


def parse_slo(text: str | None) -> tuple[float, float, float] | None:
    """Return (ttft seconds, tpot seconds, k), or None for no objectives; the default scales TTFT
    with prompts. Raises SettingsError."""
    if text is None:
        return 0.4, 0.2, 5.0
    if text == "none":
        return None
    found = {"k": 0.0}
    seen: set[str] = set()
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        # an objective of 0 s could never be met
        in_range = number >= 0 if name == "k" else number > 0
        if name not in ("ttft", "tpot", "k") or not in_range or not number < 1e6:
            raise SettingsError(
                f"--slo {text!r}: {part!r} is not understood; write ttft=0.4,tpot=0.2 (seconds), "
                "or none"
            )
        if name in seen:
            raise SettingsError(f"--slo {text!r}: {name} is given twice; keep one of them")
        seen.add(name)
        found[name] = number
    if "ttft" not in found or "tpot" not in found:
        raise SettingsError(
            f"--slo {text!r} lacks {'ttft' if 'ttft' not in found else 'tpot'}; write "
            "ttft=0.4,tpot=0.2"
        )
    return found["ttft"], found["tpot"], found["k"]
