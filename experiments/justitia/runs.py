"""Runs of Justitia's evaluation (Yang et al., Sec. III-A and V): one point in, plain rows out.

A point says what differs from the paper's setting: the workload's sizes and shapes, the pool of KV
blocks, the arrival rate, seats and so on.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from twinserve.policies.justitia.clock import fluid_finish_times
from twinserve.policies.parts.predictors import kv_token_time
from twinserve.policies.registry import parse_policy
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_jobs import fair_ratio, job_completion, summarise_fair_ratio
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation, run_policy, run_simulation
from twinserve.traces.apps.classes import CLASSES, Sample, training_samples
from twinserve.traces.apps.generate import applications, load
from twinserve.traces.workload import Workload

LLAMA_7B, LLAMA_13B = "llama-7b@a100-pcie-40g", "llama-13b@v100-16g:tp4"
PAPER_BLOCKS = 459  # the only pool that the paper names (Fig. 3): LLaMA2-7B on one A100
QUANTILES = tuple(range(0, 101, 5))
SIZE_OF = {c.kind: c.size for c in CLASSES}


# -- workloads -------------------------------------------------------------------------------------
def resized(factors: Mapping[str, float]):
    """A reshaping: as many requests a stage times the factor of the application's size (small,
    medium, large), at least one. Below 1 the last ones are left out, above 1 they are repeated."""

    def reshape(sample: Sample) -> Sample:
        factor = factors.get(SIZE_OF[sample.kind], 1.0)
        stages = (
            [stage[i % len(stage)] for i in range(max(1, round(len(stage) * factor)))]
            for stage in sample.stages
        )
        return Sample(sample.kind, sample.text, tuple(map(tuple, stages)))

    return reshape


def inputs_of(
    workload: Workload, policies: Sequence[str], seed: int, profile: str, settings: Mapping
) -> Inputs:
    config = SimulationConfig(
        policy=tuple(policies),
        trace="apps",
        seed=seed,
        profile=profile,
        slo="none",
        **PAPERS_ENGINE,
        **settings,
    )
    return Inputs(
        config, workload, resolve_hardware(config), tuple(map(parse_policy, policies)), ()
    )


# -- Fig. 8, 9, 10, 12, Table II ------------------------------------------------------------------
def compare(
    policies: Sequence[str],
    seed: int,
    trace: str = "apps:2x",
    profile: str = LLAMA_7B,
    fair: str = "vtc",
    sizes: Mapping[str, float] | None = None,
    count: int = 300,
    offline: bool = False,
    **settings,
) -> list[dict]:
    """Every policy over one application workload; a row each.

    sizes  see `resized`; settings  of the run: num_blocks, max_num_seqs, ..
    Columns: mean_s, p90_s, worst_s (JCT); late_s, from the last arrival to the last end; load, the
    demand over memory x window at the engine's mean iteration; not_delayed (share) and worst, of
    the ratios JCT / JCT under `fair`, whose quantiles are ratio_0 .. ratio_100; late_gps_s, the
    most that an application ends after its end in GPS, and within_gps, the share of those that do
    not (`fluid_ends`); replica, whether arrivals are those of the embedded replica.
    """
    reshape = None if sizes is None else resized(sizes)
    workload = load(trace, seed=seed, count=count, offline=offline, reshape=reshape)
    inputs = inputs_of(workload, policies, seed, profile, settings)
    cost = sum(map(kv_token_time, workload.prompt_tokens.tolist(), workload.output_tokens.tolist()))
    found = []
    for policy, (rows, jobs) in applications_of(inputs, fair).items():
        end = float(rows.requests["last_token_s"].max())
        iterations = cost / inputs.hardware.kv_tokens * (end / len(rows.steps))
        said, jct = summarise_fair_ratio(jobs), jobs.jct_s.to_numpy()
        found.append(
            {
                "policy": policy,
                "mean_s": float(jct.mean()),
                "p90_s": float(np.percentile(jct, 90)),
                "worst_s": float(jct.max()),
                "late_s": end - workload.last_arrival_s,
                "load": iterations / workload.span_s,
                "not_delayed": said["not_delayed"],
                "worst": said["max_fair_ratio"],
                "late_gps_s": float(jobs.behind_s.max()),
                "within_gps": float((jobs.behind_s <= 0).mean()),
                "replica": workload.provenance.replica,
            }
            | {f"ratio_{q}": float(np.percentile(jobs.fair_ratio, q)) for q in QUANTILES}
        )
    return found


def applications_of(inputs: Inputs, fair: str) -> dict[str, tuple[RunRows, pd.DataFrame]]:
    """policy -> the rows of its run, and a row for each application: jct_s, end_s, fair_ratio and
    behind_s. `fair_ratio` is to the run of policy `fair`; `behind_s` is how much later than in GPS
    it ends."""
    done = {spec.label: run_policy(inputs, spec).rows for spec in inputs.policies}
    names = pd.Index(inputs.workload.group_names)
    found = {}
    for policy, rows in done.items():
        jobs = job_completion(rows.requests)
        fluid = fluid_ends(
            inputs.workload, rows.steps["end_s"].to_numpy(), inputs.hardware.kv_tokens
        )
        behind_s = jobs.end_s - fluid[names.get_indexer(jobs.index)]
        ratios = fair_ratio(rows, done[fair])
        found[policy] = rows, jobs.assign(fair_ratio=ratios.fair_ratio, behind_s=behind_s)
    return found


def plain(policy: str) -> str:
    """A policy's label without the choice of its predictor, which is the same for all of a
    figure."""
    name, _, options = policy.partition(":")
    kept = [one for one in options.split(",") if one and not one.startswith("predictor=")]
    return f"{name}:{','.join(kept)}" if kept else name


def fluid_ends(workload: Workload, ends_s: np.ndarray, M: int) -> np.ndarray:
    """float64[applications], seconds: when GPS ends each, by number. Arguments: `fluid_iterations`;
    beyond the last iteration one takes their mean."""
    _, ends = fluid_iterations(workload, ends_s, M)
    return np.array([seconds_at(end, ends_s) for end in ends])


def fluid_iterations(
    workload: Workload, ends_s: np.ndarray, M: int
) -> tuple[np.ndarray, np.ndarray]:
    """(demands in token-iterations, iterations of the engine after which GPS ends each
    application), float64[applications] each, by number.

    ends_s  float64[steps], ends of the engine's iterations: in each of them GPS serves M
            token-iterations
    M       KV tokens of the device
    """
    group = workload.group
    costs = map(kv_token_time, workload.prompt_tokens.tolist(), workload.output_tokens.tolist())
    demands = np.bincount(group, np.fromiter(costs, float))
    first = np.full(len(demands), np.inf)
    np.fmin.at(first, group, workload.arrival_s)
    begun = np.searchsorted(ends_s, first, side="right").astype(float)
    order = np.argsort(begun, kind="stable")
    ends = np.empty(len(demands))
    ends[order] = fluid_finish_times(begun[order].tolist(), demands[order].tolist(), M)
    return demands, ends


def seconds_at(iterations: float, ends_s: np.ndarray) -> float:
    """When so many iterations of the engine had ended; for `ends_s` see `fluid_ends`."""
    steps, whole = len(ends_s), int(np.ceil(iterations))
    return float(ends_s[max(whole, 1) - 1] if whole <= steps else ends_s[-1] * iterations / steps)


# -- Fig. 3 ----------------------------------------------------------------------------------------
def two_mergers(
    policy: str, seed: int, size: float = 1.0, samples: int = 200, num_blocks: int = PAPER_BLOCKS
) -> list[dict]:
    """Two document mergers at once. Rows of blocks over time: t_s, blocks of the first (that ends
    first) and of the second, and in every row jct_first_s, jct_second_s.

    size  of the mergers: requests of each stage, times this
    """
    workload = applications(np.zeros(2), seed, ["DM", "DM"], resized({"large": size}))
    inputs = inputs_of(workload, [policy], seed, LLAMA_7B, {"num_blocks": num_blocks})
    simulation = Simulation(inputs, inputs.policies[0])
    series = _watched(simulation)
    rows = run_simulation(simulation).rows
    jct = job_completion(rows.requests)["jct_s"]
    order = np.argsort([jct[name] for name in workload.group_names], kind="stable")
    first, second = (float(jct[workload.group_names[i]]) for i in order)
    keep = np.unique(np.linspace(0, len(series) - 1, min(samples, len(series))).round().astype(int))
    return [
        {"t_s": series[i][0], "first": series[i][1][order[0]], "second": series[i][1][order[1]]}
        | {"jct_first_s": first, "jct_second_s": second}
        for i in keep.tolist()
    ]


def _watched(simulation: Simulation) -> list[tuple[float, tuple[int, int]]]:
    """(seconds, KV blocks of application 0 and 1) after each plan of a run that has not begun."""
    policy, series = simulation.engines[0].core.policy, []
    planned = policy.plan

    def plan(view, ledger):
        found = planned(view, ledger)
        held = [0, 0]
        for row in policy.running:
            held[int(view.requests.group[row])] += ledger.held_blocks(row)
        series.append((view.now, tuple(held)))
        return found

    policy.plan = plan
    return series


# -- Fig. 4 ----------------------------------------------------------------------------------------
def lengths(
    kind: str, edges: Mapping[str, Sequence[float]], seed: int, trials: int = 100
) -> list[dict]:
    """Prompt and output lengths of the first stage's requests in `trials` runs of a class: a row a
    bucket, with its share.

    edges  of the buckets of "prompt" and "output", tokens; the outer ones take what is beyond them
    """
    requests = np.array(
        [r for sample in training_samples(kind, trials, seed) for r in sample.stages[0]]
    )
    found = []
    for column, what in enumerate(("prompt", "output")):
        values, bounds = requests[:, column], np.asarray(edges[what], float)
        counts = np.histogram(np.clip(values, bounds[0], bounds[-1]), bounds)[0]
        for low, high, n in zip(
            bounds[:-1].tolist(), bounds[1:].tolist(), counts.tolist(), strict=True
        ):
            row = {"what": what, "low": low, "high": high, "share": n / len(values)}
            found.append(
                row
                | {
                    "least": int(values.min()),
                    "most": int(values.max()),
                    "relative_spread": _spread(values),
                }
            )
    return found


def _spread(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


# -- Fig. 11 --------------------------------------------------------------------------------------
MICE = ("KBQAV", "CC", "ALFWI")


def crowd_of(mice: int, seed: int, sizes: Mapping[str, float]) -> Workload:
    """A summary (MRS) at 0 s and then a small application every second. sizes: see `resized`."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x11CE,)))
    kinds = ["MRS", *(MICE[i] for i in rng.integers(len(MICE), size=mice).tolist())]
    return applications(np.arange(mice + 1.0), seed, kinds, resized(sizes))


def elephant(
    policies: Sequence[str],
    mice: int,
    seed: int,
    num_blocks: int | None = None,
    sizes: Mapping[str, float] | None = None,
) -> list[dict]:
    """A `crowd_of`: a row a policy, with the JCT of the summary (elephant_s), the mean of the small
    ones (mice_s), and of `fair_end` gps_s and bound_s. sizes: see `resized`."""
    workload = crowd_of(mice, seed, sizes or {})
    inputs = inputs_of(workload, policies, seed, LLAMA_7B, {"num_blocks": num_blocks})
    M, found = inputs.hardware.kv_tokens, []
    for spec in inputs.policies:
        rows = run_policy(inputs, spec).rows
        gps_s, bound_s = fair_end(workload, rows.steps["end_s"].to_numpy(), M)
        ends = _elephant_and_mice(workload, rows)
        found.append({"policy": spec.label, **ends, "gps_s": gps_s, "bound_s": bound_s})
    return found


def _elephant_and_mice(workload: Workload, rows: RunRows) -> dict[str, float]:
    jct = job_completion(rows.requests)["jct_s"]
    large = workload.group_names[0]
    return {"elephant_s": float(jct[large]), "mice_s": float(jct.drop(large).mean())}


def fair_end(workload: Workload, ends_s: np.ndarray, M: int) -> tuple[float, float]:
    """Seconds at which GPS ends application 0, which came at 0 s, and the same with bound 2 of
    docs/justitia.md on top. Arguments: `fluid_iterations`.

    Bound 2 is proven for one graph among applications of one stage. The small ones here have
    several.
    """
    demands, ends = fluid_iterations(workload, ends_s, M)
    outputs, mine, gps = workload.output_tokens, workload.group == 0, float(ends[0])
    path = pd.Series(outputs[mine]).groupby(workload.stage[mine]).max()
    bound = gps + path.sum() + demands[0] / M + (len(path) + 1) * outputs.max()
    return seconds_at(gps, ends_s), seconds_at(bound, ends_s)
