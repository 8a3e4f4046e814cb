"""`python -m twinserve.experiments.campaign.beside FOLDER --profile NAME --front-end FILE`: the
loads of a real server (files of `vllm bench serve` in FOLDER), sent to a server on an emulated GPU
and simulated. Prints CSV, a row a load and source; needs vLLM."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.sim.twin.emulated_server import EmulatedServer, emulated_server
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import PrefixBlocks, Workload

# `vllm serve` without options on a GPU of 80 GB and more, and --max-model-len as the campaign's
SERVER = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 32768}
_BEFORE, _GAP_S, _BLOCK = "before-", 0.2, 16
_TIMES = [f"{of}_{name}_ms" for name in ("ttft", "tpot", "e2el") for of in ("mean", "p99")]
COLUMNS = [
    *("profile", "load", "source", "repeat", "late_steps_pct", *_TIMES, "computed_ms"),
    "output_tokens_per_s",
]


def numbers(ttft, tpot, e2el, tokens: int, span_s: float, computed: float | None) -> dict:
    """Return milliseconds, and tokens a second. computed: mean seconds from first scheduled to
    first token, as vLLM counts its prefill time."""
    found = {}
    for name, values in {"ttft": ttft, "tpot": tpot, "e2el": e2el}.items():
        found |= {f"mean_{name}_ms": 1e3 * np.nanmean(values)}
        found |= {f"p99_{name}_ms": 1e3 * np.nanpercentile(values, 99)}
    found["computed_ms"] = np.nan if computed is None else 1e3 * computed
    return found | {"output_tokens_per_s": tokens / span_s}


def of_real(path: Path) -> dict:
    """What a file of `vllm bench serve` states. Without gaps it has no p99 of E2E, and the mean is
    by the answers' one length."""
    told = json.loads(path.read_text())
    found = {f"{of}_{name}_ms": told[f"{of}_{name}_ms"] for name in ("ttft", "tpot")
             for of in ("mean", "p99")}  # fmt: skip
    if "itls" in told:
        ends = [1e3 * (t + sum(gaps)) for t, gaps in zip(told["ttfts"], told["itls"], strict=True)]
        found |= {"mean_e2el_ms": np.mean(ends), "p99_e2el_ms": np.percentile(ends, 99)}
    else:
        (length,) = set(told["output_lens"])
        found["mean_e2el_ms"] = found["mean_ttft_ms"] + (length - 1) * found["mean_tpot_ms"]
    prefill_s = told.get("engine_means", {}).get("request_prefill_time_seconds", np.nan)
    return found | {
        "computed_ms": 1e3 * prefill_s,
        "output_tokens_per_s": told["output_throughput"],
    }


def of_emulated(server: EmulatedServer, tokens: int) -> dict:
    """Times from when a request was sent, as `vllm bench serve` counts."""
    late, client = server.parts["client late"], server.client
    ends = server.due_s + client["e2el"]
    return {
        "late_steps_pct": 100 * server.lateness.late / server.lateness.steps,
        **numbers(
            client["ttft"] - late, client["tpot"], client["e2el"] - late,
            tokens, ends.max(), server.parts["computed"].mean(),
        ),
    }  # fmt: skip


def of_simulated(run: RunResult) -> dict:
    """Of the requests that `known_before` did not add."""
    frame = run.rows.requests
    c = RequestColumns.of(frame[~frame["request_id"].str.startswith(_BEFORE)])
    first = c.ttft if c.engine_ttft is None else c.engine_ttft
    span_s, computed = c.last.max() - c.arrival.min(), (first - c.queued).mean()
    return numbers(c.ttft, c.tpot, c.e2el, int(c.output.sum()), span_s, computed)


def known_before(workload: Workload, known: int) -> Workload:
    """The workload after `known` requests, one by one, whose prompts its first ones repeat."""
    n, end_s = len(workload), _GAP_S * (known + 10)
    rows = np.concatenate([np.zeros(known, np.int64), np.arange(n)])
    prompts = np.resize(workload.prompt_tokens, known)
    blocks = -(-np.concatenate([prompts, workload.prompt_tokens]) // _BLOCK)
    number = np.concatenate([np.arange(known), np.arange(n)])
    most = int(blocks.max())
    ids = [row * most + np.arange(count) for row, count in zip(number, blocks, strict=True)]
    _, dense = np.unique(np.concatenate(ids), return_inverse=True)
    return replace(
        take_rows(workload, rows),
        ids=[f"{_BEFORE}{i}" for i in range(known)] + list(workload.ids),
        arrival_s=np.concatenate([_GAP_S * np.arange(known), end_s + workload.arrival_s]),
        prompt_tokens=np.concatenate([prompts, workload.prompt_tokens]),
        output_tokens=np.concatenate([np.ones(known, np.int64), workload.output_tokens]),
        prefix=PrefixBlocks(dense, np.concatenate([[0], blocks.cumsum()]), _BLOCK),
    )


def rows_of(given: argparse.Namespace) -> Iterator[dict]:
    """Yield a row of the CSV after another. The first load is sent once before, for warmth."""
    files = sorted(given.folder.glob("*-*.json"), key=lambda f: json.loads(f.read_text())["date"])
    plain = {"profile": given.profile, "slo": "none", "host_blocks": 0, **SERVER}
    loads = {path: resolve(SimulationConfig(trace=str(path), **plain)) for path in files}
    inputs, known = loads[files[0]], 0
    (spec,) = inputs.policies
    for path, one in loads.items():
        row = {"profile": given.profile, "load": path.stem}
        yield row | {"source": "real", **of_real(path)}
        workload = known_before(one.workload, known)
        for front in given.front_end:
            config = one.config.model_copy(update={"front_end": front})
            asked = replace(resolve(config), workload=workload)
            run = run_simulation(Simulation(asked, spec))
            source = f"simulated ({Path(front).name.removesuffix('.json')})"
            yield row | {"source": source, **of_simulated(run)}
        known = max(known, len(one.workload)) if given.same_prompts else 0
    seed = 0
    with emulated_server(inputs, spec) as send:
        send(inputs.workload, seed)
        for repeat in range(given.repeats):
            seed += 1
            for path, one in loads.items():
                seed += not given.same_prompts
                server = send(one.workload, seed)
                yield {
                    "profile": given.profile, "load": path.stem, "source": "emulated",
                    "repeat": repeat + 1,
                    **of_emulated(server, int(one.workload.output_tokens.sum())),
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--front-end", action="append", default=["vllm"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--same-prompts", action="store_true", help="each load began with the prompts of others"
    )
    for number, row in enumerate(rows_of(parser.parse_args())):
        line = pd.DataFrame([row]).reindex(columns=COLUMNS).round(3)
        line.to_csv(sys.stdout, index=False, header=number == 0)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
