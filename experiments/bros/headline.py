"""BROS against each baseline over all settings, and what the paper says of that.

The paper's improvements are averages over settings. Its multipliers exceed what the ratio of its
own means allows (a TTFT attainment of 10.55 % times 11.75 is more than 100 %). So they must be
means of the settings' ratios. Both are shown. `ratio` is the mean over settings of BROS over the
baseline, without settings in which the baseline has 0. `of_means` is BROS's mean over the
baseline's. Intervals are over seeds, each of which gives one such mean; a seed that lacks a setting
gives none. `bros_saturated` and `other_saturated` count the settings in which the queue of
real-time requests grows for as long as they arrive. Their means depend on the length of the trace.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd

from twinserve.experiments.study.claims import Number, Row, Said, claims, rows_of, teller, texts
from twinserve.experiments.study.verdict import Claim, worst
from twinserve.sim.sweep.statistics import over_seeds

TEXTS = texts(__file__)
tell = teller(TEXTS)
QWEN = ("qwen2.5-14b@a100-40g:tp2", "qwen2.5-32b@a100-40g:tp4")  # of the IEEE version
OPT = ("opt-13b@a100-40g:tp2", "opt-30b@a100-40g:tp4")
ACM = (*OPT, "llama-3-70b@a100-80g:tp8")  # of the ACM version
VERSIONS = {"ACM": ACM, "IEEE": QWEN}
# Fig. 11. The paper's clients ask for as many tokens as they get; one number stands for all here:
# the policy's default, and one near the mean answer.
TGI = ("tgi", "tgi:max_new_tokens=256")
# highest rate of the second average: at 15 requests/s some models are past their capacity
LOW = 10.0
DATA = texts(__file__, "data.yaml")
NAMES = DATA.NAMES
BASELINES = {"vllm-v0": "vLLM", "round-robin": "RR", "bros": "BROS"}
# Sec. VII-B of the IEEE version; LMSYS: Sec. 7.2 of the ACM version. Lengths and quantity ->
# change or factor against a baseline.
IMPROVED = {
    ("sharegpt", "normalized_ms"): {"vllm-v0": -0.7420, "round-robin": -0.5431},
    ("sharegpt", "be_rps"): {"vllm-v0": -0.1129, "round-robin": -0.0880},
    ("sharegpt", "ttft_attainment"): {"vllm-v0": 36.38, "round-robin": 11.75},
    ("sharegpt", "tpot_attainment"): {"vllm-v0": 1.73, "round-robin": 1.47},
    ("lmsys", "normalized_ms"): {"vllm-v0": -0.6961, "round-robin": -0.2577},
    ("lmsys", "be_rps"): {"vllm-v0": -0.1767, "round-robin": -0.1518},
    ("lmsys", "ttft_attainment"): {"vllm-v0": 21.42, "round-robin": 14.23},
    ("lmsys", "tpot_attainment"): {"vllm-v0": 2.62, "round-robin": 2.28},
}
PURE = {
    ("sharegpt", "normalized_ms"): {"vllm-v0": -0.2936},
    ("sharegpt", "rt_rps"): {"vllm-v0": 1.08},
}
# Mean attainments over settings, of a policy.
MEANS = {
    ("sharegpt", "ttft_attainment"): {"vllm-v0": 0.0128, "round-robin": 0.1055},
    ("sharegpt", "tpot_attainment"): {"bros": 0.6549, "round-robin": 0.4734},
    ("lmsys", "tpot_attainment"): {"bros": 0.7538, "round-robin": 0.4281},
}
# The paper's TPOT attainment is judged by both of its readings: the mean of a request's gaps
# (Sec. VII-A), and every gap (constraint (6)).
READINGS = {"tpot_attainment": ("tpot_attainment", "every_gap_attainment")}


# -- table -----------------------------------------------------------------------------------------
def headline(points: pd.DataFrame) -> pd.DataFrame:
    """BROS against each baseline over all settings of a version, lengths and rates."""
    rows = []
    for rates, some in (("all", points), ("low", points[points.rate <= LOW])):
        for version, models in VERSIONS.items():
            mine = some[some.profile.isin(models)]
            for lengths, part in mine.groupby("lengths", sort=False):
                for baseline in dict.fromkeys(part.policy[part.policy != "bros"]):
                    where = {"version": version, "rates": rates, "lengths": lengths}
                    where["baseline"] = baseline
                    shown_here = [name for name in NAMES if name in part]
                    rows += [where | _compared(part, baseline, name) for name in shown_here]
    return pd.DataFrame(rows)


def _compared(part: pd.DataFrame, baseline: str, quantity: str) -> dict:
    found = []
    for _, seed in part.groupby("seed"):
        both = seed.pivot(
            index=["profile", "rate"], columns="policy", values=[quantity, "saturated"]
        )
        ours, theirs = both[quantity, "bros"], both[quantity, baseline]
        if ours.isna().any() or theirs.isna().any():
            continue  # a mean over other settings would be another mean
        ours, theirs = ours.to_numpy(), theirs.to_numpy()
        ratios = ours[theirs > 0] / theirs[theirs > 0] if (theirs > 0).any() else np.array([np.nan])
        found.append(
            {
                "quantity": quantity,
                "ratio": ratios.mean(),
                "of_means": ours.mean() / theirs.mean() if theirs.mean() > 0 else np.nan,
                "lowest": ratios.min(),
                "best": ratios.max(),
                "left_out": (theirs <= 0).sum(),
                "bros": ours.mean(),
                "other": theirs.mean(),
                "settings": len(both),
                "bros_saturated": both["saturated", "bros"].sum(),
                "other_saturated": both["saturated", baseline].sum(),
            }
        )
    frame = pd.DataFrame(found)
    return over_seeds(frame, ["quantity"], list(frame)[1:]).iloc[0].to_dict()


# -- claims ----------------------------------------------------------------------------------------
Marks = Mapping[tuple[str, str], Mapping[str, float]]


def hybrid_claims(reasons: Mapping[str, str], of_means: str, in_time: bool = True) -> Callable:
    """Of Figs. 9 and 10. reasons: why an improvement is not the paper's, by quantity."""

    def claims(table: pd.DataFrame) -> list[Claim]:
        found = [*_improved(table, IMPROVED, "Figs. 9-10", reasons), *_means(table, of_means)]
        return [*found, nobody_in_time(table, of_means)] if in_time else found

    return claims


def pure_claims(table: pd.DataFrame) -> list[Claim]:
    return [*_improved(table, PURE, "Fig. 11", TEXTS.PURE), *_tgi(table)]


def _each(marks: Marks) -> Iterator[tuple[str, str, str, float]]:
    """Lengths, quantity, policy and number of each mark, by every reading of the quantity."""
    for (lengths, quantity), of_policies in marks.items():
        for reading in READINGS.get(quantity, (quantity,)):
            for policy, number in of_policies.items():
                yield lengths, reading, policy, number


def _rows(
    table: pd.DataFrame, lengths: str, quantity: str, baseline: str, rates: str = "all"
) -> dict[str, Row]:
    """version -> row of `headline`, the first of which is judged: the models of ACM if they were
    run (the paper's "15 cases")."""
    wanted = {"rates": rates, "lengths": lengths, "quantity": quantity, "baseline": baseline}
    return {row.version: row for row in rows_of(table, **wanted)}


def _improved(
    table: pd.DataFrame, marks: Marks, where: str, reasons: Mapping[str, str]
) -> list[Claim]:
    """The claim of a version, and the same at the lower rates."""
    found = []
    for lengths, quantity, baseline, paper in _each(marks):
        rows = _rows(table, lengths, quantity, baseline)
        if not rows:
            continue
        (version, row), change = next(iter(rows.items())), paper < 0
        verdict = (row.ratio - change).beside(paper, float(not change))
        low = _rows(table, lengths, quantity, baseline, "low").get(version)
        rows |= {} if low is None else {f"{version} up to {LOW:g}/s": low}
        of = {"where": where, "quantity": NAMES[quantity], "baseline": BASELINES[baseline]}
        of |= {"lengths": lengths, "printed": f"{paper:+.2%}" if change else f"x {paper:g}"}
        of["said"] = "; ".join(f"{name}: {_said(each, change)}" for name, each in rows.items())
        why = reasons.get(quantity, reasons.get("tpot_attainment", ""))
        found.append(tell("improved", verdict, why=why, **of))
    return found


def _said(row: Row, change: bool) -> str:
    if not row.ratio.known:
        return "the baseline has 0 everywhere"
    if change:
        return f"{100 * (row.ratio - 1)} % (of means {100 * (row.of_means - 1):.3g} %)"
    out = f", {row.left_out:.3g} of {row.settings:.0f} settings at 0 left out"
    return f"x {row.ratio} (of means x {row.of_means:.3g}{out if row.left_out.mean else ''})"


def _means(table: pd.DataFrame, reason: str) -> list[Claim]:
    """Claims on mean attainments over settings."""
    found = []
    for lengths, quantity, policy, paper in _each(MEANS):
        column, baseline = ("bros", "round-robin") if policy == "bros" else ("other", policy)
        rows = _rows(table, lengths, quantity, baseline)
        if not rows:
            continue
        values = {version: getattr(row, column) for version, row in rows.items()}
        verdict = next(iter(values.values())).beside(paper)
        of = {"quantity": NAMES[quantity], "policy": BASELINES[policy], "lengths": lengths}
        said = "; ".join(f"{version}: {value:%}" for version, value in values.items())
        found.append(tell("means", verdict, why=reason, paper=paper, said=said, **of))
    return found


def nobody_in_time(table: pd.DataFrame, reason: str) -> Claim:
    """Sec. 7.2.2 of the ACM version: vLLM "fails to meet the TTFT SLOs in 8 out of 15 cases"; here:
    its attainment is 0."""
    rows = _rows(table, "sharegpt", "ttft_attainment", "vllm-v0")
    first = next(iter(rows.values()))
    share, half = (of / first.settings.mean for of in (first.left_out.mean, first.left_out.half))
    said = "; ".join(f"{v}: {row.left_out} of {row.settings:.0f}" for v, row in rows.items())
    return tell("in_time", Number(share, half).beside(8 / 15), said=said, why=reason)


def _tgi(table: pd.DataFrame) -> list[Claim]:
    """Of TGI the paper draws curves of Fig. 11 and prints no number, only that BROS outperforms
    both systems."""
    found = []
    for baseline in TGI:
        for quantity, paper, sign in (("normalized_ms", "lower", -1), ("rt_rps", "higher", 1)):
            rows = _rows(table, "sharegpt", quantity, baseline)
            said = "; ".join(f"{v}: {row.ratio - 1:%}" for v, row in rows.items())
            words = ((sign * (row.ratio - 1)).more() for row in rows.values())
            of = {"quantity": NAMES[quantity], "baseline": baseline, "printed": paper}
            why = TEXTS.PURE[quantity]
            found.append(tell("tgi", worst(*words), said=said, why=why, **of))
    return found


# -- compare what the BROS paper says of its figures with ours; of averages: `headline` ------------
def short(profile: str) -> str:
    """The name of a model in a plot or a claim."""
    return profile.split("@")[0]


# Fig. 12, against the paper's No Bi-cache, which recomputes
CACHE_CLAIMS = claims(
    *(
        Said(
            "Fig. 12",
            f"{said} attainment with over without the bidirectional cache, {short(model)}",
            f"x {paper:g}",
            paper,
            {"cache": "paged, recompute", "profile": model},
            f"{name}_gain",
            TEXTS.CACHE[name],
            1.0,
            text="x {}",
        )
        for name, said, paper in (
            ("ttft_attainment", "TTFT", 1.23),
            ("tpot_attainment", "TPOT", 1.63),
        )
        for model in (QWEN[1], *OPT)
    )
)

# What the ACM version says of a part; it prints no ablation of these. Variant without it (or with
# more of it), quantity, section, and what that should do.
PARTS = DATA.SAID_OF_PARTS
PART_CLAIMS = {
    rate: claims(
        *(
            Said(
                where,
                f"{said}, {variant} against `bros`, {short(QWEN[0])}, {rate:g}/s",
                paper,
                None,
                {"variant": variant},
                f"{quantity}_change",
                reasons[variant],
                0.0,
                100.0,
                f"{{}} {unit}",
            )
            for variant, quantity, said, unit, where, paper in PARTS
        )
    )
    for rate, reasons in ((10.0, TEXTS.PARTS), (15.0, TEXTS.PARTS_HIGH))
}
FIG2 = (
    ("normalized_ms", "normalised latency", 1, "ms"),
    ("queueing", "queueing proportion", 100, "%"),
)


def preemption_claims(table: pd.DataFrame) -> list[Claim]:
    """The paper prints no numbers of Fig. 2, only that both fall: at the lowest rate at which first
    come, first served queues."""
    found = []
    for profile in dict.fromkeys(table.profile):
        rows = rows_of(table.sort_values("rate"), profile=profile, policy="vllm-v0")
        first = next((row for row in rows if row.queueing.mean > 0.05), rows[-1])
        (ours,) = rows_of(table, profile=profile, policy="preemptive-wait", rate=first.rate)
        for name, said, factor, unit in FIG2:
            mine, theirs = (factor * getattr(row, name) for row in (ours, first))
            verdict = getattr(ours, f"{name}_lower").more(whole=getattr(first, name).mean)
            of = {"quantity": said, "model": short(profile), "rate": first.rate, "unit": unit}
            found.append(tell("preemption", verdict, mine=mine, theirs=theirs, **of))
    return found


def overhead_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for profile, part in table.groupby("profile", sort=False):
        low, high = (0.0912, 0.0952) if "14b" in profile else (0.0756, 0.0842)
        share = Number(part.share.mean(), part.share_ci.max())
        verdict = share.beside(min(max(share.mean, low), high))
        of = {"model": short(profile), "low": low, "high": high, "share": share}
        found.append(tell("overhead", verdict, **of))
    return found
