"""Measured step times and prompts of other people's servers, as one table of points.

Read are `step_points.csv`, `prefill_points.csv` and `public_bench.csv` of the folder of
measurements (TWINSERVE_TRUTH), and the closed loops that ship with aiconfigurator-core. A point
says how the server was loaded and one measured time. `why_not` names points that cannot be right,
or whose load a formula cannot tell; they are not scored.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from twinserve.experiments.silicon.points import MODELS, read_points
from twinserve.experiments.silicon.points import Point as Loop

# beyond the models of the closed loops' page
MORE_LOOPS = {
    ("MiniMaxAI/MiniMax-M2.5", "fp8"): "minimax-m2.5-fp8",
    ("MiniMaxAI/MiniMax-M2.5", "nvfp4"): "minimax-m2.5-nvfp4",
    ("moonshotai/Kimi-K2.5", "int4_wo"): "kimi-k2.5",
    ("moonshotai/Kimi-K2.5", "nvfp4"): "kimi-k2.5-nvfp4",
}
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


def read_measured(truth: Path) -> list[Measured]:
    """All points. ProfileError without aiconfigurator-core."""
    rows = [*_steps(truth), *_bench(truth), *_prompts(truth)]
    loops = read_points(MODELS | MORE_LOOPS)  # the file has some of them twice
    return _without_faster(list(dict.fromkeys([*rows, *map(_of_loop, loops)])))


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


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _steps(truth: Path) -> Iterator[Measured]:
    for row in _rows(truth / "step_points.csv"):
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


def read_bench(truth: Path) -> Iterator[dict[str, str]]:
    """Rows of public_bench.csv."""
    yield from _rows(truth / "public_bench.csv")


def _bench(truth: Path) -> Iterator[Measured]:
    """Closed loops whose concurrency is stated; those of tenstorrent are in step_points.csv."""
    for row in read_bench(truth):
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


def _prompts(truth: Path) -> Iterator[Measured]:
    kinds = {"low": "prompt", "single": "prompt", "single0": "loop", "batch": "batch"}
    for row in _rows(truth / "prefill_points.csv"):
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


def _of_loop(point: Loop) -> Measured:
    release = release_of(point.version)
    impossible = ("llama-3.1-8b-fp8", "qwen3-32b-fp8")
    clogged = point.model == "gpt-oss-120b" and point.gpu == "h100" and point.concurrency >= 512
    return Measured(
        source=f"silicon sample: {point.client.name} {point.model}",
        what="tpot",
        profile=point.profile,
        isl=point.input,
        osl=point.output,
        concurrency=point.concurrency,
        seconds=point.tpot_s,
        budget=point.client.budget,
        release=release,
        ahead=point.asynchronous,
        fp8_kv=point.kv_is_fp8,
        shortest=point.client.shortest,
        why_not="cannot be right" if clogged or point.model in impossible else "",
    )
