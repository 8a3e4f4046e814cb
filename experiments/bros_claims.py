"""What the BROS paper says of its figures, beside what ours say."""

from __future__ import annotations

import pandas as pd

from .bros_tables import HYBRID_MARKS, PURE_MARKS, improvements, judge, means, short
from .grid import shown
from .study import Claim

WHY_HYBRID = {
    "normalized_ms": "TODO",
    "be_rps": "TODO",
    "ttft_attainment": "TODO",
    "tpot_attainment": "TODO",
}
WHY_MEANS = "TODO"
WHY_PURE = {"normalized_ms": "TODO", "rt_rps": "TODO"}
WHY_CACHE = {"ttft_attainment": "TODO", "tpot_attainment": "TODO"}


def hybrid_claims(table: pd.DataFrame) -> list[Claim]:
    return [*improvements(HYBRID_MARKS, "Figs. 9-10", WHY_HYBRID)(table), *means(table, "Sec. VII-B", WHY_MEANS)]


pure_claims = improvements(PURE_MARKS, "Fig. 11", WHY_PURE)


FIG2 = (("normalized_ms", "normalised latency", 1, "ms"), ("queueing", "queueing proportion", 100, "%"))


def preemption_claims(table: pd.DataFrame) -> list[Claim]:
    """The paper prints no numbers of Fig. 2, only that both fall."""
    found = []
    for profile, part in table.groupby("profile", sort=False):
        rows = part.set_index(["rate", "policy"])
        rate = part.rate.max()
        # the lowest rate at which first come, first served queues
        for each in sorted(part.rate.unique()):
            if rows.loc[(each, "vllm-v0"), "queueing"] > 0.05:
                rate = each
                break
        first, preempting = rows.loc[(rate, "vllm-v0")], rows.loc[(rate, "preemptive-wait")]
        for name, said, factor, unit in FIG2:
            texts = [shown(factor * r[name], factor * r[f"{name}_ci"]) for r in (first, preempting)]
            less = preempting[name] < first[name]
            what = f"{said} of preemption against first come, first served, {short(profile)}, {rate:g} requests/s"
            ours = f"{texts[1]} against {texts[0]} {unit}"
            found.append(Claim("Fig. 2", what, "lower", ours, "agrees" if less else "differs", "" if less else WHY_FIG2))
    return found


WHY_FIG2 = "TODO"


def bi_cache_claims(table: pd.DataFrame) -> list[Claim]:
    """Against the paper's No Bi-cache, which recomputes."""
    found = []
    for name, said, paper in (("ttft_attainment", "TTFT", 1.23), ("tpot_attainment", "TPOT", 1.63)):
        for row in table[table.cache == "paged, recompute"].to_dict("records"):
            gain, half = row[f"{name}_gain"], row[f"{name}_gain_ci"]
            verdict = judge(gain, half, paper, 1.0)
            what = f"{said} attainment with over without the bidirectional cache, {short(row['profile'])}"
            ours = f"x {shown(gain, half)}"
            found.append(Claim("Fig. 12", what, f"x {paper:g}", ours, verdict, "" if verdict == "agrees" else WHY_CACHE[name]))
    return found


def overhead_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for profile, part in table.groupby("profile", sort=False):
        low, high = (0.0912, 0.0952) if "14b" in profile else (0.0756, 0.0842)
        mean, half = part.share.mean(), part.share_ci.max()
        inside = 0.9 * low <= mean <= 1.1 * high
        ours = f"{shown(100 * mean, 100 * half)} %"
        what = f"planning over planning and iteration, {short(profile)}"
        why = "" if inside else WHY_OVERHEAD
        found.append(Claim("Fig. 13", what, f"{low:.2%} to {high:.2%}", ours, "agrees" if inside else "differs", why))
    return found


WHY_OVERHEAD = "TODO"
ABSENT = (
    Claim("Figs. 9-11", "Hugging Face TGI beside vLLM and RR", "curves", "-", "not reproduced", "TGI is no policy here."),
)
