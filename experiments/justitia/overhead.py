"""What Justitia's decisions cost (Yang et al., Tables II and III), measured on the machine that
this runs on: training, predictions, and the time that planning takes. Whatever is in seconds of our
own code differs from run to run."""

import time

import numpy as np

from twinserve.experiments.justitia.runs import LLAMA_7B, inputs_of
from twinserve.policies.justitia.queues import RankedQueue
from twinserve.policies.parts import predictors_mlp
from twinserve.policies.parts.predictors import (
    Cost,
    Oracle,
    Predictor,
    kv_token_time,
    make_predictor,
)
from twinserve.policies.requests import Application
from twinserve.sim.results.metrics_jobs import job_completion
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.apps.classes import CLASSES, KINDS, training_samples
from twinserve.traces.apps.generate import SHARES, applications, kinds, load

HELD_OUT = 0x40  # seed of applications that no predictor was trained on


class ClassErrors(Oracle):
    """One factor for all applications of a class, as of a network that is wrong about a class, not
    about each input."""

    def application(self, application: Application, cost: Cost) -> int | None:
        return self._blurred(self._application(application, cost), application.kind)


class SortedQueue(RankedQueue):
    """Sorts all that wait to find the head, at each look, as vLLM 0.x sorts its queues."""

    def peek(self) -> int:
        self._heap = sorted((rank, row) for rank, row in self._heap if row in self._present)
        return self._heap[0][1]


def prediction(
    policy: str,
    seed: int,
    trials: int = 100,
    blocks: int | None = None,
    class_errors: bool = False,
    count: int = 300,
    offline: bool = False,
) -> dict:
    """A predictor, given as a policy's options: predict_ms of one prediction, train_s of all
    classes, and error. `error` is the mean relative error on `trials` held-out applications a
    class, classes weighted as in the mix. All three are nan with trials=0. mean_s and p90_s: JCT of
    `policy` under apps:2x.

    class_errors  the predictor is `perfect` with the noise of `ClassErrors`
    """
    workload = load("apps:2x", seed=seed, count=count, offline=offline)
    inputs = inputs_of(workload, [policy], seed, LLAMA_7B, {"num_blocks": blocks})
    spec = inputs.policies[0]
    make = ClassErrors if class_errors else make_predictor
    error = predict_s = trained_s = float("nan")
    if trials:
        predictor = make(spec.policy.Options(**spec.options))
        if not predictor.needs_truth:
            predictors_mlp.train.cache_clear()
            began = time.perf_counter()
            predictor.prepare(KINDS, kv_token_time)
            trained_s = time.perf_counter() - began
        error, predict_s = _held_out(predictor, seed, trials)
    simulation = Simulation(inputs, spec)
    engine_policy = simulation.engines[0].core.policy
    if class_errors:
        predictor = make(engine_policy.options)
        predictor.truth = engine_policy.predictor.truth
        engine_policy.predictor = predictor
    jct = job_completion(run_simulation(simulation).rows.requests)["jct_s"].to_numpy()
    said = {
        "error": error,
        "predict_ms": 1e3 * predict_s,
        "train_s": trained_s,
        "replica": workload.provenance.replica,
    }
    return said | {"mean_s": float(jct.mean()), "p90_s": float(np.percentile(jct, 90))}


def _held_out(predictor: Predictor, seed: int, trials: int) -> tuple[float, float]:
    """Mean relative error, and seconds a prediction."""
    errors, seconds = [], []
    for number, app in enumerate(CLASSES):
        samples = training_samples(app.kind, trials, HELD_OUT + seed)
        of_class = []
        if predictor.needs_truth:
            predictor.truth = Known([sample.requests for sample in samples])
        for i, sample in enumerate(samples):
            application = Application(i, f"{app.kind}-{number}-{i}", 0.0, app.kind, sample.text)
            began = time.perf_counter()
            said = predictor.application(application, kv_token_time)
            seconds.append(time.perf_counter() - began)
            true = sum(kv_token_time(p, d) for p, d in sample.requests)
            of_class.append(abs(said - true) / true)
        errors.append(float(np.mean(of_class)))
    of_size = [
        SHARES[app.size] / sum(other.size == app.size for other in CLASSES) for app in CLASSES
    ]
    return float(np.average(errors, weights=of_size)), float(np.mean(seconds))


class Known:
    """Truth about listed applications."""

    def __init__(self, requests: list) -> None:
        self._requests = requests

    def application(self, group: int) -> np.ndarray:
        return np.array(self._requests[group])

    def output_tokens(self, request_id: str) -> None:
        return None


def decisions(
    a_minute: float, seed: int, policy: str = "justitia", minutes: float = 3.0, resort: bool = False
) -> dict:
    """Applications of the mix at regular times: plan_ms and plan_p99_ms, wall time of a decision;
    plans, their number. resort: with a `SortedQueue`."""
    count = max(1, round(a_minute * minutes))
    workload = applications(np.arange(count) * 60.0 / a_minute, seed, kinds(count, seed))
    inputs = inputs_of(workload, [policy], seed, LLAMA_7B, {})
    simulation = Simulation(inputs, inputs.policies[0])
    if resort:
        simulation.engines[0].core.policy.waiting = SortedQueue()
    timing = run_simulation(simulation).timing
    return {
        "plan_ms": 1e3 * timing["decision_mean_s"],
        "plan_p99_ms": 1e3 * timing["decision_p99_s"],
        "plans": timing["decisions"],
    }
