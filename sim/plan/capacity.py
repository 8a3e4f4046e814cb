"""How much hardware online requests need, and how much offline work fits beside them, found by
simulation.

Source: Wang et al., "Echo: Efficient Co-Scheduling of Hybrid Online-Offline Tasks for Large
Language Model Serving", Sec. 5.4: step 1 enumerates resources from the smallest to the largest over
the peak's few minutes until the online objectives are met; step 2 simulates a longer time, as a
day, with both loads on what was found. Sec. 5.3's prediction of online memory is held against what
happened. Any policy will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from twinserve.errors import worded
from twinserve.policies.registry import PolicySpec, parse_policy
from twinserve.policies.requests import State
from twinserve.profiles.names import ProfileName
from twinserve.profiles.specs import ProfileError
from twinserve.sim.results.files import RunResult, RunRows
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.transform import check_fits, merge, with_pool
from twinserve.traces.transform import window as cut
from twinserve.traces.workload import (
    BEST_EFFORT,
    REAL_TIME,
    BestEffortPool,
    Workload,
    WorkloadError,
)

Size = Callable[[SimulationConfig], Any]

PEAK_S = 300.0  # "e.g., 5 minutes"
ATTAINMENT = 0.9


# -- step 1 ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trial:
    """One of the resources that were tried.

    attained  share of online requests within all of their objectives; None where nothing could be
              run
    refused   why not: memory for less than the weights, or for less than the longest request
    """

    config: SimulationConfig
    attained: float | None
    refused: str = ""


@dataclass(frozen=True)
class SmallestResources:
    """peak_s: (start, end) of the window, seconds of the trace. trials: from the smallest, up to
    the one that was enough. config: that one; None if even the largest is not enough."""

    peak_s: tuple[float, float]
    trials: tuple[Trial, ...]
    config: SimulationConfig | None


def size_of(config: SimulationConfig) -> tuple[int, int, int, int]:
    """What makes resources larger, the first difference counts: GPUs, KV tokens of all replicas,
    token budget, seats.

    GPUs of different kinds compare by number. KV memory is that of the default seats and budget:
    fewer seats leave more of it, which is no larger a resource. Raises ProfileError where the model
    does not fit, SettingsError for a fleet file.
    """
    _check_alike(config)
    alike = config.model_copy(update={"max_num_batched_tokens": None, "max_num_seqs": None})
    hardware = resolve_hardware(alike)
    limits, n = hardware.limits, config.replicas
    return (
        n * hardware.profile.tp,
        n * hardware.kv_tokens,
        config.max_num_batched_tokens or limits.max_num_batched_tokens,
        config.max_num_seqs or limits.max_num_seqs,
    )


def peak_window(online: Workload, seconds: float = PEAK_S) -> tuple[float, float]:
    """(start, end) of the `seconds` in which most prompt and output tokens arrive; the earliest,
    where several do. The whole trace, if it is shorter. Later stages of sessions come when they
    come, and do not count.

    Raises SettingsError where `seconds` is not above 0 and finite, WorkloadError where no request
    has an arrival time.
    """
    if not 0 < seconds < np.inf:
        raise SettingsError(f"a peak of {seconds} s is empty: give a number of seconds above 0")
    known = ~np.isnan(online.arrival_s)
    at = online.arrival_s[known]
    tokens = (online.prompt_tokens + online.output_tokens)[known]
    if not len(at):
        raise WorkloadError(
            f"{online.provenance.name}: no request has an arrival time, so there is no peak"
        )
    total = np.concatenate([[0], np.cumsum(tokens)])
    arriving = total[np.searchsorted(at, at + seconds, side="left")] - total[:-1]
    start = float(at[int(arriving.argmax())])
    return start, start + seconds


def smallest_resources(
    online: Workload,
    candidates: Sequence[SimulationConfig],
    *,
    attainment: float = ATTAINMENT,
    peak_s: float = PEAK_S,
    size: Size = size_of,
) -> SmallestResources:
    """Step 1: the smallest of `candidates` on which `attainment` of the online requests keep their
    objectives.

    online      real-time requests with objectives (`transform.set_slo`)
    candidates  settings of the hardware (profile, replicas, num_blocks, max_num_batched_tokens,
                ...) and the policy; what they say of a trace is not looked at
    peak_s      seconds around the peak that are simulated, from an empty engine
    size        what to order candidates by; any price will do

    Raises SettingsError or WorkloadError for what cannot be asked, ProfileError where no candidate
    can hold the model.
    """
    _check_online(online)
    if not 0 < attainment <= 1:
        raise SettingsError(
            f"an attainment of {attainment} is no share: give a number above 0, up to 1"
        )
    if not candidates:
        raise SettingsError("there are no resources to choose from: give candidates")
    window = peak_window(online, peak_s)
    load = cut(online, *window)
    refused, possible = [], []
    for config in candidates:
        try:
            possible.append((size(config), config))
        except ProfileError as error:
            refused.append(Trial(config, None, worded(error)))
    if not possible:
        raise ProfileError(refused[0].refused)
    trials = refused
    for _, config in sorted(possible, key=lambda one: one[0]):
        trial = _try(load, config)
        trials.append(trial)
        if trial.attained is not None and trial.attained >= attainment:
            return SmallestResources(window, tuple(trials), config)
    return SmallestResources(window, tuple(trials), None)


def _try(load: Workload, config: SimulationConfig) -> Trial:
    try:
        inputs = _inputs(config, load)
    except WorkloadError as error:
        return Trial(config, None, worded(error))
    return Trial(config, _attained(run_simulation(Simulation(inputs, inputs.policies[0]))))


def gpu_ladder(
    model: str,
    gpu: str,
    *,
    tp: Sequence[int] = (1, 2, 4, 8),
    replicas: Sequence[int] = (1, 2, 4, 8),
    **settings,
) -> list[SimulationConfig]:
    """Candidates: a model on every one of `tp` GPUs a replica times `replicas`. settings: as of
    SimulationConfig.

    Raises SettingsError where `tp` or `replicas` hold no whole numbers above 0.
    """
    for name, counts in (("tp", tp), ("replicas", replicas)):
        for n in counts:
            if not isinstance(n, Integral) or n < 1:
                raise SettingsError(f"{name} of {n} is no count: give whole numbers above 0")
    return [
        SimulationConfig(profile=str(ProfileName(model, gpu, ranks)), replicas=n, **settings)
        for ranks in tp
        for n in replicas
    ]


# -- step 2 ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OfflineThroughput:
    """What fits beside the online load.

    window_s            seconds from the first to the last online arrival; what ends in them counts
    requests_per_s      offline requests
    tokens_per_s        their prompt (found in the cache or computed) and output tokens
    output_tokens_per_s
    attained            share of online requests within all of their objectives, with the offline
                        load beside them
    exhausted_s         when the last offline request ended, if that is within the window: the
                        hardware had room for more, and the rates are too low. None: there was
                        offline work to the end
    memory              the prediction of online memory against what was held; None where the run is
                        shorter than its history
    """

    window_s: float
    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float
    attained: float
    exhausted_s: float | None
    memory: MemoryPrediction | None
    result: RunResult


def offline_throughput(
    online: Workload,
    offline: Workload | BestEffortPool,
    config: SimulationConfig,
    *,
    sigmas: float = 2.0,
    history_s: float = 3600.0,
    ahead_s: float = 60.0,
) -> OfflineThroughput:
    """Step 2: the offline throughput on given resources, over all the time in which online requests
    arrive.

    offline  best-effort requests, enough of them for the whole time; or a closed loop, which never
             ends

    sigmas, history_s and ahead_s are those of `memory_prediction`. Raises SettingsError or
    WorkloadError.
    """
    _check_online(online)
    _samples(sigmas, history_s, 1.0, ahead_s)
    if isinstance(offline, BestEffortPool):
        both = with_pool(online, offline)
    elif not len(offline) or (offline.service_class != BEST_EFFORT).any():
        raise WorkloadError(
            f"{offline.provenance.name}: offline requests are those of class be "
            "(transform.set_class)"
        )
    else:
        both = merge(online, offline)
    if not online.span_s:
        raise WorkloadError(
            f"{online.provenance.name}: all online requests arrive at once: they have no rate"
        )
    inputs = _inputs(config, both)
    last_come = np.nextafter(online.last_arrival_s, np.inf)
    result = run_simulation(WhileOnline(inputs, inputs.policies[0], first_s=last_come))
    be, requests = result.summary["classes"]["be"], result.rows.requests
    mine = requests[requests.service_class == "be"]
    last = float(mine.last_token_s.max())
    ended = bool(mine.finished.all()) and last < online.last_arrival_s and both.pool is None
    enough = float(result.rows.steps.end_s.max()) >= history_s + ahead_s
    return OfflineThroughput(
        window_s=be["window_s"],
        requests_per_s=be["window_request_throughput"],
        tokens_per_s=be["window_total_token_throughput"],
        output_tokens_per_s=be["window_output_throughput"],
        attained=_attained(result),
        exhausted_s=last if ended else None,
        memory=memory_prediction(result.rows, sigmas=sigmas, history_s=history_s, ahead_s=ahead_s)
        if enough
        else None,
        result=result,
    )


class WhileOnline(Simulation):
    """Ends when the online requests have: what offline work is left then is not waited for.

    slice_s  it is looked after every so many seconds whether they have
    first_s  when it is looked first, seconds of the run; by default after one slice
    watch    called with the run after each slice
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        slice_s: float = 5.0,
        first_s: float | None = None,
        watch: Callable[[Simulation], None] = lambda run: None,
    ) -> None:
        super().__init__(inputs, spec)
        self._slice_s, self._first_s = slice_s, slice_s if first_s is None else first_s
        self._watch = watch
        self._online = int((inputs.workload.service_class == REAL_TIME).sum())

    def _advance(self) -> None:
        until = self._first_s
        while self._online_left():
            if self.clock.peek() == np.inf:
                self.clock.run()  # nothing more will happen: says which process waits for what
                return
            self.clock.run(until)
            self._watch(self)
            until += self._slice_s

    def _online_left(self) -> bool:
        ended = 0
        for engine in self.engines:
            requests = engine.core.requests
            finished = requests.state == int(State.FINISHED)
            ended += int(np.count_nonzero(finished & (requests.service_class == REAL_TIME)))
        return ended < self._online


# -- memory (Sec. 5.3) -----------------------------------------------------------------------------
@dataclass(frozen=True)
class MemoryPrediction:
    """The prediction of online KV memory against what was held `ahead_s` later, second by second,
    of all replicas.

    samples       how many comparisons
    exceeded      share of them in which more was held than predicted: about 5 % by the paper, with
                  mu + 2 sigma
    over_blocks   mean blocks predicted and not held
    under_blocks  mean blocks held beyond the prediction, of the samples that exceed it; 0 where
                  none does
    held_blocks   mean blocks held
    total_blocks  KV blocks of one replica
    """

    samples: int
    exceeded: float
    over_blocks: float
    under_blocks: float
    held_blocks: float
    total_blocks: int


def memory_prediction(
    rows: RunRows,
    *,
    sigmas: float = 2.0,
    history_s: float = 3600.0,
    sample_s: float = 1.0,
    ahead_s: float = 60.0,
) -> MemoryPrediction:
    """Predict what online requests will hold from what they held in the last `history_s` seconds,
    and look `ahead_s` later.

    The prediction is mu + sigmas * sigma of samples taken every `sample_s` seconds, in whole
    blocks, as the threshold of policy `echo` has it. Raises SettingsError for what cannot be asked,
    and where no full history has a later sample.
    """
    both = [
        predicted_memory(of, sigmas, history_s, sample_s, ahead_s)
        for _, of in rows.steps.groupby("replica")
    ]
    predicted = np.concatenate([np.zeros(0, np.int64), *(p for p, _ in both)])
    held = np.concatenate([np.zeros(0, np.int64), *(h for _, h in both)])
    if not len(held):
        raise SettingsError(
            f"the run is shorter than {history_s + ahead_s:g} s: give a shorter history, or "
            "simulate for longer"
        )
    beyond = held - predicted
    exceeds = beyond > 0
    return MemoryPrediction(
        samples=len(held),
        exceeded=float(exceeds.mean()),
        over_blocks=float(np.maximum(-beyond, 0).mean()),
        under_blocks=float(beyond[exceeds].mean()) if exceeds.any() else 0.0,
        held_blocks=float(held.mean()),
        total_blocks=rows.kv_total_blocks,
    )


def predicted_memory(
    steps: pd.DataFrame, sigmas: float, history_s: float, sample_s: float, ahead_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] blocks predicted, int64[n] blocks held `ahead_s` later) of one replica's steps, for
    every sample that has a full history before it; n is 0 in a run that is too short."""
    window, ahead = _samples(sigmas, history_s, sample_s, ahead_s)
    held = _held(steps, sample_s)
    if len(held) < window + ahead:
        return held[:0], held[:0]
    # Sums of whole numbers are exact; around the mean their squares stay small.
    middle = int(held.mean())
    around = held - middle
    sums, squares = (np.concatenate([[0], np.cumsum(v)]) for v in (around, around * around))
    s, q = sums[window:] - sums[:-window], squares[window:] - squares[:-window]
    deviation = np.sqrt(window * q - s * s) / window
    predicted = np.ceil((s + window * middle) / window + sigmas * deviation).astype(np.int64)
    later = held[window - 1 + ahead :]
    return predicted[: len(later)], later


def _samples(sigmas: float, history_s: float, sample_s: float, ahead_s: float) -> tuple[int, int]:
    """How many samples a history has, and how many it is looked ahead. Raises SettingsError where
    that makes no sense."""
    if not 0 <= sigmas < np.inf:
        raise SettingsError(
            f"sigmas of {sigmas} are no distance above the mean: give a number, 0 or more"
        )
    for name, seconds in (("history_s", history_s), ("sample_s", sample_s), ("ahead_s", ahead_s)):
        if not 0 < seconds < np.inf:
            raise SettingsError(f"{name} of {seconds} is no time: give a number of seconds above 0")
    if not max(history_s, ahead_s) / sample_s < 1e9:
        raise SettingsError(
            f"sample_s of {sample_s} is too short for {history_s} s of history: give more"
        )
    window, ahead = round(history_s / sample_s), round(ahead_s / sample_s)
    if window < 1 or ahead < 1:
        raise SettingsError(
            f"a history of {history_s} s and a look {ahead_s} s ahead are below {sample_s} s, "
            "one sample"
        )
    return window, ahead


def _held(steps: pd.DataFrame, sample_s: float) -> np.ndarray:
    """int64[n]: blocks that online requests hold at 0, sample_s, ...; none while no step runs."""
    start, end = steps.start_s.to_numpy(np.float64), steps.end_s.to_numpy(np.float64)
    at = np.arange(0.0, float(end[-1]), sample_s)
    step = np.searchsorted(start, at, side="right") - 1
    runs = (step >= 0) & (at < end[step])
    return np.where(runs, steps.kv_rt_blocks.to_numpy(np.int64)[step], 0)


# -- both ------------------------------------------------------------------------------------------
def _inputs(config: SimulationConfig, workload: Workload) -> Inputs:
    """Of one policy. Raises WorkloadError where a request is longer than the memory."""
    _check_alike(config)
    if len(config.policy) != 1:
        raise SettingsError(
            f"one policy decides: {', '.join(config.policy)} are {len(config.policy)}"
        )
    hardware = resolve_hardware(config)
    check_fits(workload, hardware.limits.max_model_len)
    spec = parse_policy(config.policy[0])
    untrained = (
        f"{spec.label}: its predictor of output lengths learns from requests that end, as there "
        "are no others to train it on",
    )
    notices = untrained if spec.given.wants_sample else ()
    return Inputs(config, workload, hardware, (spec,), notices)


def _check_alike(config: SimulationConfig) -> None:
    if config.fleet is not None:
        raise SettingsError(
            "--fleet: resources are replicas of one kind here; give profile and replicas instead"
        )


def _check_online(online: Workload) -> None:
    name = online.provenance.name
    if not len(online) or (online.service_class != REAL_TIME).any():
        raise WorkloadError(
            f"{name}: online requests are those of class rt, at least one (transform.set_class)"
        )
    if np.isnan(online.slo_ttft_s).all() and np.isnan(online.slo_tpot_s).all():
        raise WorkloadError(
            f"{name}: no online request has an objective: set them with transform.set_slo"
        )


def _attained(result: RunResult) -> float:
    return result.summary["classes"]["rt"]["slo_attainment"]
