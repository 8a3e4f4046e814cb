"""Tables of the Echo study: means and intervals over seeds; what is compared is compared seed by
seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from twinserve.experiments.echo.points import ALONE, BS_512, PARTS, PRINTED
from twinserve.experiments.echo.runs import LADDER, PEAK, QUANTILES, TROUGH
from twinserve.sim.sweep.statistics import over_seeds

RATES = ("offline_tps", "offline_rps")
ONLINE = ("attainment", "ttft_attainment", "tpot_attainment", "in_time")
SHOWN = (
    *RATES,
    *ONLINE,
    "hit_rate",
    "occupied",
    "recomputes",
    "left",
    "step_ms",
    "ttft_q50",
    "tpot_q50",
)
GAINS = ("speedup", "speedup_rps", "step")
CACHE = ("offline_tps", "hit_rate", "drop", "attainment", "recomputes")


def _of(points: pd.DataFrame, policy: str, key: Sequence[str], value: str) -> np.ndarray:
    """For each row what `policy` has for `value` in the same setting and with the same seed; nan
    where it was not run."""
    theirs = points[points.policy == policy].set_index(list(key))[value]
    return _reindexed(theirs, points, key)


def _reindexed(theirs: pd.Series, points: pd.DataFrame, key: Sequence[str]) -> np.ndarray:
    return theirs.reindex(pd.MultiIndex.from_frame(points[list(key)])).to_numpy()


def beside_bs(by: Sequence[str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Means over seeds, and seed by seed the offline throughput over that of BS in the same
    setting: in tokens, prompt and output, of requests that ended (`speedup`), and in requests
    (`speedup_rps`); and in tokens over that of the rung below (`step`) and over that of BS with 512
    tokens a step (`speedup_512`); nan where these were not run."""

    def table(points: pd.DataFrame) -> pd.DataFrame:
        key = [name for name in by if name != "policy"] + ["seed"]
        gains = {
            g: points[r] / _of(points, LADDER[0], key, r)
            for g, r in zip(GAINS, RATES, strict=False)
        }
        step = pd.Series(float("nan"), points.index)
        for below, rung in pairwise(LADDER):
            step = step.mask(
                points.policy == rung, points.offline_tps / _of(points, below, key, "offline_tps")
            )
        beside = [name for name in key if name != "estimator"]
        over_512 = points.offline_tps / _of(points, BS_512, beside, "offline_tps")
        gained = points.assign(**gains, step=step, speedup_512=over_512)
        return over_seeds(gained, list(by), [*SHOWN, *GAINS, "speedup_512"])

    return table


def quantiles(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each quantile of TTFT and mean TPOT of the online requests, seconds; `ttft_more`:
    of TTFT, more than under BS with the same seed."""
    found = []
    for q in QUANTILES:
        name = round(100 * q)
        here = points.assign(
            quantile=q, ttft_s=points[f"ttft_q{name}"], tpot_s=points[f"tpot_q{name}"]
        )
        here["ttft_more"] = here.ttft_s - _of(here, LADDER[0], ["estimator", "seed"], "ttft_s")
        found.append(
            over_seeds(
                here,
                ["estimator", "policy", "quantile"],
                ["ttft_s", "tpot_s", "ttft_more", *ONLINE],
            )
        )
    joined = pd.concat(found, ignore_index=True)
    order = {name: i for i, name in enumerate((ALONE, BS_512, *LADDER, PRINTED))}
    return joined.sort_values(
        ["estimator", "policy"],
        key=lambda c: c.map(order) if c.name == "policy" else c,
        kind="stable",
    )


def beside_lru(points: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of the parts of M, and seed by seed what each gains over an LRU cache with
    the same requests: offline tokens/s as a ratio (`gain`), the hit rate as a difference
    (`more_hits`). drop: the hit rate of the trough less that of the peak."""
    here = points.assign(drop=points.hit_rate_trough - points.hit_rate_peak)
    lru = here.assign(policy=here.part)
    theirs = {
        name: _of(lru, PARTS[0], ["order", "seed"], name) for name in ("offline_tps", "hit_rate")
    }
    here = here.assign(
        gain=here.offline_tps / theirs["offline_tps"], more_hits=here.hit_rate - theirs["hit_rate"]
    )
    return over_seeds(
        here, ["order", "part"], [*CACHE, "hit_rate_trough", "hit_rate_peak", "gain", "more_hits"]
    )


def beside_each(points: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds with and without attention that reads shared prefixes once, and seed by seed
    the offline tokens/s over those without (`gain`) and over those of BS with the same attention
    (`speedup`)."""
    key = ["pool", "policy", "seed"]
    each = points[~points.shared_prefix].set_index(key).offline_tps
    bs = points[points.policy == "BS"].set_index(["pool", "shared_prefix", "seed"]).offline_tps
    found = points.assign(
        gain=points.offline_tps.to_numpy() / _reindexed(each, points, key),
        speedup=points.offline_tps.to_numpy()
        / _reindexed(bs, points, ["pool", "shared_prefix", "seed"]),
    )
    return over_seeds(
        found,
        ["pool", "policy", "shared_prefix"],
        ["offline_tps", "gain", "speedup", *ONLINE, "hit_rate", "step_ms"],
    )


def of_series(points: pd.DataFrame) -> pd.DataFrame:
    """What the series of Figs. 8 to 10 amount to, run by run.

    correlation       of online and offline requests with KV, over the bins of the series
    correlation_used  of the memory that they use
    hit_rate          prompt tokens of offline requests found in the cache at their admission: in
                      all, in the trough (rates below 0.4 of the peak's) and at the peak (above 0.9)
    drop              the trough's less the peak's
    half_full         share of the iterations in which requests hold more than half of the memory
    """
    rows = []
    key = ["policy", "estimator"]
    for axes, part in points.groupby([*key, "seed"], sort=False):
        row = dict(zip((*key, "seed"), axes, strict=True))
        row["correlation"] = correlation(part.online, part.offline)
        row["correlation_used"] = correlation(part.online_used, part.offline_used)
        for name, mine in (
            ("", part),
            ("_trough", part[part.tide < TROUGH]),
            ("_peak", part[part.tide > PEAK]),
        ):
            row[f"hit_rate{name}"] = hit_rate(mine)
            row[f"used{name}"] = (
                float((mine.online_used + mine.offline_used).mean()) if len(mine) else float("nan")
            )
        row["drop"] = row["hit_rate_trough"] - row["hit_rate_peak"]
        row["half_full"] = part.steps_half_full.sum() / part.steps.sum()
        row |= {name: part[name].iloc[0] for name in ("left", "attainment", "offline_tps")}
        row["online_cached"], row["offline_cached"] = (
            part.online_cached.mean(),
            part.offline_cached.mean(),
        )
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


def of_busiest(points: pd.DataFrame) -> pd.DataFrame:
    return over_seeds(points, ["policy"], ["minutes", "offered", "missed", "attainment"])


def of_arrivals(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: the correlation of expected and actual rate, the mean relative error of the mean,
    and how many minutes bring more than was expected, by the mean and with two deviations."""
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
    return over_seeds(
        pd.DataFrame(rows), ["burstiness"], ["correlation", "error", "above_mean", "above_high"]
    )


def of_memory(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: seconds in which more is held than was foretold a minute before, what was
    foretold and not held (share of the memory), and what was held."""
    key = ["tide", "burstiness", "history_s"]
    shown = ["exceeded", "spare", "held"]
    rows = points.groupby([*key, "seed"], sort=False, as_index=False)[shown].mean()
    return over_seeds(rows, key, shown)


def profile_of_day(points: pd.DataFrame, policy: str, estimator: str) -> pd.DataFrame:
    """The series of a policy: a row for each bin, the mean over seeds; hit rates of the prompts of
    all seeds (hits over prompts)."""
    mine = points[(points.policy == policy) & (points.estimator == estimator)]
    series = mine.groupby("time_s").mean(numeric_only=True)
    sums = mine.groupby("time_s")[["hit_tokens", "prompt_tokens"]].sum()
    series["hit_rate"] = sums.hit_tokens / sums.prompt_tokens.where(sums.prompt_tokens > 0)
    return series.reset_index()
