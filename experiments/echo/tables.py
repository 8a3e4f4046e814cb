"""Tables of the Echo study: means and intervals over seeds; what is compared is compared seed by
seed."""

from itertools import pairwise

import numpy as np
import pandas as pd

from twinserve.experiments.echo.points import ALONE, BS, BS_512, PARTS, PRINTED
from twinserve.experiments.echo.runs import LADDER, PEAK, QUANTILES, TROUGH
from twinserve.experiments.study.curves import one_seed
from twinserve.experiments.study.tables import Against, Table
from twinserve.sim.sweep.statistics import over_seeds

ONLINE = ("attainment", "ttft_attainment", "tpot_attainment", "in_time")
SHOWN = ("offline_tps", "offline_rps", *ONLINE, "hit_rate", "occupied", "recomputes", "left")
SHOWN += ("step_ms", "ttft_q50", "tpot_q50")
TOKENS = ("offline_tps", "ratio")


def beside_bs(*pair: str) -> Table:
    """The offline throughput over that of BS in the same setting: in tokens, prompt and output, of
    requests that ended (`speedup`), and in requests (`speedup_rps`); and in tokens over that of the
    rung below (`step`) and over that of BS with 512 tokens a step (`speedup_512`)."""
    over_bs = {"speedup": TOKENS, "speedup_rps": ("offline_rps", "ratio")}
    below = {"policy": {rung: below for below, rung in pairwise(LADDER)}}
    beliefs = [name for name in pair if name != "estimator"]
    return Table(
        (*pair, "policy"),
        (*SHOWN, *over_bs, "step", "speedup_512"),
        over_bs,
        {"policy": BS},
        pair,
        also=(
            Against({"step": TOKENS}, below, pair),
            Against({"speedup_512": TOKENS}, {"policy": BS_512}, beliefs),
        ),
    )


# ttft_more: of TTFT, more than under BS with the same seed
QUANTILE = ("estimator", "policy", "quantile")
OF_QUANTILES = Table(
    QUANTILE,
    ("ttft_s", "tpot_s", "ttft_more", *ONLINE),
    {"ttft_more": ("ttft_s", "difference")},
    {"policy": BS},
    ("estimator", "quantile"),
)
# Parts of M. gain: offline tokens/s over those with an LRU cache and the same requests; more_hits:
# the hit rate above its; drop: the hit rate of the trough less that of the peak.
CACHE = ("offline_tps", "hit_rate", "drop", "attainment", "recomputes")
BESIDE_LRU = Table(
    ("order", "part"),
    (*CACHE, "hit_rate_trough", "hit_rate_peak", "gain", "more_hits"),
    {"gain": TOKENS, "more_hits": ("hit_rate", "difference")},
    {"part": PARTS[0]},
    ("order",),
    derived={"drop": lambda runs: runs.hit_rate_trough - runs.hit_rate_peak},
)


def quantiles(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each quantile of TTFT and mean TPOT of the online requests, seconds."""
    times = [
        points.assign(quantile=q, ttft_s=points[f"ttft_q{name}"], tpot_s=points[f"tpot_q{name}"])
        for q in QUANTILES
        for name in [round(100 * q)]
    ]
    order = {name: i for i, name in enumerate((ALONE, BS_512, *LADDER, PRINTED))}
    return OF_QUANTILES(pd.concat(times, ignore_index=True)).sort_values(
        ["estimator", "policy"],
        key=lambda c: c.map(order) if c.name == "policy" else c,
        kind="stable",
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
    key = ["policy", "estimator"]
    rows = [
        dict(zip((*key, "seed"), axes, strict=True)) | _of_run(part)
        for axes, part in points.groupby([*key, "seed"], sort=False)
    ]
    frame = pd.DataFrame(rows)
    return over_seeds(frame, key, [name for name in frame if name not in (*key, "seed")])


def _of_run(part: pd.DataFrame) -> dict[str, float]:
    row = {
        "correlation": correlation(part.online, part.offline),
        "correlation_used": correlation(part.online_used, part.offline_used),
    }
    times = {"": part, "_trough": part[part.tide < TROUGH], "_peak": part[part.tide > PEAK]}
    for name, mine in times.items():
        asked = mine.prompt_tokens.sum()
        row[f"hit_rate{name}"] = float(mine.hit_tokens.sum() / asked) if asked else float("nan")
        row[f"used{name}"] = float((mine.online_used + mine.offline_used).mean())
    row["drop"] = row["hit_rate_trough"] - row["hit_rate_peak"]
    row["half_full"] = part.steps_half_full.sum() / part.steps.sum()
    row |= {name: part[name].iloc[0] for name in ("left", "attainment", "offline_tps")}
    return row | {name: part[name].mean() for name in ("online_cached", "offline_cached")}


def correlation(a: pd.Series, b: pd.Series) -> float:
    """Pearson's; nan if one of them does not vary."""
    if not (a.std() > 0 and b.std() > 0):
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def of_arrivals(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: the correlation of expected and actual rate, and the mean relative error of the
    mean. Also how many minutes bring more than expected, by the mean and with two deviations."""
    rows = [
        {
            "burstiness": burstiness,
            "correlation": correlation(part["mean"], part.actual),
            "error": (part["mean"] - part.actual).abs().sum() / part.actual.sum(),
            "above_mean": float((part.actual > part["mean"]).mean()),
            "above_high": float((part.actual > part.high).mean()),
        }
        for (burstiness, _), part in points.groupby(["burstiness", "seed"], sort=False)
    ]
    frame = pd.DataFrame(rows)
    return over_seeds(frame, ["burstiness"], [*frame][1:])


def of_memory(points: pd.DataFrame) -> pd.DataFrame:
    """Run by run: seconds in which more is held than was foretold a minute before. Also what was
    foretold and not held (share of the memory), and what was held."""
    key = ["tide", "burstiness", "history_s"]
    shown = ["exceeded", "spare", "held"]
    rows = points.groupby([*key, "seed"], sort=False, as_index=False)[shown].mean()
    return over_seeds(rows, key, shown)


def of_day(points: pd.DataFrame) -> pd.DataFrame:
    """The series of each policy: a row for each bin, the mean over seeds; hit rates of the prompts
    of all seeds (hits over prompts)."""
    found = points.groupby(["policy", "estimator", "hour"], sort=False).mean(numeric_only=True)
    found = found.reset_index()
    return found.assign(
        setting=found.policy + ", " + found.estimator,
        hit_rate=found.hit_tokens / found.prompt_tokens.where(found.prompt_tokens > 0),
        occupied=found.online_used + found.offline_used,
    )


def foretold(points: pd.DataFrame) -> pd.DataFrame:
    """Of one seed the memory that is held and what each length of history foretells of it, as
    `what` and `share`."""
    found = one_seed(points)
    found = found.assign(bursts=[f"bursts {size:g}" for size in found.burstiness])
    held = found[found.history_s == found.history_s.max()]
    return pd.concat(
        [
            held.assign(what="held", share=held.held),
            found.assign(what=[f"of {s:g} s" for s in found.history_s], share=found.predicted),
        ]
    )
