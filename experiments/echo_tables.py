"""Tables of the Echo study: means and intervals over seeds; what is compared is compared seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from .echo_points import ALONE, GAPS
from .echo_runs import BIN_S, LADDER, QUANTILES
from .grid import over_seeds

RATES = ("offline_tps", "offline_rps")
ONLINE = ("attainment", "ttft_attainment", "tpot_attainment", "in_time")
SHOWN = (*RATES, *ONLINE, "hit_rate", "occupied", "recomputes", "left", "step_ms", "ttft_q50", "tpot_q50")
GAINS = ("speedup", "speedup_rps")
TROUGH, PEAK = 0.4, 0.9  # parts of the peak's rate


def beside_bs(by: Sequence[str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Means over seeds, and the offline throughput over that of BS in the same setting, seed by seed: in tokens, prompt and
    output, of requests that ended (`speedup`), and in requests (`speedup_rps`)."""

    def table(points: pd.DataFrame) -> pd.DataFrame:
        key = [name for name in by if name != "policy"] + ["seed"]
        base = points[points.policy == LADDER[0]].set_index(key)
        index = pd.MultiIndex.from_frame(points[key])
        gains = {g: points[r] / base[r].loc[index].to_numpy() for g, r in zip(GAINS, RATES, strict=True)}
        return over_seeds(points.assign(**gains), list(by), [*SHOWN, *GAINS])

    return table


def quantiles(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each quantile of TTFT and mean TPOT of the online requests, seconds."""
    found = []
    for q in QUANTILES:
        name = round(100 * q)
        here = points.assign(quantile=q, ttft_s=points[f"ttft_q{name}"], tpot_s=points[f"tpot_q{name}"])
        found.append(over_seeds(here, ["estimator", "policy", "quantile"], ["ttft_s", "tpot_s", *ONLINE]))
    joined = pd.concat(found, ignore_index=True)
    order = {name: i for i, name in enumerate((ALONE, *LADDER, GAPS))}
    return joined.sort_values(["estimator", "policy"], key=lambda c: c.map(order) if c.name == "policy" else c, kind="stable")


def of_series(points: pd.DataFrame) -> pd.DataFrame:
    """What the series of Figs. 8 to 10 amount to, run by run.

    correlation       of online and offline requests with KV, over bins of ten seconds
    correlation_used  of the memory that they use
    hit_rate          prompt tokens of offline requests found in the cache at their admission: in all, in the trough
                      (rates below 0.4 of the peak's) and at the peak (above 0.9)
    half_full         share of the iterations in which requests hold more than half of the memory
    """
    rows = []
    key = ["policy", "estimator", "memory"]
    for axes, part in points.groupby([*key, "seed"], sort=False):
        row = dict(zip((*key, "seed"), axes, strict=True))
        row["correlation"] = correlation(part.online, part.offline)
        row["correlation_used"] = correlation(part.online_used, part.offline_used)
        for name, mine in (("", part), ("_trough", part[part.tide < TROUGH]), ("_peak", part[part.tide > PEAK])):
            row[f"hit_rate{name}"] = hit_rate(mine)
            row[f"used{name}"] = float((mine.online_used + mine.offline_used).mean()) if len(mine) else float("nan")
        row["half_full"] = part.steps_half_full.sum() / part.steps.sum()
        row["online_cached"], row["offline_cached"] = part.online_cached.mean(), part.offline_cached.mean()
        rows.append(row)
    frame = pd.DataFrame(rows)
    return over_seeds(frame, key, [name for name in frame if name not in (*key, "seed")])


def hit_rate(part: pd.DataFrame) -> float:
    asked = part.prompt_tokens.sum()
    return float(part.hit_tokens.sum() / asked) if asked else float("nan")


def correlation(a: pd.Series, b: pd.Series) -> float:
    """Pearson's; nan where one of them does not vary."""
    if not (a.std() > 0 and b.std() > 0):
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def of_days(points: pd.DataFrame) -> pd.DataFrame:
    return over_seeds(points, ["hour"], ["rate", "ratio"])


def of_arrivals(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: the correlation of expected and actual rate, the mean relative error of the mean, and how many minutes
    bring more than was expected, by the mean and with two deviations."""
    rows = []
    for (burstiness, seed), part in points.groupby(["burstiness", "seed"], sort=False):
        error = (part["mean"] - part.actual).abs().sum() / part.actual.sum()
        rows.append(
            {
                "burstiness": burstiness,
                "seed": seed,
                "correlation": correlation(part["mean"], part.actual),
                "error": error,
                "above_mean": float((part.actual > part["mean"]).mean()),
                "above_high": float((part.actual > part.high).mean()),
            }
        )
    return over_seeds(pd.DataFrame(rows), ["burstiness"], ["correlation", "error", "above_mean", "above_high"])


def of_memory(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: seconds in which more is held than was foretold a minute before, what was foretold and not held (share of
    the memory), and what was held."""
    rows = []
    for (burstiness, seed), part in points.groupby(["burstiness", "seed"], sort=False):
        beyond = part.held - part.predicted
        row = {"burstiness": burstiness, "seed": seed, "exceeded": float((beyond > 0).mean())}
        rows.append(row | {"spare": float(np.maximum(-beyond, 0).mean()), "held": float(part.held.mean())})
    return over_seeds(pd.DataFrame(rows), ["burstiness"], ["exceeded", "spare", "held"])


def profile_of_day(points: pd.DataFrame, policy: str, estimator: str, memory: str = "all") -> pd.DataFrame:
    """The series of a policy: a row for each ten seconds, the mean over seeds; hit rates of a minute (hits over prompts)."""
    mine = points[(points.policy == policy) & (points.estimator == estimator) & (points.memory == memory)]
    series = mine.groupby("time_s").mean(numeric_only=True)
    sums = mine.groupby("time_s")[["hit_tokens", "prompt_tokens"]].sum().rolling(round(60 / BIN_S), min_periods=1).sum()
    series["hit_rate"] = sums.hit_tokens / sums.prompt_tokens.where(sums.prompt_tokens > 0)
    return series.reset_index()
