"""Measured runs of real engines: read them, simulate them with the run's own arguments, and
compare.

A run is a folder with `requests.csv` (planned and real times of each request on the engine's
clock), `timeseries.csv` (a row a second) and `meta.json` (engine arguments); next to the folders
lie the chained prefix blocks of the request lists.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.backends.links import PcieLink
from twinserve.backends.lockstep import LockstepBackend, RankGroup, SharedExperts
from twinserve.backends.simulated import SimulatedBackend
from twinserve.experiments.study.claims import texts
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.registry import parse_policy
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


CASES = tuple(Case(*row) for row in texts(__file__, "data.yaml").CASES)


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
    names = {"Latency": "E2E", "Mean": "mean", "Median": "p50"}
    for line in text.splitlines():
        words = [names.get(word, word) for word in line.split()]
        if len(words) == 5 and words[4].endswith("%"):
            metric, name = words[0], words[1].lower()
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
    shipped, given = load_profile(run.case.profile), run.arguments
    if form != "roofline":
        return shipped
    ranks = shipped.tp, given["data_parallel_size"], given["enable_expert_parallel"]
    limits = {name: given.get(name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    version = run.meta.get("vllm_version")
    return derive_profile(shipped.llm, shipped.gpu, *ranks, engine_version=version, **limits)


def blocks_of(run: MeasuredRun, profile: Profile) -> int:
    """KV blocks of a replica: the engine's own number if recorded, else the profile's."""
    return run.num_blocks or profile.num_gpu_blocks


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


def simulate(run: MeasuredRun, profile: Profile) -> RunRows:
    """The run under policy `vllm`, asynchronous scheduling and prefix caching as in the measured
    engine."""
    given, blocks = run.arguments, blocks_of(run, profile)
    replicas, spec = given["data_parallel_size"], parse_policy("vllm")
    config = SimulationConfig(
        policy=("vllm",),
        trace=run.case.folder,
        profile=profile.name,
        replicas=replicas,
        async_scheduling=True,
        slo="none",
    )
    longest = given["max_model_len"] or profile.llm.max_positions
    limits = EngineLimits(
        given["max_num_seqs"],
        given["max_num_batched_tokens"],
        min(longest, blocks * BLOCK_TOKENS),
        int(profile.kv_bytes_per_token),
    )
    model = profile.model(limits.max_num_seqs)
    hardware = Hardware(profile, model, limits, blocks, 0, BLOCK_TOKENS)
    inputs = Inputs(config, workload(run), hardware, (spec,), ())
    # of a profile that does not say that its tables are of such ranks
    ranks = given["enable_expert_parallel"] and replicas > 1 and profile.dp == 1
    simulation = Simulation(inputs, spec, backend=lockstep() if ranks else None)
    simulation.run()
    return simulation.rows()


def simulated_samples(rows: RunRows) -> dict[str, np.ndarray]:
    """As MeasuredRun.samples, by request id.

    The engine queues what arrived when its loop comes round: at the start of a step. So a request's
    time starts with the first step that starts at or after its arrival, in the simulation as in the
    measurement.
    """
    r = rows.requests.sort_values("request_id", key=lambda ids: ids.astype(int))
    queued = np.empty(len(r))
    for replica, steps in rows.steps.groupby("replica"):
        mine, starts = r.replica.to_numpy() == replica, np.sort(steps.start_s.to_numpy())
        at = np.searchsorted(starts, r.arrival_s.to_numpy()[mine])
        queued[mine] = starts[np.minimum(at, len(starts) - 1)]
    return latencies(queued, r.first_token_s, r.last_token_s, r.output_tokens)
