"""Whole simulated runs compared with benchmarks of others' servers: `public_bench.csv`.

Each row is `twinserve.simulate` of the row's own words, with `--error-bars` and the flags that its
server is known to have had. It is of chats if its client asked the chat endpoint. Lengths vary
around ShareGPT's means if a row gives only these. Where a row states output tokens, throughput is
compared in these: the drawn lengths of 100 requests have another mean than the served ones.
"""

import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any

import pandas as pd

import twinserve
from twinserve.errors import TwinserveError
from twinserve.experiments.measured.points import release_of, rows_of
from twinserve.profiles.catalog import find_model
from twinserve.profiles.evidence import kind_of_weights
from twinserve.profiles.kv_memory.releases import is_known
from twinserve.profiles.names import ProfileName
from twinserve.profiles.step_times import StepTimes

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
