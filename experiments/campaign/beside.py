"""`python -m twinserve.experiments.campaign.beside FOLDER --profile NAME --front-end FILE`: the
loads of a real server (files of `vllm bench serve` in FOLDER), sent to a server on an emulated GPU
and simulated. Prints CSV, a row a load and source; needs vLLM."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.live.versions import installed_vllm
from twinserve.errors import TwinserveError, worded
from twinserve.formats import parse_json
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import RequestColumns
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.sim.twin.emulated_server import EmulatedServer, emulated_server
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import PrefixBlocks, Workload

# `vllm serve` without options on a GPU of 80 GB and more, and --max-model-len as the campaign's
SERVER = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 32768}
_BEFORE, _GAP_S, _BLOCK = "before-", 0.2, 16
_TIMES = [f"{of}_{name}_ms" for name in ("ttft", "tpot", "e2el") for of in ("mean", "p99")]
_STATED_MS = [name for name in _TIMES if "e2el" not in name]
_STATED = {"date", "output_lens", "output_throughput", "ttfts", *_STATED_MS}
_GIVE = "give a folder of files of `vllm bench serve --save-result --save-detailed`"
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


def _document(path: Path) -> dict:
    """Raises SettingsError if it is no file of `vllm bench serve`."""
    try:
        told = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read ({worded(error)}): {_GIVE}") from None
    missing = _STATED - set(told if isinstance(told, dict) else ())
    if missing:
        raise SettingsError(f"{path}: has no {', '.join(sorted(missing))}: {_GIVE}")
    return told


def of_real(path: Path) -> dict:
    """What a file of `vllm bench serve` states. Without gaps it has no p99 of E2E, and the mean is
    by the answers' one length. Raises SettingsError if their lengths differ."""
    told = _document(path)
    found = {name: told[name] for name in _STATED_MS}
    if "itls" in told:
        ends = [1e3 * (t + sum(gaps)) for t, gaps in zip(told["ttfts"], told["itls"], strict=True)]
        found |= {"mean_e2el_ms": np.mean(ends), "p99_e2el_ms": np.percentile(ends, 99)}
    else:
        length, *others = set(told["output_lens"])
        if others:
            raise SettingsError(
                f"{path}: answers of several lengths have no E2E without itls: keep itls in it"
            )
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


@dataclass(frozen=True)
class Load:
    """A file of `vllm bench serve`, what it states, and what simulates it by front end."""

    path: Path
    real: dict
    inputs: Inputs
    simulated: dict[str, Inputs]


def read_loads(given: argparse.Namespace) -> list[Load]:
    """In the order in which they were sent. Raises TwinserveError for what cannot be run."""
    dates = {path: _document(path)["date"] for path in given.folder.glob("*-*.json")}
    if not dates:
        raise SettingsError(f"{given.folder}: has no file *-*.json: {_GIVE}")
    plain = {"profile": given.profile, "slo": "none", "host_blocks": 0, **SERVER}
    loads, known = [], 0
    for path in sorted(dates, key=dates.__getitem__):
        inputs = resolve(SimulationConfig(trace=str(path), **plain))
        workload, simulated = known_before(inputs.workload, known), {}
        for front in given.front_end:
            fronted = resolve(inputs.config.model_copy(update={"front_end": front}))
            _ = fronted.delays  # refused here, if the front end is wrong
            simulated[front] = replace(fronted, workload=workload)
        loads.append(Load(path, of_real(path), inputs, simulated))
        known = max(known, len(inputs.workload)) if given.same_prompts else 0
    return loads


def rows_of(given: argparse.Namespace) -> Iterator[dict]:
    """Yield a row of the CSV after another. The first load is sent once before, for warmth. Raises
    TwinserveError, before the first row for all that can be known then."""
    loads, profile = read_loads(given), {"profile": given.profile}
    if given.repeats:
        installed_vllm()
    (spec,) = loads[0].inputs.policies
    for load in loads:
        row = profile | {"load": load.path.stem}
        yield row | {"source": "real", **load.real}
        for front, inputs in load.simulated.items():
            run = run_simulation(Simulation(inputs, spec))
            source = f"simulated ({Path(front).name.removesuffix('.json')})"
            yield row | {"source": source, **of_simulated(run)}
    if not given.repeats:
        return
    seed = 0
    with emulated_server(loads[0].inputs, spec) as send:
        send(loads[0].inputs.workload, seed)
        for repeat in range(given.repeats):
            seed += 1
            for load in loads:
                seed += not given.same_prompts
                workload = load.inputs.workload
                seen = of_emulated(send(workload, seed), int(workload.output_tokens.sum()))
                row = profile | {"load": load.path.stem, "source": "emulated"}
                yield row | {"repeat": repeat + 1, **seen}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 2, with one line, for what is wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--front-end", action="append", default=["vllm"])
    parser.add_argument("--repeats", type=int, default=3, help="0: only simulate, without vLLM")
    parser.add_argument(
        "--same-prompts", action="store_true", help="each load began with the prompts of others"
    )
    try:
        for number, row in enumerate(rows_of(parser.parse_args(arguments))):
            line = pd.DataFrame([row]).reindex(columns=COLUMNS).round(3)
            line.to_csv(sys.stdout, index=False, header=number == 0)
            sys.stdout.flush()
    except TwinserveError as error:
        print(f"error: {worded(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
