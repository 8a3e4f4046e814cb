"""Tables and claims of the BROS study.

The paper's improvements are averages over settings, and its multipliers exceed what the ratio of
its own means allows (a TTFT attainment of 10.55 % times 11.75 is more than 100 %). So they must be
means of the settings' ratios. Both are shown: `ratio` is the mean over settings of BROS over the
baseline, without settings in which the baseline has 0, `of_means` BROS's mean over the baseline's.
Intervals are over seeds, each of which gives one such mean; a seed that lacks a setting gives none.
`bros_saturated` and `other_saturated` count the settings in which the queue of real-time requests
grows for as long as they arrive: means of these depend on the length of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from twinserve.experiments.bros.runs import LLAMA, MODELS, OPT, QWEN
from twinserve.experiments.study.verdict import Claim, judge
from twinserve.sim.sweep.paired import baseline_of, gained
from twinserve.sim.sweep.statistics import over_seeds, shown

# highest rate of the second average: at 15 requests/s some models are past their capacity
LOW = 10.0
VERSIONS = {"ACM": (*OPT, LLAMA), "IEEE": QWEN}  # the models of the two versions of the paper
QUANTITIES = (
    "normalized_ms",
    "be_rps",
    "ttft_attainment",
    "tpot_attainment",
    "every_gap_attainment",
    "rt_rps",
    "ttft_p99_s",
)
SHOWN = (
    *QUANTITIES,
    "token_attainment",
    "slo_attainment",
    "ttft_s",
    "tpot_s",
    "be_ttft_s",
    "saturated",
    "unclear",
    "growth_rps",
    "step_ms",
    "queueing",
    "recomputes",
    "swaps",
    "batch",
    "kv_peak",
)

# Sec. VII-B of the IEEE version; LMSYS: Sec. 7.2 of the ACM version. Lengths, quantity, baseline ->
# change or factor. The paper's TPOT attainment is judged by both of its readings: the mean of a
# request's gaps (Sec. VII-A), and every gap (constraint (6)).
HYBRID_MARKS = {
    ("sharegpt", "normalized_ms", "vllm-v0"): -0.7420,
    ("sharegpt", "normalized_ms", "round-robin"): -0.5431,
    ("sharegpt", "be_rps", "vllm-v0"): -0.1129,
    ("sharegpt", "be_rps", "round-robin"): -0.0880,
    ("sharegpt", "ttft_attainment", "vllm-v0"): 36.38,
    ("sharegpt", "ttft_attainment", "round-robin"): 11.75,
    ("sharegpt", "tpot_attainment", "vllm-v0"): 1.73,
    ("sharegpt", "tpot_attainment", "round-robin"): 1.47,
    ("sharegpt", "every_gap_attainment", "vllm-v0"): 1.73,
    ("sharegpt", "every_gap_attainment", "round-robin"): 1.47,
    ("lmsys", "normalized_ms", "vllm-v0"): -0.6961,
    ("lmsys", "normalized_ms", "round-robin"): -0.2577,
    ("lmsys", "be_rps", "vllm-v0"): -0.1767,
    ("lmsys", "be_rps", "round-robin"): -0.1518,
    ("lmsys", "ttft_attainment", "vllm-v0"): 21.42,
    ("lmsys", "ttft_attainment", "round-robin"): 14.23,
    ("lmsys", "tpot_attainment", "vllm-v0"): 2.62,
    ("lmsys", "tpot_attainment", "round-robin"): 2.28,
    ("lmsys", "every_gap_attainment", "vllm-v0"): 2.62,
    ("lmsys", "every_gap_attainment", "round-robin"): 2.28,
}
PURE_MARKS = {
    ("sharegpt", "normalized_ms", "vllm-v0"): -0.2936,
    ("sharegpt", "rt_rps", "vllm-v0"): 1.08,
}
# Mean attainments over settings; lengths, quantity, policy.
MEANS = {
    ("sharegpt", "ttft_attainment", "vllm-v0"): 0.0128,
    ("sharegpt", "ttft_attainment", "round-robin"): 0.1055,
    ("sharegpt", "tpot_attainment", "bros"): 0.6549,
    ("sharegpt", "tpot_attainment", "round-robin"): 0.4734,
    ("sharegpt", "every_gap_attainment", "bros"): 0.6549,
    ("sharegpt", "every_gap_attainment", "round-robin"): 0.4734,
    ("lmsys", "tpot_attainment", "bros"): 0.7538,
    ("lmsys", "tpot_attainment", "round-robin"): 0.4281,
    ("lmsys", "every_gap_attainment", "bros"): 0.7538,
    ("lmsys", "every_gap_attainment", "round-robin"): 0.4281,
}
NAMES = {
    "normalized_ms": "normalised latency",
    "be_rps": "best-effort throughput",
    "ttft_attainment": "TTFT attainment",
    "tpot_attainment": "TPOT attainment",
    "every_gap_attainment": "TPOT attainment by every gap",
    "rt_rps": "throughput",
    "ttft_p99_s": "P99 TTFT",
}
BASELINES = {"vllm-v0": "vLLM", "round-robin": "RR", "vllm": "vLLM V1", "bros": "BROS"}


def per_setting(by: Sequence[str]):
    """A table with a row for each combination of `by`, means over seeds."""
    return lambda points: over_seeds(points, by, recorded(points, SHOWN))


def recorded(points: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Those of `names` that the points have: runs that were kept lack `every_gap_attainment` if
    they are older than that metric."""
    return [name for name in names if name in points]


def headline(points: pd.DataFrame) -> pd.DataFrame:
    """BROS against each baseline over all settings of a version, lengths and rates; the module says
    how."""
    rows = []
    for rates, some in (("all", points), ("low", points[points.rate <= LOW])):
        for version, models in VERSIONS.items():
            mine = some[some.profile.isin(models)]
            for lengths, part in mine.groupby("lengths", sort=False):
                for baseline in (
                    policy for policy in dict.fromkeys(part.policy) if policy != "bros"
                ):
                    where = {
                        "version": version,
                        "rates": rates,
                        "lengths": lengths,
                        "baseline": baseline,
                    }
                    rows += [
                        where | _compared(part, baseline, quantity)
                        for quantity in recorded(part, QUANTITIES)
                    ]
    return pd.DataFrame(rows)


def _compared(part: pd.DataFrame, baseline: str, quantity: str) -> dict:
    found = []
    for _, seed in part.groupby("seed"):
        pivot = seed.pivot(index=["profile", "rate"], columns="policy", values=quantity)
        if pivot[["bros", baseline]].isna().any(axis=None):
            continue  # a mean over other settings would be another mean
        ours, theirs = pivot["bros"].to_numpy(), pivot[baseline].to_numpy()
        some = theirs > 0
        ratios = ours[some] / theirs[some]
        of_means = ours.mean() / theirs.mean() if theirs.mean() > 0 else np.nan
        one = {
            "ratio": ratios.mean() if some.any() else np.nan,
            "best": ratios.max() if some.any() else np.nan,
        }
        growing = seed.pivot(index=["profile", "rate"], columns="policy", values="saturated")
        one |= {"bros_saturated": growing["bros"].sum(), "other_saturated": growing[baseline].sum()}
        one |= {
            "lowest": ratios.min() if some.any() else np.nan,
            "of_means": of_means,
            "left_out": (~some).sum(),
        }
        found.append(
            one
            | {
                "bros": ours.mean(),
                "other": theirs.mean(),
                "settings": len(pivot),
                "quantity": quantity,
            }
        )
    values = (
        *("ratio", "of_means", "lowest", "best", "left_out", "bros", "other", "settings"),
        *("bros_saturated", "other_saturated"),
    )
    return over_seeds(pd.DataFrame(found), ["quantity"], values).iloc[0].to_dict()


def improvements(marks: dict, where: str, why: dict[str, str]):
    """Claims on `headline`: the models of the ACM version are judged where they were run (the
    paper's "15 cases"), else those of IEEE; beside them stand the same at the lower rates."""

    def claims(table: pd.DataFrame) -> list[Claim]:
        found = []
        for (lengths, quantity, baseline), paper in marks.items():
            part = table[
                (table.lengths == lengths)
                & (table.quantity == quantity)
                & (table.baseline == baseline)
            ]
            rows = {row.version: row for row in part[part.rates == "all"].itertuples()}
            if not rows:
                continue
            version = "ACM" if "ACM" in rows else "IEEE"
            judged = rows[version]
            rows |= {
                f"{version} up to {LOW:g}/s": row
                for row in part[part.rates == "low"].itertuples()
                if row.version == version
            }
            change = paper < 0
            mean = judged.ratio - 1 if change else judged.ratio
            verdict = judge(mean, judged.ratio_ci, paper, 0.0 if change else 1.0)
            ours = "; ".join(f"{name}: {_said(row, change)}" for name, row in rows.items())
            what = f"{NAMES[quantity]}, BROS against {BASELINES[baseline]}, {lengths}"
            printed = f"{paper:+.2%}" if change else f"x {paper:g}"
            found.append(Claim.judged(where, what, printed, ours, verdict, why[quantity]))
        return found

    return claims


def _said(row, change: bool) -> str:
    if not np.isfinite(row.ratio):
        return "the baseline has 0 everywhere"
    if change:
        return (
            f"{shown(100 * (row.ratio - 1), 100 * row.ratio_ci)} % (of means "
            f"{100 * (row.of_means - 1):.3g} %)"
        )
    out = (
        f", {row.left_out:.3g} of {row.settings:.0f} settings at 0 left out" if row.left_out else ""
    )
    return f"x {shown(row.ratio, row.ratio_ci)} (of means x {row.of_means:.3g}{out})"


def means(table: pd.DataFrame, where: str, why: str) -> list[Claim]:
    """Claims on mean attainments over settings."""
    found = []
    for (lengths, quantity, policy), paper in MEANS.items():
        column, baseline = ("bros", "round-robin") if policy == "bros" else ("other", policy)
        part = table[
            (table.lengths == lengths) & (table.quantity == quantity) & (table.baseline == baseline)
        ]
        rows = {row.version: row for row in part[part.rates == "all"].itertuples()}
        if not rows:
            continue
        value = {
            name: (getattr(row, column), getattr(row, f"{column}_ci")) for name, row in rows.items()
        }
        judged = value.get("ACM", value.get("IEEE"))
        verdict = judge(*judged, paper, neutral=None)
        ours = "; ".join(
            f"{name}: {shown(100 * mean, 100 * half)} %" for name, (mean, half) in value.items()
        )
        what = f"{NAMES[quantity]} of {BASELINES[policy]}, mean over settings, {lengths}"
        found.append(Claim.judged(where, what, f"{paper:.2%}", ours, verdict, why, False))
    return found


def preemption(points: pd.DataFrame) -> pd.DataFrame:
    """Fig. 2: in each policy's row also how much lower its values are than those of first come,
    first served, seed by seed."""
    lower = {f"{name}_lower": (name, "saving") for name in ("normalized_ms", "queueing")}
    first = points[points.policy == "vllm-v0"]
    beside = gained(points, first, ["profile", "rate", "seed"], lower)
    return over_seeds(beside, ["profile", "rate", "policy"], [*lower, *recorded(points, SHOWN)])


# of a variant beside BROS: changes relative to BROS's own value, and differences of shares
RELATIVE = ("normalized_ms", "be_rps", "be_ttft_s", "ttft_p99_s", "tpot_s", "step_ms")
SHARES = ("ttft_attainment", "tpot_attainment", "token_attainment", "slo_attainment")


def parts(points: pd.DataFrame) -> pd.DataFrame:
    """BROS without, or with another, of its parts: in each variant's row also NAME_change against
    BROS as it is, seed by seed; relative, but of shares the difference."""
    changes = {f"{name}_change": (name, "change") for name in RELATIVE}
    changes |= {f"{name}_change": (name, "difference") for name in SHARES}
    whole = points[points.variant == "bros"]
    beside = gained(points, whole, ["profile", "rate", "seed"], changes)
    return over_seeds(beside, ["profile", "rate", "variant"], [*changes, *recorded(points, SHOWN)])


def caches(points: pd.DataFrame) -> pd.DataFrame:
    """Fig. 12: each cache's row holds bi-cache's attainments over its own, seed by seed."""
    with_bi = baseline_of(points, points[points.cache == "bi-cache"], ["profile", "seed"])
    gains = {
        f"{name}_gain": with_bi[name] / np.maximum(points[name], 1e-9)
        for name in ("ttft_attainment", "tpot_attainment")
    }
    return over_seeds(
        points.assign(**gains), ["profile", "cache"], [*gains, *recorded(points, SHOWN)]
    )


def short(profile: str) -> str:
    """The name of a model in a plot."""
    return next(
        (
            model.split("@")[0] + profile.removeprefix(model)
            for model in MODELS
            if profile.startswith(model)
        ),
        profile,
    )
