"""Check a plan: what one replica keeps, from benchmark files alone, and the printed `vllm serve`
command line driven below and above that rate."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

import twinserve as ts
from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.serving.client import bench
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import main
from twinserve.sim.plan.start import started
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.twin.served import of_measurement
from twinserve.traces.readers.formats import read_measurement
from twinserve.traces.transform import scale_rate
from twinserve.traces.workload import Workload
from twinserve.traces.write import write_trace

# `vllm serve` of the model `small` on the CPU, its engine's limits, and its predicted figures.
NAME = "small"
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
BLOCK_TOKENS = 32
# what no profile says of a CPU engine; its KV memory holds more than 16 of the longest requests
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]


def write_small(folder: Path) -> Path:
    """The model with its tokenizer, in a folder of its name."""
    model = folder / NAME
    tiny_model.write_model(model, name=NAME)
    tiny_model.write_tokenizer(model)
    return model


def start(folder: Path, model: Path, arguments: Sequence[str]) -> ServerProcess:
    """A server that is coming up (`wait`), without prefix caching."""
    given = [*ON_A_CPU, "--no-enable-prefix-caching", *arguments]
    environment = {**CPU_ENGINE, "OMP_NUM_THREADS": "1"}
    return ServerProcess(folder, model, given, NAME, environment)


@contextmanager
def serving(folder: Path, model: Path, arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """The same, up and warm, until the end of the block. folder: new, for its log."""
    folder.mkdir(parents=True)
    server = start(folder, model, arguments)
    try:
        server.wait()
        warm = {"num_prompts": 20, "random_input_len": 60, "random_output_len": 10}
        bench(server, folder / "warm.json", {"request_rate": 10, **warm}, 7)
        yield server
    finally:
        server.stop()


def engine_arguments() -> list[str]:
    """Of a server with the limits of `ENGINE`."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in ENGINE.items()]
    return [*(word for pair in pairs for word in pair), "--block-size", str(BLOCK_TOKENS)]


def any_cpu(model: Path, out: Path) -> Path:
    """A profile to begin with: the roofline of a core that does 100 GFLOP/s and reads 20 GB/s: no
    real core's numbers."""
    profile = load_profile(f"{model / 'config.json'}@l40s")
    rates = {"name": "a-cpu", "peak_flops": 1e11, "memory_bytes_per_s": 2e10}
    save_profile(profile.model_copy(update={"gpu": replace(profile.gpu, **rates)}), out)
    return out


def calibrate(files: Sequence[Path], begin: Path, out: Path) -> bool:
    """`twinserve calibrate --from-serving`; what it says goes to a text next to `out`. Whether
    there is a profile: it writes none if it makes nothing better."""
    words = ["calibrate", "--from-serving", *map(str, files), "--out", str(out)]
    words += ["--profile", str(begin), "--block-tokens", str(BLOCK_TOKENS)]
    limits = zip(("max-num-seqs", "max-step-tokens", "max-model-len"), ENGINE.values(), strict=True)
    words += [word for name, value in limits for word in (f"--{name}", str(value))]
    with out.with_suffix(".txt").open("w") as said, redirect_stdout(said), redirect_stderr(said):
        with suppress(SystemExit):
            main(words)
    return out.exists()


LENGTHS = {"random_input_len": 90, "random_output_len": 12, "random_range_ratio": 0.5}
TTFT_S, TPOT_S = 1.0, 0.05  # at the 90th percentile; the objectives of docs/plan.md
SLO = f"ttft p90 < {TTFT_S:g} s, tpot p90 < {1e3 * TPOT_S:g} ms"
# requests a second, and requests: idle, busy, and more than one engine can do
SEEN = ((5.0, 40), (15.0, 100), (40.0, 200))
PEAK_RPS = 120.0  # of the trace to plan for: several replicas' worth
# the file of a trace says milliseconds, in blocks of 512 tokens
_TRACE = ("--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001")


@dataclass(frozen=True)
class Limit:
    """rate_rps: what one replica keeps, of `workload`. arguments: of the printed command line,
    without `vllm serve MODEL` and its port."""

    rate_rps: float
    workload: Workload
    arguments: tuple[str, ...]


def limit(folder: Path, model: Path, requests: int, say: Callable[[str], None]) -> Limit:
    """From three files of `vllm bench serve` to the plan of a trace of so many requests.

    LiveEngineError if the server fails; ProfileError and SettingsError if the files give no
    profile, or the plan no limit."""
    files = []
    with serving(folder / "measured", model, engine_arguments()) as server:
        for i, (rate, count) in enumerate(SEEN):
            say(f"measures {rate:g} requests/s")
            load = {**LENGTHS, "request_rate": rate, "num_prompts": count}
            files.append(bench(server, folder / f"seen{i}.json", load, 11 + i))
    profile = folder / "mine.json"
    if not calibrate(files, any_cpu(model, folder / "any.json"), profile):
        raise ProfileError(f"no profile: {profile.with_suffix('.txt').read_text()}")
    workload = _workload(requests)
    trace = write_trace(workload, folder / "trace.jsonl")
    front = profile.with_suffix(".front_end.json")
    say("plans")
    plan = ts.plan(
        profile,
        trace,
        SLO,
        peak=10 * requests / PEAK_RPS,
        lead=0.0,
        front_end=str(front) if front.exists() else "none",
    )
    best = plan.found.best
    if best is None or best.closer is None or best.closer.rate_of_one is None:
        raise SettingsError(f"the plan gives no rate for one replica:\n{plan}")
    words = started(plan.found, best, 0)
    port = words.index("--port")
    share = best.closer.rate_of_one
    return Limit(share * PEAK_RPS, workload, (*words[3:port], *words[port + 2 :]))


def _workload(requests: int) -> Workload:
    load = {"request_rate": PEAK_RPS, "num_prompts": requests, **LENGTHS}
    text = "vllm:" + ",".join(f"{name}={value}" for name, value in load.items())
    return resolve(SimulationConfig(trace=text, slo="none", async_scheduling=True)).workload


def drive(
    folder: Path,
    model: Path,
    found: Limit,
    shares: Sequence[float],
    repeats: int,
    say: Callable[[str], None],
) -> pd.DataFrame:
    """The workload at each of `shares` of the limit, by turns, against a server that was started
    with the printed arguments: share, repeat, ttft_p90_s, tpot_p90_s, kept."""
    seen = []
    with serving(folder / "planned", model, found.arguments) as server:
        for number in range(repeats):
            for share in shares:
                say(f"{share:g} of the limit, {number + 1} of {repeats}")
                sent = scale_rate(found.workload, share * found.rate_rps / PEAK_RPS)
                trace = write_trace(sent, folder / f"sent{share:g}.jsonl")
                load = {"dataset_name": "timed_trace", "dataset_path": trace}
                load["num_prompts"] = len(sent)
                out = folder / f"at{share:g}-{number}.json"
                seen.append(_kept(bench(server, out, load, 1, *_TRACE), share, number))
    return pd.DataFrame(seen)


def _kept(file: Path, share: float, repeat: int) -> dict:
    found = of_measurement(read_measurement(file))
    ttft, tpot = (float(np.nanquantile(found.latencies[m], 0.9)) for m in ("ttft", "tpot"))
    kept = not found.failed and ttft < TTFT_S and tpot < TPOT_S
    seen = {"share": share, "repeat": repeat, "ttft_p90_s": ttft, "tpot_p90_s": tpot}
    return {**seen, "kept": kept}


def planned(
    folder: Path, requests: int, shares: Sequence[float], repeats: int, say: Callable[[str], None]
) -> tuple[Limit, pd.DataFrame]:
    """Both, in a new folder."""
    model = write_small(folder)
    found = limit(folder, model, requests, say)
    assert model.name == NAME  # the printed command says so
    return found, drive(folder, model, found, shares, repeats, say)
