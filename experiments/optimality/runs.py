"""What Algorithm 1 of BROS gives up against the exact solution of its problem: on single
iterations, and over short runs.

Iterations are those that a run of `bros` comes to. For each, the batch of Algorithm 1 and the best
one are scored by the goals of `policies.bros.problem`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from twinserve.policies.bros.exact import BrosExactOptions, BrosExactPolicy
from twinserve.policies.bros.parts import Urgent
from twinserve.policies.bros.policy import BrosPolicy
from twinserve.policies.bros.problem import SAME, Solution, enumerate_batches, solution
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import RequestTable
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.profile import load_profile
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy, simulate

PROFILE = "qwen2.5-14b@a100-40g:tp2"  # BROS's
GREEDY = "bros"
# The problem as the project reads it, as printed, and with what Algorithm 1 is after put before
# (1), one by one.
PROBLEMS = {
    "own": "bros-exact",
    "printed": "bros-exact:following=average",
    "rt-first": "bros-exact:rt_first=true",
    "most-requests": "bros-exact:rt_first=true,objective=requests",
}
OPTIONS = {
    "own": BrosExactOptions(),
    "printed": BrosExactOptions(following="average"),
    "rt-first": BrosExactOptions(rt_first=True),
    "most-requests": BrosExactOptions(rt_first=True, objective="requests"),
}
# What stands beside `bros` in runs: the exact ones, and `bros` with prompts in parts, for what
# whole ones cost.
OTHERS = PROBLEMS | {"split prompts": "bros:chunk=256", "fitted chunks": "bros:chunk=fit"}
CAP = 1024  # tokens of a request
MOST = 10  # requests of an iteration

Pair = tuple[int, Solution, Solution]  # requests, Algorithm 1's batch, the best one


# -- single iterations -----------------------------------------------------------------------------
class Watched(BrosPolicy):
    """Algorithm 1, compared with solving every iteration of 2 to 10 requests in each form."""

    name = "bros-watched"

    def setup(self):
        super().setup()
        self.exact = {
            name: BrosExactPolicy(self.limits, options, self.estimator)
            for name, options in OPTIONS.items()
        }
        self.found: dict[str, list[Pair]] = {name: [] for name in OPTIONS}

    def _plainly(self, *_):
        # so that every iteration is chosen; what is plain to see is what is chosen
        return False

    def _stands(self, *_):
        pass  # so that each step is an iteration

    def _choose(self, step, urgent, candidates, size):
        if 2 <= len(urgent.batch) + len(candidates) <= MOST:
            for name, policy in self.exact.items():
                policy.take_average(self.queues.average_iteration_s)
                self.found[name].append(_pair(policy, urgent, candidates, size, step.view.requests))
        return super()._choose(step, urgent, candidates, size)


def iterations_of_a_run(
    seed: int, seconds: float, rate: float, pool: int, slo: str
) -> list[dict[str, Any]]:
    """Rows of `gap_rows` for the iterations of a run of `bros` in which there are 2 to 10
    requests."""
    policies: list[Watched] = []

    class Kept(Watched):
        def setup(self):
            super().setup()
            policies.append(self)

    inputs = resolve(config(seed, seconds, rate, pool, slo, (GREEDY,)))
    run_policy(inputs, PolicySpec(Watched.name, own=Kept))
    (ran,) = policies
    return [row for name, pairs in ran.found.items() for row in gap_rows(name, pairs)]


def _pair(
    policy: BrosExactPolicy, urgent: Urgent, candidates: Batch, size: int, requests: RequestTable
) -> Pair:
    instance = policy.instance(urgent, candidates, size, requests)
    greedy = policy.greedy_batch(urgent, candidates, size)
    return (
        len(instance),
        solution(instance, policy.estimator, greedy),
        enumerate_batches(instance, policy.estimator),
    )


def gap_rows(problem: str, pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """A row for all iterations (requests: 0) and one for each number of requests.

    optimal        share in which Algorithm 1's batch is as good as the best in every goal
    outside        share in which its batch keeps no deadline and takes longer than the problem
                   allows; not compared
    loses_more     share in which it loses more deadlines; extra_lost: deadlines lost more, an
                   iteration
    other_goal     share in which it loses as many, but misses a later goal before (1)
    compared       share of the rest whose best batch has best-effort requests: those that the gaps
                   are of
    gap_*          1 - its best-effort tokens a second over the best batch's
    """
    pairs = list(pairs)
    rows = []
    for n in (0, *sorted({n for n, _, _ in pairs})):
        chosen = [(ours, best) for size, ours, best in pairs if n in (0, size)]
        inside = [(ours, best) for ours, best in chosen if ours.feasible]
        same = [(ours, best) for ours, best in inside if ours.goals == best.goals]
        gaps = np.array([1.0 - ours.rate / best.rate for ours, best in same if best.rate > 0])
        gaps = np.where(np.abs(gaps) <= SAME, 0.0, gaps)
        total = len(chosen)
        rows.append(
            {
                "problem": problem,
                "requests": n,
                "iterations": total,
                "optimal": (len(same) - np.count_nonzero(gaps)) / total,
                "outside": 1.0 - len(inside) / total,
                "loses_more": sum(ours.lost > best.lost for ours, best in inside) / total,
                "extra_lost": sum(ours.lost - best.lost for ours, best in inside) / total,
                "other_goal": sum(
                    ours.lost == best.lost and ours.goals != best.goals for ours, best in inside
                )
                / total,
                "compared": len(gaps) / total,
                "gap_mean": float(gaps.mean()) if len(gaps) else 0.0,
                "gap_median": float(np.median(gaps)) if len(gaps) else 0.0,
                "gap_p95": float(np.percentile(gaps, 95)) if len(gaps) else 0.0,
                "gap_max": float(gaps.max()) if len(gaps) else 0.0,
            }
        )
    return rows


# -- short runs ------------------------------------------------------------------------------------
def config(
    seed: int, seconds: float, rate: float, pool: int, slo: str, policies: tuple[str, ...]
) -> SimulationConfig:
    return SimulationConfig(
        policy=policies,
        trace="sharegpt",
        rate=rate,
        duration=seconds,
        pool=pool,
        seed=seed,
        slo=slo,
        profile=PROFILE,
        cap_length=CAP,
        **PAPERS_ENGINE,
    )


def deadlines_of_runs(
    seed: int, seconds: float, rate: float, pool: int, slo: str
) -> list[dict[str, Any]]:
    """The same requests under `bros` and under each of OTHERS; a row for each, real-time requests
    in pairs.

    ttft_*      shares of requests whose first token is in time under both, only this one, only
                `bros`, neither
    tokens_*    the same of requests none of whose later tokens is late
    be_tokens   best-effort tokens a second while real-time requests arrived, over those under
                `bros`
    fallback    share of steps that were left to Algorithm 1
    swaps       of requests, a run
    """
    labels = (GREEDY, *OTHERS.values())
    results = simulate(config(seed, seconds, rate, pool, slo, labels))
    kept = {label: _kept(result.rows.requests) for label, result in results.items()}
    served = {
        label: _best_effort_rate(result.rows.requests, seconds) for label, result in results.items()
    }
    rows = []
    for problem, label in OTHERS.items():
        row = {"problem": problem, "requests": len(kept[label][0])}
        for name, ours, best in zip(("ttft", "tokens"), kept[GREEDY], kept[label], strict=True):
            row |= {
                f"{name}_both": float((ours & best).mean()),
                f"{name}_this_only": float((~ours & best).mean()),
                f"{name}_bros_only": float((ours & ~best).mean()),
                f"{name}_neither": float((~ours & ~best).mean()),
            }
        counters = (
            results[label]
            .config["policy"]
            .get("counters", {"solved_steps": 0, "fallback_steps": 1})
        )
        row["be_tokens"] = served[label] / served[GREEDY] if served[GREEDY] else 0.0
        row["swaps"] = results[label].summary["kv"]["preemptions"]["swap"]
        row["fallback"] = 1.0 - counters["solved_steps"] / sum(counters.values())
        rows.append(row)
    return rows


def _kept(requests) -> tuple[np.ndarray, np.ndarray]:
    """bool[n] each, by request: first token in time; no later token late. Real-time requests."""
    mine = requests[requests.service_class == "rt"].sort_values("request_id")
    first = (mine.first_token_s - mine.arrival_s <= mine.slo_ttft_s).to_numpy()
    return first, (mine.late_tokens == 0).to_numpy()


def _best_effort_rate(requests, seconds: float) -> float:
    """Best-effort output tokens a second, of requests that ended within the first `seconds`."""
    ended = requests[(requests.service_class == "be") & (requests.last_token_s <= seconds)]
    return float(ended.output_tokens.sum()) / seconds


# First tokens in time, compared with the most of any schedule.
# A bound, from a problem that leaves out all but one thing: prompts take the machine, one after
# another or in parts. A prompt of n tokens takes it for at least n times the shortest step time a
# token that the profile has for steps of any size. Decodes, best-effort requests and memory cost
# nothing. All requests have one TTFT objective, so the first to arrive is due first, and the most
# prompts that can be in time are found exactly.
# Source: Kise, Ibaraki and Mine, "A Solvable Case of the One-Machine Scheduling Problem with
# Ready and Due Times" (Operations Research 26, 1978). Ready and due times have the same order.
SERVED = ("bros", "bros:chunk=2048", "bros:chunk=fit", "vllm")
_EACH, _COARSE, _MOST = 1024, 64, 16384  # tokens of a step: all up to here, then every 64th


def most_in_time(ready: np.ndarray, due: np.ndarray, cost: np.ndarray) -> int:
    """How many of n jobs one machine can end in time, at most.

    ready, due, cost  float64[n], seconds; ready and due both in ascending order. ValueError if not
    """
    if (np.diff(ready) < 0).any() or (np.diff(due) < 0).any():
        raise ValueError("jobs must be in order of both their ready and their due times")
    # ends[k]: when k of the jobs so far can all have ended in time, at the earliest
    ends = np.full(len(ready) + 1, np.inf)
    ends[0] = -np.inf
    for begin, last, seconds in zip(ready, due, cost, strict=True):
        with_it = np.maximum(ends[:-1], begin) + seconds
        ends[1:] = np.minimum(ends[1:], np.where(with_it <= last, with_it, np.inf))
    return int(np.isfinite(ends).sum())


def least_token_s(model: StepTimeModel) -> float:
    """No step computes prompt tokens faster, seconds a token."""

    def seconds(tokens: int) -> float:
        return model.step_seconds(
            StepComposition(prefill_new=np.array([tokens]), prefill_resident=np.zeros(1, np.int64))
        )

    few = min(seconds(n) / n for n in range(1, _EACH + 1))
    # of a size between two of these: no shorter than the smaller, no more tokens than the larger
    many = min(seconds(n) / (n + _COARSE) for n in range(_EACH, _MOST, _COARSE))
    return min(few, many)


def first_tokens_of_runs(
    seed: int, seconds: float, rate: float, pool: int, slo: str
) -> list[dict[str, Any]]:
    """The same requests under each of SERVED; kept: share of the real-time requests whose first
    token is in time; bound: the most that any schedule could have had; requests: real-time ones."""
    results = simulate(config(seed, seconds, rate, pool, slo, SERVED))
    token_s = least_token_s(load_profile(PROFILE).model())
    rows = []
    for label, result in results.items():
        requests = result.rows.requests
        mine = requests[requests.service_class == "rt"].sort_values("arrival_s")
        ready = mine.arrival_s.to_numpy()
        due = ready + mine.slo_ttft_s.to_numpy()
        bound = most_in_time(ready, due, mine.prompt_tokens.to_numpy() * token_s)
        kept = (mine.first_token_s.to_numpy() <= due).mean()
        shares = {"kept": float(kept), "bound": bound / len(mine)}
        rows.append({"policy": label, "requests": len(mine), **shares})
    return rows
