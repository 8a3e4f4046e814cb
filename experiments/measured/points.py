"""Measured step times, prompts and closed loops of other people's servers, a row a measured time.

Read are `step_points.csv`, `prefill_points.csv` and `public_bench.csv` (`truth.py`), and the closed
loops that ship with aiconfigurator-core, `silicon_sample.csv`. A row says how the server was loaded
and one measured time. `why_not` names rows that cannot be right, or whose load a formula cannot
tell; they are not scored.

The file of loops does not say how its clients start, nor whether its times are means or medians.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from twinserve.experiments.measured.truth import truth_folder
from twinserve.experiments.study.claims import texts
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.specs import ProfileError

DATA = "aiconfigurator-core"  # the distribution that has the loops
_DATA = texts(__file__, "loops.yaml")
MODELS, MORE_MODELS = (
    {(path, form): name for path, form, name in rows} for rows in (_DATA.MODELS, _DATA.MORE_MODELS)
)
_COPIES = "kimi-k2.5-gap-analysis"  # of rows that it has from InferenceMAX, too
# The file has their experts split, which vLLM refuses; InferenceX's pull request 869 has the flag.
_EXPERTS_WHOLE = (("minimax-m2.5-fp8", "h200", 8),)
_GPUS = {system: gpu for gpu, system in SYSTEMS.items()} | {"b300_sxm": "b300"}
_IMPOSSIBLE = ("llama-3.1-8b-fp8", "qwen3-32b-fp8")
# InferenceMAX: its README gives the client (vLLM's benchmark: random lengths from 0.8 of the stated
# one on) and the flags of the server of Llama-3.1-70B. Of the other loops nothing is known: lengths
# as stated, a server as it is by default. InferenceMAX's dumps are named by their day.
_DUMPS = r"(source_file=\d{4}-\d\d-\d\d\.csv|db-dump/\d{4}-\d\d-\d\d;)"
INFERENCEMAX = {"shortest": 0.8, "limited": True, "budget": 8192}
MUCH = 1.25  # times
_OF_THE_SAME_SIZE = {"qwen1.5-72b": "qwen2.5-72b"}  # but for its KV heads


@dataclass(frozen=True)
class Measured:
    """One measured time.

    what         tpot: seconds a token after the first; loop: seconds of whole requests that begin
                 together; prompt: of a prompt's first token; batch: of all requests at once; layer:
                 of one layer
    profile      MODEL@GPU[:tpN][:ep]
    isl, osl     tokens of a prompt and of an answer
    concurrency  requests under way
    requests     of a batch
    budget       tokens a step, None: vLLM's default
    release      (0, 11), (0, 15); (): not known
    ahead        asynchronous scheduling
    shortest     lengths are drawn from this share of the stated ones on
    suspect      of a host whose engines all reach 16 to 33 % of the peak in prompts
    """

    source: str
    what: str
    profile: str
    isl: int
    osl: int
    concurrency: float
    seconds: float
    requests: int = 1
    budget: int | None = None
    release: tuple[int, ...] = ()
    ahead: bool = False
    fp8_kv: bool = False
    shortest: float = 1.0
    eager: bool = False
    suspect: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Loop(Measured):
    """A closed loop of `silicon_sample.csv`; `seconds` is its TPOT.

    name     its id in the file
    ep       ranks that experts lie on whole (`moe_ep_size`), 1: split over all
    ttft_s   of a request, seconds
    limited  the batch limit is the concurrency
    """

    name: str = field(default="", compare=False)  # the file has some loops twice
    model: str = ""
    gpu: str = ""
    tp: int = 1
    ep: int = 1
    ttft_s: float = field(default=0.0, compare=False)
    limited: bool = False


def read_measured() -> list[Measured]:
    """All rows. WorkloadError without the files, ProfileError without aiconfigurator-core."""
    rows = [*_steps(), *_bench(), *_prompts(), *read_loops(MODELS | MORE_MODELS)]
    return _without_faster(list(dict.fromkeys(rows)))


def _without_faster(points: list[Measured]) -> list[Measured]:
    """With a reason against loops that were much faster than a lighter load of the same engine."""
    loops: dict[tuple[str, str], list[Measured]] = {}
    for point in points:
        if point.what == "tpot":
            loops.setdefault((point.source, point.profile), []).append(point)

    def faster(point: Measured) -> bool:
        if point.what != "tpot" or point.why_not:
            return False
        return any(
            other.seconds > MUCH * point.seconds
            for other in loops[point.source, point.profile]
            if other.concurrency <= point.concurrency
            and other.isl <= point.isl
            and other.osl >= point.osl
        )

    reason = "faster than a lighter load"
    return [replace(point, why_not=reason) if faster(point) else point for point in points]


def _named(model: str, gpu: str, tp: int, ep: int = 1) -> str:
    ranks = (f":tp{tp}" if tp > 1 else "") + (":ep" if ep > 1 else "")
    return f"{_OF_THE_SAME_SIZE.get(model, model)}@{gpu}{ranks}"


def release_of(text: str) -> tuple[int, ...]:
    """(0, 11) of 0.11.2; () of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found and text[:2] == "0." else ()


def rows_of(name: str) -> list[dict[str, str]]:
    """Of a file of `truth.py`. Raises WorkloadError."""
    with (truth_folder(name) / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _steps() -> Iterator[Measured]:
    for row in rows_of("step_points.csv"):
        release = release_of(row["release"])
        whole = not row["tpot_ms"]
        yield Measured(
            source=row["source"],
            what="loop" if whole else "tpot",
            profile=_named(row["model"], row["gpu"], int(row["tp"]), int(row["ep"])),
            isl=int(row["isl"]),
            osl=int(row["osl"]),
            concurrency=float(row["conc"]),
            seconds=float(row["total_s"]) if whole else float(row["tpot_ms"]) / 1e3,
            release=release,
            ahead=release >= (0, 14),
            eager=row["eager"] == "1",
            why_not="gave the constant of eager mode" if row["source"].endswith("#4852") else "",
        )


def _named_source(text: str) -> str:
    """A laboratory's pages are one source."""
    return "github.com/gpustack" if "gpustack" in text else text.split(" @")[0].split(" (")[0]


def _bench() -> Iterator[Measured]:
    """Closed loops whose concurrency is stated; those of tenstorrent are in step_points.csv."""
    for row in rows_of("public_bench.csv"):
        said = dict(part.split("=") for part in row["workload"].partition(":")[2].split(","))
        if "max_concurrency" not in said or "tenstorrent" in row["source"]:
            continue
        release = release_of(row["vllm"])
        yield Measured(
            source=_named_source(row["source"]),
            what="tpot",
            profile=row["profile"],
            isl=int(said["random_input_len"]),
            osl=int(said["random_output_len"]),
            concurrency=float(said["max_concurrency"]),
            seconds=float(row["measured_tpot_ms"]) / 1e3,
            release=release,
            ahead=release >= (0, 14) or "--async-scheduling" in row["served_as"],
            why_not=row["quality"] if "suspect" in row["quality"] else "",
        )


def _prompts() -> Iterator[Measured]:
    kinds = {"low": "prompt", "single": "prompt", "single0": "loop", "batch": "batch"}
    for row in rows_of("prefill_points.csv"):
        release, sample = release_of(row["release"]), row["source"].startswith("silicon")
        budget = int(row["budget"])
        yield Measured(
            source=_named_source(row["source"]),
            what=kinds.get(row["kind"], row["kind"]),
            profile=_named(row["model"], row["gpu"], int(row["tp"]), int(row["ep"])),
            isl=round(float(row["isl"])),
            osl=round(float(row["osl"])),
            concurrency=float(row["conc"]),
            seconds=float(row["measured_s"]),
            requests=round(float(row["n"])),
            budget=budget if budget < 10**8 else None,
            release=release,
            ahead=sample or release >= (0, 14),
            fp8_kv=sample and "llama" in row["model"] and row["gpu"] == "b200",
            shortest=0.8 if sample else 1.0,
            suspect="gpustack" in row["source"] and row["gpu"] == "h100",
            why_not=row["flag"],
        )


def read_loops(models: Mapping[tuple[str, str], str] = MODELS) -> list[Loop]:
    """Every closed loop of vLLM, one engine, whose model (of `models`) and GPU are known here. Its
    ranks are one tensor-parallel group, with experts split over it or whole on it. ProfileError if
    aiconfigurator-core is not installed."""
    try:
        file = resources.files("aiconfigurator_core") / "systems" / "silicon_sample.csv"
        text = file.read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        raise ProfileError(
            "the measured points are those of aiconfigurator-core; install it with pip install "
            "'twinserve[profiles]'"
        ) from None
    rows = csv.DictReader(text.splitlines())
    return [found for row in rows if (found := _loop(row, models)) is not None]


def _loop(row: Mapping[str, str], models: Mapping[tuple[str, str], str]) -> Loop | None:
    model, gpu = models.get((row["model_path"], row["gemm_quant_mode"])), _GPUS.get(row["system"])
    origin = row["silicon_data_source"]
    of_vllm = (row["backend"], row["mode"]) == ("vllm", "agg") and _COPIES not in origin
    if not of_vllm or model is None or gpu is None:
        return None
    tp, ep, split = (int(row[name] or 1) for name in ("tp_size", "moe_ep_size", "moe_tp_size"))
    if (model, gpu, tp) in _EXPERTS_WHOLE:
        split, ep = 1, tp
    mixture = model.startswith(("gpt-oss", "qwen3-235b", "minimax", "kimi"))
    if mixture and (split * ep != tp or ep not in (1, tp)):
        return None  # more ranks than that: which attention they have is not said
    ep = ep if mixture else 1
    config = resources.files("aiconfigurator_core") / "model_configs" / _DATA.CONFIGS.get(model, "")
    said = re.search(r"silicon_concurrency=(\d+)", origin)
    concurrency = int(said[1] if said else row["batch_size"])
    known, release = bool(re.match(_DUMPS, origin)), release_of(row["backend_version"])
    clogged = model == "gpt-oss-120b" and gpu == "h100" and concurrency >= 512
    return Loop(
        source=f"silicon sample: {'InferenceMAX' if known else 'aiconfigurator'} {model}",
        what="tpot",
        profile=_named(str(config) if model in _DATA.CONFIGS else model, gpu, tp, ep),
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        concurrency=concurrency,
        seconds=float(row["silicon_tpot_ms"]) / 1e3,
        release=release,
        # vLLM's default since 0.14, as of nightly builds, and InferenceMAX's flag before
        ahead=known or not release or release >= (0, 14),
        # so were the servers of Llama-3.1-70B on B200 started
        fp8_kv=known and gpu == "b200" and model.startswith("llama"),
        why_not="cannot be right" if clogged or model in _IMPOSSIBLE else "",
        name=row["id"],
        model=model,
        gpu=gpu,
        tp=tp,
        ep=ep,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        **(INFERENCEMAX if known else {}),
    )
