"""Forms of step times against measured steps, prompts and whole runs: `twinserve study step_times`.

Points are other people's (`measured/points.py`), loads are formulas (`load.py`). No form is fitted
to a point. docs/validation.md has the results.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import getitem
from typing import Any

import numpy as np
import pandas as pd

import twinserve
from twinserve.errors import TwinserveError
from twinserve.experiments.measured.points import Measured, read_measured, release_of, rows_of
from twinserve.experiments.measured.scores import MISSED, score_lines, sections, whole
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study
from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.evidence import expected_errors, kind_of_weights
from twinserve.profiles.front_end import load_front_end
from twinserve.profiles.host import VLLM_SYNCHRONOUS
from twinserve.profiles.kv_memory.releases import is_known
from twinserve.profiles.memory import with_fp8_kv, with_server_flags
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import StepTimes, choose

# What a form of step times says of a measured point: steady loads by formula, no run of the
# simulator.
# tpot the decode step of the loop at its mean context, and what other requests' prompts add: each
# of them begins once while a request decodes its `osl` tokens loop prompts that begin together,
# in steps of the budget, then decodes prompt of a loop's requests: a tenth begin together, the
# others find decodes under way batch steps full of prompts beside decodes, then what decodes are
# left layer the step of one layer, no host
CLIENT = load_front_end("vllm")
BUSIEST = 0.9
FIRST_WAVE = 0.1  # of ten requests for each that may be under way


def seconds(point: Measured, profile: Profile) -> float:
    """Of the point, with the profile's step times and the server's host time. ProfileError for a
    load that does not fit its KV memory."""
    if not point.ahead and point.what != "layer":
        profile = profile.with_host_time(VLLM_SYNCHRONOUS)
    load = _Load(point, profile, profile.model())
    return getattr(load, point.what)()


class _Load:
    def __init__(self, point: Measured, profile: Profile, model: StepTimeModel) -> None:
        self.point, self.profile, self.model = point, profile, model
        drawn = (1 + point.shortest) / 2
        self.isl, self.osl = round(point.isl * drawn), max(round(point.osl * drawn), 2)
        self.n = max(round(point.concurrency), 1)
        self.budget = point.budget or profile.max_num_batched_tokens
        self.each = self.isl + self.osl // 2  # tokens of a request halfway
        if point.what != "batch" and self.n * self.each > profile.kv_capacity_tokens:
            raise ProfileError("more KV than there is room")

    def _step(self, n: int, new=(), resident=()) -> float:
        mean = self.each
        prompts = {}
        if len(new):
            prompts = {"prefill_new": np.array(new), "prefill_resident": np.array(resident)}
        return self.model.step_seconds(StepComposition(n, n * mean, mean if n else 0, **prompts))

    def _prompt(self, n: int) -> float:
        """What one prompt adds to steps of n decodes."""
        total, done = 0.0, 0
        while done < self.isl:
            chunk = min(self.isl - done, max(self.budget - n, 1))
            total += self._step(n, [chunk], [done]) - (self._step(n) if n else 0.0)
            done += chunk
        return total

    def tpot(self) -> float:
        return self._step(self.n) + self._prompt(self.n) * (self.n - 1) / self.osl

    def _together(self, count: int) -> list[float]:
        """When each of `count` prompts that begin together has its first token."""
        if self.isl <= self.budget:
            at_once = max(self.budget // self.isl, 1)
            ends, now = [], 0.0
            for first in range(0, count, at_once):
                size = min(at_once, count - first)
                now += self._step(0, [self.isl] * size, [0] * size)
                ends += [now] * size
            return ends
        whole = self._prompt(0)
        return [whole * (k + 1) for k in range(count)]

    def loop(self) -> float:
        return self._together(self.n)[-1] + (self.osl - 1) * self._step(self.n)

    def prompt(self) -> float:
        alone, first = self._prompt(0), self._together(self.n)
        beside = alone
        if self.n > 1:
            step = self._step(self.n - 1)
            others = self._prompt(self.n - 1)
            # of the time, others' prompts are computed; one that comes then waits for half of one
            busy = min((self.n - 1) * others / (self.osl * step + others), BUSIEST)
            beside = others + 1.5 * step + busy / (1 - busy) * others / 2
        share = FIRST_WAVE if self.n > 1 else 0.0
        client = CLIENT.idle_s(self.isl)
        return share * float(np.mean(first)) + (1 - share) * beside + client

    def batch(self) -> float:
        count, seats = self.point.requests, self.profile.max_num_seqs
        room = self.profile.kv_capacity_tokens // (self.isl + self.osl)
        n = max(min(count, seats, room), 1)
        prompts = count * self.isl / (self.budget - min(n, self.budget // 2))
        chunk = self.budget - min(n, self.budget // 2)
        if self.isl <= chunk:
            new = [self.isl] * (chunk // self.isl) + [chunk % self.isl or 1]
            resident = [0] * len(new)
        else:
            new, resident = [chunk], [(self.isl - chunk) // 2]
        # decodes beside prompts: those that the following decodes alone would need
        beside = max(round(n / 2), 1)
        mixed = prompts * self._step(beside, new, resident)
        left = max(count * self.osl - prompts * beside, 0.0)
        return mixed + left / n * self._step(n)

    def layer(self) -> float:
        count = max(self.isl // 763, 1)
        chunks = [self.isl // count] * count
        work = StepComposition(prefill_new=np.array(chunks), prefill_resident=np.zeros(count, int))
        terms = self.model.terms(work)  # of a derived model
        return sum(terms.values()) - terms["host"] - terms["head"]


# How wide a printed error must be, and what it held on sources that it had not seen.
# A bar is the size of the error, |log(ours / measured)|, that 90 % of measured points keep. A
# source counts as MOST_OF_SOURCE points at most: the next server is another source. Suspect hosts
# count for no bar, but what bars hold of them is counted. Nearest first: the kind of model on the
# GPU family; its class there; its class on any GPU. A bar of one source, or of other kinds, is
# STRANGERS times as wide.
STRANGERS = 1.2
LEAST_POINTS = 5
MOST_OF_SOURCE = 10
DENSE, FEW_BITS, MIXTURE = "dense 16 bits", "dense quantised", "mixture"


def with_groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored rows with `step` (decode, prefill), `class` and `size` of the error."""
    dense = rows.kind.str.startswith("dense")
    few = np.where(dense, FEW_BITS, MIXTURE)
    return rows.assign(
        step=np.where(rows.what.isin(["tpot", "loop"]), "decode", "prefill"),
        **{"class": np.where(rows.kind == DENSE, DENSE, few)},
        size=np.log(rows.ratio).abs(),
    )


def bar(
    rows: pd.DataFrame, kind: str, of_class: str, family: str, near: bool = False
) -> tuple[float, int] | None:
    """(relative error, points) of one form and step for models of this kind on this GPU family;
    None if no level has LEAST_POINTS. near: the first level alone."""
    same = rows["class"] == of_class
    levels = ((rows.kind == kind) & (rows.family == family), same & (rows.family == family), same)
    for level, chosen in enumerate(levels[:1] if near else levels):
        part = rows[chosen]
        if len(part) >= LEAST_POINTS:
            wider = STRANGERS if level or part.source.nunique() == 1 else 1.0
            return float(np.expm1(wider * _kept(part))), len(part)
    return None


def _kept(rows: pd.DataFrame) -> float:
    """The size that all but MISSED keep, in weight."""
    of_source = rows.groupby("source")["size"].transform("size").to_numpy()
    order = np.argsort(rows["size"].to_numpy(), kind="stable")
    weights = np.minimum(MOST_OF_SOURCE / of_source, 1.0)[order].cumsum()
    at = np.searchsorted(weights, (1 - MISSED) * weights[-1] - 1e-12)
    return float(rows["size"].to_numpy()[order][at])


def bars(rows: pd.DataFrame) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """(form, step, kind, family) -> bar, of all rows scored as the form that they ran."""
    good = with_groups(rows[(rows.why == "") & (rows.form == rows.ran) & ~rows.suspect])
    found = {}
    for (ran, step), part in good.groupby(["ran", "step"]):
        for kind, of_class, family in _kinds(part):
            if (one := bar(part, kind, of_class, family, near=True)) is not None:
                found[ran, step, kind, family] = one
    return found


def _kinds(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    columns = ["kind", "class", "family"]
    return list(rows[columns].drop_duplicates().sort_values(columns).itertuples(index=False))


def held_out(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored rows with `error` from the other sources alone. Rows for which no other source has
    enough points are left out."""
    good = with_groups(rows[rows.why == ""])
    parts = []
    for (_, _, source), part in good.groupby(["form", "step", "source"]):
        one = part.iloc[0]
        same = (good.form == one.form) & (good.step == one.step)
        others = good[same & (good.source != source) & ~good.suspect]
        for kind, of_class, family in _kinds(part):
            found = bar(others, kind, of_class, family)
            if found is not None:
                mine = part[(part.kind == kind) & (part.family == family)]
                parts.append(mine.assign(error=found[0]))
    return pd.concat(parts) if parts else good.iloc[:0]


# Whole simulated runs compared with benchmarks of others' servers: `public_bench.csv`.
# Each row is `twinserve.simulate` of the row's own words, with `--error-bars` and the flags that
# its server is known to have had. It is of chats if its client asked the chat endpoint. Lengths
# vary around ShareGPT's means if a row gives only these. Where a row states output tokens,
# throughput is compared in these: the drawn lengths of 100 requests have another mean than the
# served ones.
# Of servers whose longest requests need more KV than is derived: what they must have had.
BLOCKS = {"qwen3-32b@h100": 2100}
# Column of the file -> metric, and where summary.json has it in the same unit.
METRICS = {
    "measured_tpot_ms": ("TPOT", "{}_tpot_ms"),
    "measured_ttft_ms": ("TTFT", "{}_ttft_ms"),
    "measured_requests_per_s": ("throughput", "request_throughput"),
}


def score_runs(form: StepTimes) -> pd.DataFrame:
    """A row for each benchmark and metric that it states: kind, source, ratio of ours to measured,
    and of the ends of the printed range; `why` instead, if it cannot be run."""
    benches = rows_of("public_bench.csv")
    return pd.DataFrame([row for bench in benches for row in _scored(bench, form)])


def _scored(bench: dict[str, str], form: StepTimes) -> Iterator[dict[str, Any]]:
    model = find_model(ProfileName.parse(bench["profile"]).model)
    about = {"source": bench["source"].split(" @")[0].split(" (")[0], "form": form, "why": ""}
    about |= {"kind": kind_of_weights(model), "profile": bench["profile"]}
    host = "suspect" if "suspect" in bench["quality"] else "as stated"
    about |= {"workload": bench["workload"], "host": host}
    version = bench["vllm"] if is_known(bench["vllm"]) else None
    # one laboratory's client, of which not all rows repeat the words
    chats = "gpustack" in bench["source"]
    ahead = "--async-scheduling" in bench["served_as"] or release_of(bench["vllm"]) >= (0, 14)
    try:
        run = twinserve.simulate(
            "vllm",
            trace=_workload(bench),
            profile=bench["profile"],
            step_times=form,
            front_end=f"vllm:chat={chats}",
            engine_version=version,
            async_scheduling=ahead,
            slo="none",
            num_blocks=BLOCKS.get(bench["profile"]),
            error_bars=True,
        )
    except TwinserveError as error:
        yield about | {"metric": "", "why": str(error)[:100]}
        return
    for column, (metric, path) in METRICS.items():
        name = "p50" if bench["statistic"] == "p50" else "mean"
        if not bench[column] or (metric == "TTFT" and "TTFT not clean" in bench["quality"]):
            continue
        path, measured = f"classes.rt.{path.format(name)}", float(bench[column])
        stated = re.search(r"random_output_len=(\d+)", bench["workload"])
        if metric == "throughput" and stated:
            path, measured = "output_throughput", measured * int(stated[1])
        low, high = run.summary["error_bars"][path]
        ours = reduce(getitem, path.split("."), run.summary)
        ratios = {"ratio": ours / measured, "low": low / measured, "high": high / measured}
        yield about | {"metric": metric} | ratios


def _workload(bench: dict[str, str]) -> str:
    """Requests of one length that start together would end together, and ShareGPT's do not."""
    if "sharegpt" in bench["served_as"] and "max_concurrency" in bench["workload"]:
        return f"{bench['workload']},random_range_ratio=0.9"
    return bench["workload"]


FORMS: tuple[StepTimes, ...] = ("roofline", "operators", "auto")
DECODES = ("tpot", "loop")
OF_POINT = ("source", "what", "profile", "isl", "osl", "concurrency")


def score(points: Iterable[Measured], forms: Sequence[StepTimes] = FORMS) -> pd.DataFrame:
    """A row for each point and form: kind, gpu, source, what, seconds measured and ours, their
    ratio, the printed error (relative), whether it is said to be known. `why` instead, if the form
    has no times of it or the point is not scored."""
    rows = []
    for point in points:
        for form in forms:
            row = {name: getattr(point, name) for name in OF_POINT}
            row |= {"form": form, "measured_s": point.seconds, "why": point.why_not}
            row |= {"suspect": point.suspect}
            try:
                profile = _profile(point, form)
                row |= {"kind": kind_of_weights(profile.llm), "gpu": profile.gpu.name}
                row |= {"tp": profile.tp, "family": profile.gpu.family}
                row |= {"ran": profile.step_model.form}
                ours = seconds(point, profile)
                errors = expected_errors(profile)
                small = point.concurrency < 32
                of = errors.decode_small if small else errors.decode_large
                of = of if point.what in DECODES else errors.prefill
                row |= {"ours_s": ours, "ratio": ours / point.seconds}
                row |= {"error": of.error, "known": of.known}
            except ProfileError as error:
                row["why"] = row["why"] or str(error)
            rows.append(row)
    return pd.DataFrame(rows)


def _profile(point: Measured, form: StepTimes) -> Profile:
    """As the server was started, as far as that is known."""
    if point.what == "layer":
        if form == "operators":
            raise ProfileError("tables are of all layers")
        return _of_one_layer(point.profile)
    profile = _chosen(point.profile, form)
    if point.release:
        version = ".".join(map(str, point.release)) + ".0"
        if is_known(version):  # its KV memory, too
            profile = with_server_flags(profile, engine_version=version)
        profile = profile.model_copy(update={"engine_version": version})
    if point.eager:
        profile = profile.model_copy(update={"enforce_eager": True})
    return with_fp8_kv(profile) if point.fp8_kv else profile


@lru_cache(maxsize=256)
def _chosen(name: str, form: StepTimes) -> Profile:
    return choose(name, form).profile


def _of_one_layer(name: str) -> Profile:
    parsed = ProfileName.parse(name)
    return derive_profile(replace(find_model(parsed.model), layers=1), parsed.gpu)


def markdown(rows: pd.DataFrame) -> str:
    """Tables of scored points, and how many are not scored, by reason."""
    good, unseen = with_groups(rows[rows.why == ""]), with_loads(held_out(rows))
    tables = {
        "By kind and GPU family": (good, ("step", "kind", "family", "form")),
        "By source": (good, ("step", "source", "form")),
        "All": (good, ("step", "form")),
        "All, ranges of other sources": (unseen, ("step", "form")),
        "By load, ranges of other sources": (unseen, ("step", "load", "form")),
        "By class, ranges of other sources": (unseen, ("step", "class", "form")),
    }
    parts = {title: score_lines(ranged(of), by) for title, (of, by) in tables.items()}
    return sections(parts, rows.why)


def with_loads(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored points with `load`: requests under way, or what else was measured."""
    of = {"a burst": rows.what == "batch", "one layer": rows.what == "layer"}
    of |= {"1 to 4": rows.concurrency <= 4, "5 to 31": rows.concurrency < 32}
    return rows.assign(load=np.select(list(of.values()), list(of), "32 or more"))


def ranged(rows: pd.DataFrame) -> pd.DataFrame:
    """Scored points with the printed range over the measured time: ours with `error` in both
    directions."""
    low, high = rows.ratio / (1 + rows.error), rows.ratio * (1 + rows.error)
    return rows.assign(off=rows.ratio - 1, low=low, high=high)


def markdown_of_runs(rows: pd.DataFrame) -> str:
    """Tables of whole runs."""
    good = rows[rows.why == ""].assign(off=rows.ratio - 1)
    tables = {
        "Runs by source": ("metric", "source", "kind", "form"),
        "Runs": ("metric", "host", "form"),
    }
    return sections({title: score_lines(good, by) for title, by in tables.items()}, rows.why)


def scored(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score(read_measured(), (form,)).to_dict("records")


def scored_runs(form: StepTimes, seed: int) -> list[dict[str, Any]]:
    return score_runs(form).to_dict("records")


GRID = Grid({"form": FORMS}, few={"form": 1})
STUDY = Study(
    "step_times",
    "",
    [
        Figure("steps", "Steps and prompts", GRID, scored, whole, text=markdown),
        Figure("runs", "Whole runs", GRID, scored_runs, whole, text=markdown_of_runs),
    ],
    seeds=1,
    intro="Forms of step times on others' measurements; numbers are per cent.",
)
