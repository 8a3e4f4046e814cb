"""Closed loops that others measured on real GPUs, as `silicon_sample.csv` of aiconfigurator-core
has them: lengths, concurrency, and the mean times of a request.

The file does not say how its clients start, nor whether its times are means or medians. What is
known of the clients and of the servers' flags is in CLIENTS.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.specs import ProfileError

DATA = "aiconfigurator-core"  # the distribution that has the points
# (model in the file, format of its matrices): what it is called here. In the file `nvfp4` of
# gpt-oss is its own MXFP4: there is no other checkpoint, and H100 cannot run NVFP4.
MODELS = {
    ("Qwen/Qwen3-32B", ""): "qwen3-32b",
    ("Qwen/Qwen3-32B", "fp8"): "qwen3-32b-fp8",
    ("meta-llama/Llama-3.1-70B", "fp8"): "llama-3.1-70b-fp8",
    ("meta-llama/Llama-3.1-70B", "nvfp4"): "llama-3.1-70b-nvfp4",
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): "llama-3.1-8b-fp8",
    ("openai/gpt-oss-120b", "nvfp4"): "gpt-oss-120b",
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): "qwen3-235b-a22b-fp8",
}
# Of the formats that the catalogue's names do not have (FP8 in blocks): its config.json.
CONFIGS = {"qwen3-235b-a22b-fp8": "Qwen--Qwen3-235B-A22B-FP8_config.json"}
_COPIES = "kimi-k2.5-gap-analysis"  # of rows that it has from InferenceMAX, too
# The file has their experts split, which vLLM refuses; InferenceX's pull request 869 has the flag.
_EXPERTS_WHOLE = (("minimax-m2.5-fp8", "h200", 8),)
_GPUS = {system: gpu for gpu, system in SYSTEMS.items()} | {"b300_sxm": "b300"}


@dataclass(frozen=True)
class Client:
    """How a benchmark asks, and how its server is set up. shortest: lengths are drawn evenly from
    this share of the stated one up to it; limited: the batch limit is the concurrency; budget:
    tokens a step, None: vLLM's."""

    name: str
    shortest: float
    limited: bool
    budget: int | None


# InferenceMAX: its README gives the client (vLLM's benchmark: random lengths from 0.8 of the stated
# one on, ten requests for each that may be under way) and the flags of the server of Llama-3.1-70B.
# Of the other points nothing is known: lengths as stated, a server as it is by default.
INFERENCEMAX = Client("InferenceMAX", 0.8, limited=True, budget=8192)
OTHER = Client("aiconfigurator", 1.0, limited=False, budget=None)
REQUESTS_EACH = 10  # requests for each that may be under way


@dataclass(frozen=True)
class Point:
    """One measured closed loop. ttft_s, tpot_s: seconds, of a request; version: of vLLM, "" if not
    said (2025); ep: ranks that experts lie on whole (`moe_ep_size`), 1: split over all.
    """

    name: str
    model: str
    gpu: str
    tp: int
    ep: int
    input: int
    output: int
    concurrency: int
    version: str
    client: Client
    ttft_s: float
    tpot_s: float

    @property
    def asynchronous(self) -> bool:
        """Whether its engine scheduled ahead: vLLM's default since 0.14, and InferenceMAX's flag
        before."""
        if self.client.name == INFERENCEMAX.name:
            return True
        release = self.version.partition("nightly")[0] or "1.0"  # nightly builds are later ones
        return tuple(map(int, release.split(".")[:2])) >= (0, 14)

    @property
    def kv_is_fp8(self) -> bool:
        """The servers of Llama-3.1-70B on B200 were started with an FP8 KV cache."""
        known = self.client.name == INFERENCEMAX.name
        return known and self.gpu == "b200" and self.model.startswith("llama")

    @property
    def profile(self) -> str:
        model = self.model
        if model in CONFIGS:
            model = str(resources.files("aiconfigurator_core") / "model_configs" / CONFIGS[model])
        ranks = (f":tp{self.tp}" if self.tp > 1 else "") + (":ep" if self.ep > 1 else "")
        return f"{model}@{self.gpu}{ranks}"


def read_points(models: Mapping[tuple[str, str], str] = MODELS) -> list[Point]:
    """Every point of vLLM, one engine, whose model (of `models`) and GPU are known here. Its ranks
    are one tensor-parallel group, with experts split over it or whole on it. ProfileError if
    aiconfigurator-core is not installed."""
    try:
        file = resources.files("aiconfigurator_core") / "systems" / "silicon_sample.csv"
        text = file.read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        raise ProfileError(
            "the measured points are those of aiconfigurator-core; install it with pip install "
            "'twinserve[profiles]'"
        ) from None
    return list(_points(csv.DictReader(text.splitlines()), models))


def _points(
    rows: Iterable[dict[str, str]], models: Mapping[tuple[str, str], str]
) -> Iterator[Point]:
    for row in rows:
        model = models.get((row["model_path"], row["gemm_quant_mode"]))
        gpu = _GPUS.get(row["system"])
        if (row["backend"], row["mode"]) != ("vllm", "agg") or model is None or gpu is None:
            continue
        if _COPIES in row["silicon_data_source"]:
            continue
        tp, ep = int(row["tp_size"]), int(row["moe_ep_size"] or 1)
        split = int(row["moe_tp_size"] or 1)
        if (model, gpu, tp) in _EXPERTS_WHOLE:
            split, ep = 1, tp
        of_experts = split * ep
        mixture = model.startswith(("gpt-oss", "qwen3-235b", "minimax", "kimi"))
        if mixture and (of_experts != tp or ep not in (1, tp)):
            continue  # more ranks than that: which attention they have is not said
        said = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
        yield Point(
            name=row["id"],
            model=model,
            gpu=gpu,
            tp=tp,
            ep=ep if mixture else 1,
            input=int(row["isl"]),
            output=int(row["osl"]),
            concurrency=int(said[1] if said else row["batch_size"]),
            version=row["backend_version"],
            client=INFERENCEMAX if _is_inferencemax(row) else OTHER,
            ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
            tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        )


def _is_inferencemax(row: dict[str, str]) -> bool:
    """Its dumps are named by their day."""
    named = r"(source_file=\d{4}-\d\d-\d\d\.csv|db-dump/\d{4}-\d\d-\d\d;)"
    return bool(re.match(named, row["silicon_data_source"]))
