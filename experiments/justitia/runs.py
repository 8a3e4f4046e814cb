"""Runs of Justitia's evaluation (Yang et al., Sec. III-A and V): one point in, plain rows out.

A point says what differs from the paper's setting: the workload's sizes and shapes, the pool of KV
blocks, the arrival rate, seats and so on. Figures and the search for causes (main.py,
causes.py) are made of the same points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from twinserve.policies.justitia.clock import fluid_finish_times
from twinserve.policies.parts.predictors import kv_token_time
from twinserve.policies.registry import parse_policy
from twinserve.sim.results.metrics_jobs import fair_ratio, job_completion, summarise_fair_ratio
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation, run_policy, run_simulation
from twinserve.traces.apps.classes import CLASSES, Sample, training_samples
from twinserve.traces.apps.generate import applications, load
from twinserve.traces.transform import scale_rate
from twinserve.traces.workload import Workload

LLAMA_7B, LLAMA_13B = "llama-7b@a100-pcie-40g", "llama-13b@v100-16g:tp4"
PAPER_BLOCKS = 459  # the only pool that the paper names (Fig. 3): LLaMA2-7B on one A100
QUANTILES = tuple(range(0, 101, 5))
_SIZE = {c.kind: c.size for c in CLASSES}


# -- workloads -------------------------------------------------------------------------------------
def resized(factors: Mapping[str, float]):
    """A reshaping: as many requests a stage times the factor of the application's size (small,
    medium, large), at least one. Below 1 the last ones are left out, above 1 they are repeated."""

    def reshape(sample: Sample) -> Sample:
        factor = factors.get(_SIZE[sample.kind], 1.0)
        stages = (
            [stage[i % len(stage)] for i in range(max(1, round(len(stage) * factor)))]
            for stage in sample.stages
        )
        return Sample(sample.kind, sample.text, tuple(map(tuple, stages)))

    return reshape


def size_of(kind: str) -> str:
    """small, medium or large: of a class of applications."""
    return _SIZE[kind]


def narrow(sample: Sample) -> Sample:
    """The same requests one after another."""
    return Sample(sample.kind, sample.text, tuple((request,) for request in sample.requests))


def wide(sample: Sample) -> Sample:
    """The same requests all at once."""
    return Sample(sample.kind, sample.text, (tuple(sample.requests),))


SHAPES = {"narrow": narrow, "wide": wide}


def _reshape(sizes: Mapping[str, float] | None, shape: str | None):
    if shape is not None:
        return SHAPES[shape]
    return None if sizes is None else resized(sizes)


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


# -- Fig. 8, 9, 10, 12, Table II, causes -----------------------------------------------------------
def compare(
    policies: Sequence[str],
    seed: int,
    trace: str = "apps:2x",
    profile: str = LLAMA_7B,
    fair: str = "vtc",
    sizes: Mapping[str, float] | None = None,
    shape: str | None = None,
    rate_scale: float = 1.0,
    count: int = 300,
    offline: bool = False,
    scaled: Mapping[str, float] | None = None,
    **settings,
) -> list[dict]:
    """Every policy over one application workload; a row each.

    sizes, shape  see `resized` and `SHAPES`; settings  of the run: num_blocks, max_num_seqs, ..
    scaled        factors on parts of the profile's step times, see `Profile.scaled`
    Columns: mean_s, p90_s, worst_s (JCT); late_s, from the last arrival to the last end; load, the
    demand over memory x window at the engine's mean iteration; not_delayed (share) and worst, of
    the ratios JCT / JCT under `fair`, whose quantiles are ratio_0 .. ratio_100; late_gps_s, the
    most that an application ends after its end in GPS, and within_gps, the share of those that do
    not (`fluid_ends`); swaps, and swapped_tokens over PCIe both ways; replica, whether arrivals are
    those of the embedded replica.
    """
    workload = load(trace, seed=seed, count=count, offline=offline, reshape=_reshape(sizes, shape))
    if rate_scale != 1.0:
        workload = scale_rate(workload, rate_scale)
    inputs = inputs_of(workload, policies, seed, profile, settings)
    if scaled is not None:
        hardware, slowed = inputs.hardware, inputs.hardware.profile.scaled(**scaled)
        hardware = replace(
            hardware, profile=slowed, model=slowed.model(hardware.limits.max_num_seqs)
        )
        inputs = replace(inputs, hardware=hardware)
    done = {spec.label: run_policy(inputs, spec).rows for spec in inputs.policies}
    cost = sum(map(kv_token_time, workload.prompt_tokens.tolist(), workload.output_tokens.tolist()))
    number = {name: i for i, name in enumerate(workload.group_names)}
    found = []
    for label, rows in done.items():
        jobs = job_completion(rows.requests)
        jct = jobs["jct_s"].to_numpy()
        end = float(rows.requests["last_token_s"].max())
        ratios = fair_ratio(rows, done[fair])
        said = summarise_fair_ratio(ratios)
        steps = end / len(rows.steps)
        fluid = fluid_ends(workload, rows.steps["end_s"].to_numpy(), inputs.hardware.kv_tokens)
        behind = jobs["end_s"].to_numpy() - fluid[[number[name] for name in jobs.index]]
        found.append(
            {
                "policy": label,
                "mean_s": float(jct.mean()),
                "p90_s": float(np.percentile(jct, 90)),
                "worst_s": float(jct.max()),
                "late_s": end - workload.last_arrival_s,
                "load": cost / inputs.hardware.kv_tokens * steps / workload.span_s,
                "not_delayed": said["not_delayed"],
                "worst": said["max_fair_ratio"],
                "late_gps_s": float(behind.max()),
                "within_gps": float((behind <= 0).mean()),
                "replica": workload.provenance.replica,
            }
            | {f"ratio_{q}": float(np.percentile(ratios["fair_ratio"], q)) for q in QUANTILES}
        )
    return found


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
