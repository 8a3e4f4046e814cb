"""First tokens in time, compared with the most of any schedule.

A bound, from a problem that leaves out all but one thing: prompts take the machine, one after
another or in parts. A prompt of n tokens takes it for at least n times the shortest step time a
token that the profile has for steps of any size. Decodes, best-effort requests and memory cost
nothing. All requests have one TTFT objective, so the first to arrive is due first, and the most
prompts that can be in time are found exactly.

Source: Kise, Ibaraki and Mine, "A Solvable Case of the One-Machine Scheduling Problem with Ready
and Due Times" (Operations Research 26, 1978). Ready and due times have the same order.
"""

from typing import Any

import numpy as np

from twinserve.experiments.optimality.runs import PROFILE, config
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.profile import load_profile
from twinserve.sim.setup.run import simulate

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
