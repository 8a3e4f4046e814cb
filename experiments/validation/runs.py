"""Measured runs of real engines: read them, simulate them with the run's own arguments, and
compare.

A run is a folder with `requests.csv` (planned and real times of each request on the engine's
clock), `timeseries.csv` (a row a second) and `meta.json` (engine arguments); next to the folders
lie the chained prefix blocks of the request lists.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.links import PcieLink
from twinserve.backends.lockstep import LockstepBackend, RankGroup, SharedExperts
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.registry import parse_policy
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.profile import Profile, derive_profile, load_profile
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import BackendOf
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload, WorkloadError

BLOCK_TOKENS = 16
STATISTICS = {"mean": np.mean} | {
    f"p{q}": lambda x, q=q: np.percentile(x, q) for q in (50, 90, 95, 99)
}


@dataclass(frozen=True)
class Case:
    """One measured run and the profile that stands for its hardware. prefix: file of its prefix
    blocks."""

    folder: str
    label: str
    profile: str
    prefix: str


CASES = (
    Case("RTX4090__Llama-3.1-8B", "RTX 4090, Llama-3.1-8B", "llama-3.1-8b@rtx4090", "llama-3.1-8b"),
    Case(
        "RTXPRO6000__Llama-3.1-8B",
        "RTX PRO 6000, Llama-3.1-8B",
        "llama-3.1-8b@rtxpro6000",
        "llama-3.1-8b",
    ),
    Case(
        "RTXPRO6000__Qwen3-32B",
        "RTX PRO 6000, Qwen3-32B TP2",
        "qwen3-32b@rtxpro6000:tp2",
        "qwen3-32b",
    ),
    Case(
        "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507",
        "RTX PRO 6000, Qwen3-30B-A3B DP2xEP2",
        "qwen3-30b-a3b@rtxpro6000/ep2",
        "qwen3-30b-a3b",
    ),
)


@dataclass(frozen=True)
class MeasuredRun:
    """requests, series: as in the files; meta: engine arguments; prefix: block ids of each
    prompt."""

    case: Case
    requests: pd.DataFrame
    series: pd.DataFrame
    meta: dict
    prefix: list[list[int]]
    peer: dict[str, dict[str, float]]

    @property
    def arguments(self) -> dict:
        return self.meta["engine_kwargs"]

    @property
    def num_blocks(self) -> int | None:
        """Blocks that the engine allocated, less the one that vLLM keeps as a placeholder; None:
        not recorded."""
        blocks = (self.meta.get("kv_cache") or {}).get("num_gpu_blocks")
        return None if blocks is None else blocks - 1

    @property
    def samples(self) -> dict[str, np.ndarray]:
        """float64[requests], seconds: TTFT and E2E from when the engine queued the request."""
        r = self.requests
        return latencies(r.queued_s, r.first_token_s, r.last_token_s, r.output_toks)


def latencies(queued, first, last, output) -> dict[str, np.ndarray]:
    queued, first, last, output = (np.asarray(c, np.float64) for c in (queued, first, last, output))
    return {"TTFT": first - queued, "TPOT": (last - first) / (output - 1), "E2E": last - queued}


def read_run(truth: Path, case: Case) -> MeasuredRun:
    """The files of one run; WorkloadError names the one that is missing."""
    folder = Path(truth) / "vllm_runs" / case.folder
    try:
        requests = pd.read_csv(folder / "requests.csv").sort_values("request_id", ignore_index=True)
        series = pd.read_csv(folder / "timeseries.csv")
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        with gzip.open(folder.parent / f"prefix_blocks_{case.prefix}.json.gz", "rt") as file:
            prefix = json.load(file)
        peer = folder / "owner_sim_vs_vllm.txt"
        errors = _peer_errors(peer.read_text(encoding="utf-8")) if peer.is_file() else {}
    except (OSError, ValueError) as error:
        raise WorkloadError(
            f"{folder}: cannot be read ({error}); name the folder that holds vllm_runs/"
        ) from None
    return MeasuredRun(case, requests, series, meta, prefix, errors)


def _peer_errors(text: str) -> dict[str, dict[str, float]]:
    """Relative errors of LLMServingSim 2 on the run, from its own comparison."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 5 and words[4].endswith("%"):
            metric = {"Latency": "E2E"}.get(words[0], words[0])
            name = {"Mean": "mean", "Median": "p50"}.get(words[1], words[1].lower())
            found.setdefault(metric, {})[name] = float(words[4].rstrip("%")) / 100
    return found


def workload(run: MeasuredRun) -> Workload:
    """The run's requests at their real arrival times, with its prefix blocks; a prompt's open last
    block is its own."""
    prompts = run.requests.input_toks.to_numpy()
    ids: list[int] = []
    offsets, own = [0], 1 + max((max(blocks, default=0) for blocks in run.prefix), default=0)
    for prompt, blocks in zip(prompts.tolist(), run.prefix, strict=True):
        full = blocks[: prompt // BLOCK_TOKENS]
        rest = -(-prompt // BLOCK_TOKENS) - len(full)
        ids += [*full, *range(own, own + rest)]
        own += rest
        offsets.append(len(ids))
    dense = np.unique(np.array(ids), return_inverse=True)[1].astype(np.int64)
    arrival = run.requests.arrival_s.to_numpy()
    return Workload.build(
        arrival - arrival.min(),
        prompts,
        run.requests.output_toks.to_numpy(),
        prefix=PrefixBlocks(dense, np.array(offsets), BLOCK_TOKENS),
        ids=[str(i) for i in run.requests.request_id],
        provenance=Provenance(run.case.folder),
    )


def profile_of(run: MeasuredRun, form: str | None = None) -> Profile:
    """The shipped profile of the run's hardware; form "roofline": the one derived from specs
    instead, with the run's ranks."""
    shipped = load_profile(run.case.profile)
    if form != "roofline":
        return shipped
    given = run.arguments
    ranks = given["data_parallel_size"], given["enable_expert_parallel"]
    return derive_profile(
        shipped.llm,
        shipped.gpu,
        shipped.tp,
        *ranks,
        engine_version=run.meta.get("vllm_version"),
        max_num_batched_tokens=given.get("max_num_batched_tokens"),
        max_num_seqs=given.get("max_num_seqs"),
    )


def blocks_of(run: MeasuredRun, profile: Profile) -> int:
    """KV blocks of a replica: the engine's own number if recorded, else the profile's."""
    return run.num_blocks or profile.num_gpu_blocks


def model_of(run: MeasuredRun, profile: Profile) -> StepTimeModel:
    """The profile's step times under the run's batch limit."""
    return profile.model(run.arguments["max_num_seqs"])


def lockstep() -> BackendOf:
    """Makes the backends of one simulation whose replicas are expert-parallel ranks, whatever their
    profile says: its tables are of one of two."""
    group = RankGroup("the measured ranks")

    def backend(inputs: Inputs, spec, policy, ledger: KvLedger) -> SimulatedBackend:
        hardware = inputs.hardware
        rank = LockstepBackend(
            ledger.table,
            SharedExperts(hardware.model, whole=True),
            PcieLink(hardware.profile.pcie_bytes_per_s),
            hardware.limits,
            layers=hardware.profile.llm.layers,
            fast=False,
        )
        rank.join(group)
        return rank

    return backend


def simulate(run: MeasuredRun, profile: Profile, policy: str = "vllm") -> RunRows:
    """The run under policy `vllm` (with options, where given), asynchronous scheduling and prefix
    caching as in the measured engine."""
    given = run.arguments
    blocks = blocks_of(run, profile)
    config = SimulationConfig(
        policy=(policy,),
        trace=run.case.folder,
        profile=profile.name,
        replicas=given["data_parallel_size"],
        async_scheduling=True,
        slo="none",
    )
    limits = EngineLimits(
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_model_len=min(
            given["max_model_len"] or profile.llm.max_positions, blocks * BLOCK_TOKENS
        ),
        kv_bytes_per_token=int(profile.kv_bytes_per_token),
    )
    hardware = Hardware(profile, model_of(run, profile), limits, blocks, 0, BLOCK_TOKENS)
    spec = parse_policy(policy)
    # of a profile that does not say that its tables are of such ranks
    ranks = given["enable_expert_parallel"] and config.replicas > 1 and profile.dp == 1
    simulation = Simulation(
        Inputs(config, workload(run), hardware, (spec,), ()),
        spec,
        backend=lockstep() if ranks else None,
    )
    simulation.run()
    return simulation.rows()


def simulated_samples(rows: RunRows) -> dict[str, np.ndarray]:
    """As MeasuredRun.samples, by request id.

    The engine queues what arrived when its loop comes round: at the start of a step. So a request's
    time starts with the first step that starts at or after its arrival, in the simulation as in the
    measurement.
    """
    requests = rows.requests.assign(number=rows.requests.request_id.astype(int)).sort_values(
        "number"
    )
    starts = {
        replica: np.sort(steps.start_s.to_numpy())
        for replica, steps in rows.steps.groupby("replica")
    }
    queued = []
    for arrival, replica in zip(requests.arrival_s, requests.replica, strict=True):
        steps = starts[replica]
        queued.append(steps[min(np.searchsorted(steps, arrival), len(steps) - 1)])
    return latencies(queued, requests.first_token_s, requests.last_token_s, requests.output_tokens)


def errors(real: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> pd.DataFrame:
    """metric, statistic, real_s, ours_s, error (relative), in the order of reading."""
    rows = [
        (metric, name, float(of(real[metric])), float(of(ours[metric])))
        for metric in real
        for name, of in STATISTICS.items()
    ]
    table = pd.DataFrame(rows, columns=["metric", "statistic", "real_s", "ours_s"])
    return table.assign(error=table.ours_s / table.real_s - 1.0)
