"""Compare what the BROS paper says of its figures with ours; of averages: `headline`."""

import pandas as pd

from twinserve.experiments.bros.headline import OPT, QWEN, TEXTS, tell
from twinserve.experiments.study.claims import Number, Said, claims, rows_of, texts
from twinserve.experiments.study.verdict import Claim


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
DATA = texts(__file__, "data.yaml")
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
