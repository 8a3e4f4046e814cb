"""A server's words as settings of the simulator, and what was made of each."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.front_end import with_options
from twinserve.profiles.kv_memory.releases import (
    ASYNCHRONOUS,
    LATEST_NAME,
    default_budgets,
    default_utilization,
    is_known,
    parse_release,
)
from twinserve.profiles.models.hub_ids import catalogue_name, longest_request
from twinserve.profiles.models.quantization import FORMATS
from twinserve.profiles.names import with_ranks
from twinserve.profiles.specs import ProfileError
from twinserve.sim.serve_line.read import read_servers
from twinserve.sim.serve_line.server import V0_POLICY, Server
from twinserve.sim.serve_line.words import ServeLineError

# Words of --quantization, and the format whose name a model has with it.
_QUANTIZED = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "ptpc_fp8": "fp8", "awq": "awq", "awq_marlin": "awq",
    "gptq": "gptq", "gptq_marlin": "gptq", "modelopt": "fp8", "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
}  # fmt: skip
_OF_FRONT_END = ("--api-server-count", "--stream-interval")
_METHODS = {"eagle3": "eagle", "ngram_gpu": "ngram", "[ngram]": "ngram"}


@dataclass(frozen=True)
class FromVllm:
    """settings: of SimulationConfig. lines: what was taken and from where, and what was passed
    over. warnings: what matters and is not simulated. front_end: the user's, with the options that
    the server states; None: as the user says."""

    settings: dict[str, Any]
    front_end: str | None
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    servers: tuple[Server, ...] = field(compare=False)


def from_vllm(given: str, asked: Mapping[str, Any]) -> FromVllm:
    """Return the settings that a server's command line or file means.

    given: a command line or a file (`read_servers`). asked: the user's own gpu, as_model,
    engine_version, speculate, front_end. Raises ServeLineError, in one line, for unknown words.
    """
    wanted = ("gpu", "as_model", "engine_version", "speculate", "front_end")
    return _from_vllm(given, _stamp(given), *(asked.get(key) for key in wanted))


_OF_PLAN = (
    "kv_cache_dtype", "gpu_memory_utilization", "engine_version", "enforce_eager", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "async_scheduling",
)  # fmt: skip


def stated(
    given: str, model: str | None, engine: Mapping[str, Any]
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """What a server states whatever its GPU: model, settings of an engine of a plan, and lines
    about them. model, engine: what the user says, which wins. Raises ServeLineError; also for
    prefill and decode pools, of which a plan has its own."""
    release = engine.get("engine_version")
    servers = read_servers(given, release)
    if len(servers) > 1:
        raise ServeLineError(
            f"{servers[0].where}: has prefill and decode pools; name one as FILE#NAME, and give "
            "--prefill-decode"
        )
    made = _Made(servers[0], "h100", model, release, "k=1", "--model")
    settings = made.settings()
    by_default = {text.split()[0] for text in made.defaults}
    kept = {k: v for k, v in settings.items() if k in _OF_PLAN and k not in by_default}
    kept = {k: v for k, v in kept.items() if v != "auto"} | engine
    said = ", ".join(f"{name} {value}" for name, value in kept.items()) or "nothing else"
    lines = (
        f"from vLLM: {made.where} ({servers[0].kind}): {servers[0].model} as {made.model}, {said}",
        *(f"  {warning}" for warning in made.warnings()),
    )
    return made.model, kept, lines


def _stamp(given: str) -> tuple[int, int] | None:
    """When a file was changed last, and its size: it is read once, and again if it changes."""
    try:
        found = Path(given.rpartition("#")[0] or given).stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=64)
def _from_vllm(
    given: str, stamp: object, gpu: str | None, model: str | None, release: str | None,
    speculate: str | None, front_end: str | None,
) -> FromVllm:  # fmt: skip
    servers = read_servers(given, release)
    made = [_Made(server, gpu, model, release, speculate) for server in servers]
    settings = made[0].settings() if len(made) == 1 else _fleet(made)
    fronted = made[0].front_end(front_end) if front_end and len(made) == 1 else None
    lines = tuple(line for one in made for line in one.lines())
    warnings = dict.fromkeys(warning for one in made for warning in one.warnings())
    return FromVllm(settings, fronted, lines, tuple(warnings), tuple(servers))


class _Made:
    """One server's settings."""

    def __init__(
        self,
        server: Server,
        gpu: str | None,
        model: str | None,
        release: str | None,
        speculate: str | None,
        flag: str = "--as-model",
    ) -> None:
        self.server = server
        self.where = f"{server.where}:{server.line}"
        self.flag = flag  # by which the user names the model
        self.release_name = release or server.release
        if self.release_name is not None and not is_known(self.release_name):
            raise ServeLineError(
                f"{self.where}: vLLM {self.release_name} is not known; give --engine-version, a "
                "release from 0.6.6 to 0.32, as 0.19"
            )
        self.release = parse_release(self.release_name)
        self.gpu = self._gpu(gpu)
        self.model = self._model(model)
        self.speculate = speculate
        self.defaults: list[str] = []
        self.notes: list[str] = []

    def _gpu(self, asked: str | None) -> str:
        if asked is not None:
            return find_gpu(asked).name
        server = self.server
        if server.gpus_per_replica == 0:
            raise ServeLineError(
                f"{self.where}: asks for no GPU, and no CPU is simulated; give --gpu, as --gpu h100"
            )
        if server.gpu is None:
            among = next((w[5:] for w in server.warn if w.startswith("gpu: ")), None)
            which = f"it may be {among}" if among else "the GPU is not named"
            raise ServeLineError(f"{self.where}: {which}; give --gpu, as --gpu h100")
        try:
            return find_gpu(server.gpu).name
        except ProfileError as error:
            raise ServeLineError(f"{self.where}: {server.gpu_from}: {error}; give --gpu") from None

    def _model(self, asked: str | None) -> str:
        said = asked or self.server.model
        name = catalogue_name(said) if "/" in said or asked is None else None
        if name is None:
            try:
                find_model(said)
                name = said
            except ProfileError as error:
                raise ServeLineError(f"{self.where}: {self._unknown(said, error)}") from None
        elif self._is_path(said):
            raise ServeLineError(f"{self.where}: {self._unknown(said, None)}")
        return self._with_format(name)

    @staticmethod
    def _is_path(said: str) -> bool:
        return said.startswith(("/", "./", "../", "~")) or said.count("/") > 1

    def _unknown(self, said: str, error: ProfileError | None) -> str:
        """What is asked for a model that is a path, or that is not in the catalogue."""
        if not self._is_path(said):
            return f"{error}; or name a catalogue model with {self.flag}"
        for like in (self.server.served_name, said.rstrip("/").rpartition("/")[2]):
            name = like and catalogue_name(like)
            if name:
                return f"the model is a path, {said}; if it is {like}, give {self.flag} {name}"
        return f"the model is a path, {said}; say which it is, as {self.flag} qwen3-8b"

    def _with_format(self, name: str) -> str:
        """With the weights of --quantization, if the name does not say them."""
        word = self.server.quantization
        if word in (None, "compressed-tensors", "auto") or find_model(name).weights is not None:
            return name
        form = _QUANTIZED.get(word)
        if form not in FORMATS:
            self.server.warn.append("--quantization")
            self.server.why["--quantization"] = f"weights of {word} are not simulated: 16 bits"
            return name
        return f"{name}-{form}"

    def settings(self) -> dict[str, Any]:
        """Of a run. What the release decides is said as well: our profiles keep other defaults."""
        server, given = self.server, self.server.given
        found: dict[str, Any] = {
            "profile": with_ranks(
                f"{self.model}@{self.gpu}", server.tp, server.pp, server.dp, server.ep
            ),
            "replicas": server.replicas * server.dp,
            "policy": (self._policy(),),
            "async_scheduling": self._default(
                "async_scheduling",
                server.async_scheduling,
                self.release >= ASYNCHRONOUS and not server.v0,
            ),
            "kv_cache_dtype": "fp8" if server.kv_cache_dtype.startswith("fp8") else "auto",
        }
        if self.release_name is not None:
            found["engine_version"] = self.release_name.removeprefix("v")
        found |= self._limits()
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):  # the first one counts
            if (size := given.get(f"--{name.replace('_', '-')}")) is not None:
                found.pop("gpu_memory_utilization")
                found[name] = size
                break
        if server.enable_prefix_caching is not None or server.v0:
            found["prefix_caching"] = bool(server.enable_prefix_caching)
        if server.block_size is not None:
            found["block_tokens"] = server.block_size
        if given.get("--enforce-eager"):
            found["enforce_eager"] = True
        if (offload := server.kv_offload) and offload["backend"] == "native":
            found["kv_offloading_size"] = float(offload["gib"])
        if server.speculative is not None:
            found["speculate"] = self._speculate(server.speculative)
        return found

    def _default(self, name: str, said: Any, default: Any) -> Any:
        """A setting that the line may leave to the release and the card."""
        if said is None:
            self.defaults.append(f"{name} {default}")
        return default if said is None else said

    def _limits(self) -> dict[str, Any]:
        server = self.server
        tokens, seats = default_budgets(find_gpu(self.gpu), self.release)
        longest = server.max_model_len
        if longest == "auto":
            self.notes.append("--max-model-len auto: as the profile has it")
            longest = None
        elif longest is None:
            longest = longest_request(server.model)
        positions = longest or find_model(self.model).max_positions
        if server.enable_chunked_prefill is False:
            tokens = max(tokens, int(positions))
        budget = self._default("max_num_batched_tokens", server.max_num_batched_tokens, tokens)
        found = {
            "max_num_batched_tokens": budget,
            "max_num_seqs": self._default(
                "max_num_seqs", server.max_num_seqs, min(seats, int(budget))
            ),
            "gpu_memory_utilization": self._default(
                "gpu_memory_utilization",
                server.gpu_memory_utilization,
                default_utilization(self.release),
            ),
        }
        return found | ({} if longest is None else {"max_model_len": longest})

    def _policy(self) -> str:
        server, given = self.server, self.server.given
        if server.v0 and not server.enable_chunked_prefill:
            return V0_POLICY
        chosen = {
            "scheduling": None if server.scheduling_policy == "fcfs" else server.scheduling_policy,
            "enable_chunked_prefill": "false" if server.enable_chunked_prefill is False else None,
            "long_prefill_token_threshold": given.get("--long-prefill-token-threshold"),
            "watermark": given.get("--watermark"),
        }
        said = ",".join(f"{name}={value}" for name, value in chosen.items() if value)
        return f"vllm:{said}" if said else "vllm"

    def _speculate(self, said: Mapping[str, Any]) -> str:
        """Raises ServeLineError where nothing tells how many drafts are right."""
        if self.speculate is not None:
            return self.speculate
        method = _METHODS.get(str(said["method"]), str(said["method"]))
        method = "mtp" if method.endswith("mtp") else method
        drafts = said.get("num_speculative_tokens", "N")
        text = f"k={drafts},method={method},acceptance=0.7"
        if method == "draft_model" and (name := catalogue_name(str(said.get("model", "")))):
            text += f",draft={name}@{self.gpu}"
        raise ServeLineError(
            f"{self.where}: it speculates, and a command line does not say how many drafts are "
            f"right; measure the share, and give it as --speculate {text}"
        )

    def front_end(self, text: str) -> str | None:
        """The user's front end with what the line says of API servers and messages, which is then
        simulated; None: it does not count them."""
        server = self.server
        count, interval = (server.given.get(name) for name in _OF_FRONT_END)
        options = {} if interval is None else {"stream_interval": interval}
        if count and count % server.dp == 0:  # an engine has as many as another
            options["api_server_count"] = count // server.dp
        elif count:
            server.why[_OF_FRONT_END[0]] = (
                f"{count} for {server.dp} engines: only equal numbers are simulated; give "
                "--front-end vllm:api_server_count=1"
            )
        found = with_options(text, options) if options else None
        if found is not None:
            taken = {f"--{name.replace('_', '-')}" for name in options}
            server.warn = [name for name in server.warn if name not in taken]
            self.notes.append(f"--front-end {found}")
        return found

    def lines(self) -> list[str]:
        """The account, a line each."""
        server = self.server
        many = f"{server.replicas} servers" if server.replicas > 1 else "one server"
        role = f"{server.role}: " if server.role else ""
        gpus = server.tp * server.pp * server.dp
        place = f" ({server.gpu_from})" if server.gpu_from and server.gpu else ""
        release = self.release_name or LATEST_NAME
        origin = "" if self.release_name else " (not said: --engine-version)"
        said = [
            f"from vLLM: {role}{self.where} ({server.kind}), {many} of {gpus} x {self.gpu}{place}, "
            f"vLLM {release}{origin}"
        ]
        taken = [f"{server.model} as {self.model}"]
        taken += [f"{name} {value}" for name, value, _ in server.taken if name != "--model"]
        said.append(f"  taken: {_wrapped(taken)}")
        if self.defaults:
            said.append(f"  by default of vLLM {release}: {', '.join(self.defaults)}")
        if server.passed_over:
            said.append(f"  passed over: {', '.join(dict.fromkeys(server.passed_over))}")
        return said + [f"  note: {note}" for note in self.notes]

    def warnings(self) -> list[str]:
        """What matters and is not simulated, a line each."""
        why = self.server.why
        said = {name: f" is not simulated ({text})" for name, text in why.items()}
        said |= {name: f" is {text}" for name, text in why.items() if text.startswith("taken")}
        names = dict.fromkeys(self.server.warn)
        return [f"{self.server.where}: {name}{said.get(name, '')}" for name in names]


def _wrapped(parts: list[str]) -> str:
    return ", ".join(re.sub(r"\s+", " ", part) for part in parts)


def _fleet(made: list[_Made]) -> dict[str, Any]:
    """Prefill and decode pools as a fleet's content."""
    pools, connectors = [], []
    for one in made:
        found = one.settings()
        (policy,) = found.pop("policy")
        pool = {"name": one.server.role, "role": one.server.role, "policy": policy, **found}
        pools.append({key: value for key, value in pool.items() if value is not None})
        connectors.append(one.server.given.get("--kv-transfer-config") or {})
    first = connectors[0]
    push = first.get("kv_connector") == "NixlPushConnector"
    connector = {"transfer": "push" if push else "pull"}
    if (failures := first.get("kv_load_failure_policy")) in ("fail", "recompute"):
        connector["load_failures"] = failures
    return {"fleet": json.dumps({"pools": pools, "connector": connector})}
