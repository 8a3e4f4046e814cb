"""Tables of the LayerKV study, and what the paper says beside what they say.

`layerkv` is Algorithm 1 as printed; `savable` leaves out requests that will miss their TPOT
objective whatever is done. The first is judged, the second stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from twinserve.experiments.layerkv.runs import BOTH, HISTORY, KNOWN, NO_SLO, SAVABLE, UNBOUND, VLLM
from twinserve.experiments.study.verdict import (
    Claim,
    Verdict,
    judge,
    judge_bound,
    judge_direction,
    worst,
)
from twinserve.sim.sweep.paired import gained
from twinserve.sim.sweep.statistics import over_seeds, shown

TIMES = ("ttft_s", "ttft_p99_s", "tpot_s", "queueing_s", "prefill_s", "tokens_per_s")
PARKED = ("parked", "parked_most", "late", "late_on_host")
VALUES = (*TIMES, "violations", "ttft_violations", "tpot_violations", "recomputes", "kv_blocks")
VALUES += PARKED
READINGS = {
    "layerkv": "as printed",
    SAVABLE: "negative allowances left out",
    UNBOUND: "as printed, any number parked",
    BOTH: "negative allowances left out, any number parked",
}
DIRECTED = ("layerkv", SAVABLE)  # the others are variants of ours
BRIEF = {SAVABLE: "savable: ", UNBOUND: "any number parked: ", BOTH: "savable, any number parked: "}
LENGTHS = {HISTORY: "lengths from history", KNOWN: "lengths known"}  # and trained, the default
GAINS = {
    "ttft_gain": ("ttft_s", "factor"),
    "p99_gain": ("ttft_p99_s", "factor"),
    "throughput_change": ("tokens_per_s", "change"),
    "fewer_violations": ("violations", "saving"),
    "more_tpot_violations": ("tpot_violations", "difference"),
}
# violations that vLLM's load begins at; a change of throughput that is none
ONSET, NEARLY = 0.1, 0.03


def beside_vllm(
    by: Sequence[str],
    policy: str = "policy",
    baseline: str = VLLM,
    along: tuple[str, Callable[[pd.DataFrame], Mapping[str, pd.Series]]] | None = None,
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Means over seeds, and seed by seed what is gained over vLLM in the same setting: TTFT as a
    factor, throughput as a change, violations as a difference of shares.

    along  an axis, and what is asked of the rows along it, in one setting, of one policy and one
           seed: further columns
    """

    def table(points: pd.DataFrame) -> pd.DataFrame:
        key = [name for name in by if name != policy] + ["seed"]
        joined = gained(points, points[points[policy] == baseline], key, GAINS)
        more = []
        if along is not None:
            axis, asked = along
            same = [*(name for name in by if name != axis), "seed"]
            found = [
                pd.DataFrame(asked(part))
                for _, part in joined.sort_values(axis).groupby(same, sort=False)
            ]
            more = list(found[0])
            joined = joined.join(pd.concat(found))
        return over_seeds(joined, list(by), [*VALUES, *GAINS, *more])

    return table


def of_contexts(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """queued_part: of TTFT; growth: of TTFT since the shortest context, over that of TPOT."""
    grown = (rows.ttft_s / rows.ttft_s.iloc[0]) / (rows.tpot_s / rows.tpot_s.iloc[0])
    return {"queued_part": rows.queueing_s / rows.ttft_s, "growth": grown}


def of_degrees(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """narrowed: by how much the gap to vLLM's throughput is smaller than at the degree before; nan
    at the first."""
    return {"narrowed": -rows.throughput_change.abs().diff()}


def of_rates(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """onset: the lowest rate at which violations pass 10 %, in every row; nan: none."""
    return {"onset": pd.Series(rows[rows.violations > ONSET].rate.min(), rows.index)}


def of_links(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """What contention changes: the rows without it are the first."""
    alone = rows.iloc[0]
    return {
        "ttft_more": rows.ttft_s / alone.ttft_s - 1,
        "tpot_more": rows.tpot_s / alone.tpot_s - 1,
        "tokens_more": rows.tokens_per_s / alone.tokens_per_s - 1,
        "violations_more": rows.violations - alone.violations,
    }


def _at(row: pd.Series, axis: str, unit: str) -> str:
    return f"{row.model}, {row[axis]:g} {unit}"


def _factor(row: pd.Series, column: str) -> str:
    return f"x {shown(row[column], row[f'{column}_ci'])}"


def _best(table: pd.DataFrame, policy: str, column: str) -> pd.Series:
    part = table[table.policy == policy]
    return part.loc[part[column].idxmax()]


def _there(table: pd.DataFrame, readings: Mapping[str, str]) -> dict[str, str]:
    """Those of the readings that the table has rows of."""
    return {policy: said for policy, said in readings.items() if (table.policy == policy).any()}


def _up_to(
    table: pd.DataFrame,
    where: str,
    what: str,
    paper: float,
    column: str,
    axis: str,
    unit: str,
    why: str,
    readings: Mapping[str, str] = READINGS,
) -> list[Claim]:
    """The largest gain over the settings, where the paper says `up to`; for all readings of
    Algorithm 1."""
    found = []
    for policy, reading in _there(table, readings).items():
        best = _best(table, policy, column)
        verdict = judge(best[column], best[f"{column}_ci"], paper, 1.0)
        ours = f"{_factor(best, column)} ({_at(best, axis, unit)})"
        found.append(
            Claim.judged(
                where,
                f"{what}; {reading}",
                f"up to x {paper:g}",
                ours,
                verdict,
                why,
                policy in DIRECTED,
            )
        )
    return found


def breakdown_claims(table: pd.DataFrame) -> list[Claim]:
    """Fig. 1, from vLLM's rows of Fig. 4."""
    rows = table[(table.policy == VLLM) & (table.model == "llama-2-7b")].sort_values("context")
    told = {
        row.context: judge_bound(row.queued_part - 0.5, row.queued_part_ci)
        for row in rows.itertuples()
    }
    longer = [
        judge_bound(0.5 - row.queued_part, row.queued_part_ci)
        for row in rows.itertuples()
        if row.context < 1024
    ]
    verdict = worst(*longer, *(found for context, found in told.items() if context >= 1024))
    # it is with long prompts, but begins elsewhere
    if verdict == "differs" and list(told.values())[-1] == "agrees":
        verdict = "direction only"
    queued = [context for context, found in told.items() if found == "agrees"]
    here = rows[rows.context == 1024]
    texts = [f"surely from {queued[0]:,} tokens" if queued else "never surely"]
    texts += [
        f"{shown(100 * r.queued_part, 100 * r.queued_part_ci)} % of TTFT at 1,024"
        for r in here.itertuples()
    ]
    what = "queueing is the larger part of TTFT, Llama-2-7B on one L20, 1 request/s"
    found = [
        Claim.judged("Fig. 1", what, "from 1,024 tokens", "; ".join(texts), verdict, WHY_BREAKDOWN)
    ]
    low, high = rows.iloc[0], rows.iloc[-1]
    what = (
        f"growth from {low.context:,.0f} to {high.context:,.0f} tokens of prompt: TTFT much "
        "faster than TPOT"
    )
    ours = f"TTFT x {high.ttft_s / low.ttft_s:,.0f}, TPOT x {high.tpot_s / low.tpot_s:.3g}"
    verdict = judge_bound(high.growth - 2, high.growth_ci)
    return [
        *found,
        Claim.judged("Fig. 1", what, "quadratic against linear", ours, verdict, WHY_BREAKDOWN),
    ]


def context_claims(table: pd.DataFrame) -> list[Claim]:
    """The paper's gain is an order of magnitude, so the nearest power of ten is compared, at both
    ends of the interval."""
    what = "mean TTFT, vLLM over LayerKV, contexts of 128 to 16k, 1 request/s"
    readings = _there(table, READINGS | LENGTHS)
    gains = _up_to(table, "Fig. 4", what, 10, "ttft_gain", "context", "tokens", "", readings)
    found = []
    for claim, policy in zip(gains, readings, strict=True):
        best = _best(table, policy, "ttft_gain")
        ends = (best.ttft_gain - best.ttft_gain_ci, best.ttft_gain + best.ttft_gain_ci)
        verdict = claim.verdict
        if verdict in ("agrees", "near", "direction only"):
            magnitude = all(10**0.5 <= end < 10**1.5 for end in ends)
            verdict = "agrees" if magnitude else "direction only"
        found.append(
            Claim.judged(
                "Fig. 4",
                claim.what,
                "up to an order of magnitude",
                claim.ours,
                verdict,
                WHY_CONTEXT,
                policy in DIRECTED,
            )
        )
    return found + _throughput(
        table, "Fig. 4", "contexts", "nearly identical", WHY_CONTEXT_THROUGHPUT
    )


def _throughput(
    table: pd.DataFrame, where: str, over: str, paper: str, why: str, lower: bool = False
) -> list[Claim]:
    """No change beyond `NEARLY` in any setting; lower: none below it."""
    found = []
    for model, mine in table[table.policy.isin(READINGS)].groupby("model", sort=False):
        texts = []
        for policy in _there(mine, READINGS):
            part = mine[mine.policy == policy]
            change = -part.throughput_change if lower else part.throughput_change.abs()
            most = part.loc[change.idxmax()]
            half = round(100 * most.throughput_change_ci, 6)
            size = shown(100 * most.throughput_change, half, 2)
            texts.append(f"{BRIEF.get(policy, '')}{size} %")
            if policy == "layerkv":
                told = zip(change, part.throughput_change_ci, strict=True)
                verdict = worst(*(judge_bound(NEARLY - one, ci) for one, ci in told))
        what = (
            f"throughput, LayerKV over vLLM, {model}: {'lowest' if lower else 'largest'} "
            f"change over {over}"
        )
        found.append(Claim.judged(where, what, paper, "; ".join(texts), verdict, why, False))
    return found


def degree_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for context, part in table.groupby("context", sort=False):
        ours = part[part.policy == "layerkv"].sort_values("tp")
        what = f"mean TTFT, vLLM over LayerKV, Yi-34B-200K, {context:,} tokens, 1 request/s"
        for policy, reading in _there(part, READINGS | LENGTHS).items():
            rows = part[part.policy == policy].sort_values("tp")
            said = f"{what}; {reading}"
            found.append(_above_one(said, rows, "tp{r.tp}", WHY_DEGREE, policy == "layerkv"))
        verdict = worst(
            *(judge_bound(row.narrowed, row.narrowed_ci) for row in ours.iloc[1:].itertuples())
        )
        changes = zip(
            ours.tp, 100 * ours.throughput_change, 100 * ours.throughput_change_ci, strict=True
        )
        said = "; ".join(
            f"tp{tp}: {shown(change, round(half, 6), 2)} %" for tp, change, half in changes
        )
        what = (
            f"throughput, LayerKV over vLLM, {context:,} tokens: the gap narrows with each degree"
        )
        found.append(Claim.judged("Fig. 5", what, "narrows", said, verdict, WHY_NARROWS))
    return found


def _above_one(what: str, rows: pd.DataFrame, name: str, why: str, directed: bool = False) -> Claim:
    """Of Fig. 5: TTFT is lower in each of `rows`, which are called as `name` says. directed: no
    variant of ours."""
    ours = "; ".join(f"{name.format(r=r)}: {_factor(r, 'ttft_gain')}" for _, r in rows.iterrows())
    verdict = worst(*(judge_direction(r.ttft_gain - 1, r.ttft_gain_ci) for r in rows.itertuples()))
    said = "above 1 at every degree"
    return Claim.judged("Fig. 5", what, said, ours, verdict, why, directed)


def link_claims(table: pd.DataFrame) -> list[Claim]:
    """Fig. 5 at four and eight ranks, by the rate of their all-reduces."""
    found = []
    for (context, factor), part in table.groupby(["context", "allreduce"], sort=False):
        for variant in ("LayerKV", "no Algorithm 1"):
            what = (
                f"mean TTFT, vLLM over LayerKV, Yi-34B-200K, {context:,} tokens, all-reduces at "
                f"{factor:g} times the profile's rate; {variant}"
            )
            rows = part[part.variant == variant].sort_values("tp")
            found.append(_above_one(what, rows, "tp{r.tp}", WHY_LINK))
    return found


def rate_claims(table: pd.DataFrame) -> list[Claim]:
    what = "mean TTFT, vLLM over LayerKV, ShareGPT lengths"
    found = _up_to(table, "Fig. 6", what, 69, "ttft_gain", "rate", "requests/s", WHY_RATE)
    return found + _throughput(
        table, "Fig. 6", "rates", "below 3 % lower", WHY_THROUGHPUT, lower=True
    )


def tail_claims(table: pd.DataFrame) -> list[Claim]:
    what = "P99 TTFT, vLLM over LayerKV, ShareGPT lengths"
    return _up_to(table, "Fig. 7", what, 45, "p99_gain", "rate", "requests/s", WHY_RATE)


def violation_claims(table: pd.DataFrame) -> list[Claim]:
    rows = table[table.model == "llama-2-7b"]
    vllm = rows[rows.policy == VLLM].sort_values("rate")
    onset = vllm.onset.iloc[0]
    verdict = judge(onset, vllm.onset_ci.iloc[0], 6.0, None)
    said = (
        f"from {shown(onset, vllm.onset_ci.iloc[0])} requests/s"
        if np.isfinite(onset)
        else "not with every seed"
    )
    what = "vLLM's violations pass 10 %, Llama-2-7B"
    found = [Claim.judged("Fig. 8", what, "near 6 requests/s", said, verdict, WHY_ONSET, False)]
    loaded = rows[rows.rate.isin(vllm[vllm.violations > ONSET].rate)]
    loaded = loaded if len(loaded) else rows[rows.rate == rows.rate.max()]
    for policy, reading in _there(loaded, READINGS).items():
        part = loaded[loaded.policy == policy]
        low, high = (
            part.loc[part.fewer_violations.idxmin()],
            part.loc[part.fewer_violations.idxmax()],
        )
        verdict = worst(
            *(
                judge_direction(row.fewer_violations, row.fewer_violations_ci)
                for row in part.itertuples()
            ),
            *(
                judge(row.fewer_violations, row.fewer_violations_ci, ends)
                for row, ends in ((low, 0.177), (high, 0.287))
            ),
        )
        texts = [
            shown(100 * row.fewer_violations, 100 * row.fewer_violations_ci) for row in (low, high)
        ]
        ours = f"{texts[0]} to {texts[1]} points"
        what = f"violations, LayerKV below vLLM where vLLM has some, Llama-2-7B; {reading}"
        found.append(
            Claim.judged(
                "Fig. 8", what, "17.7 to 28.7 %", ours, verdict, WHY_VIOLATIONS, policy in DIRECTED
            )
        )
    return [*found, _without_slo(rows)]


def _without_slo(rows: pd.DataFrame) -> Claim:
    """At the rate nearest to 5.5 requests/s."""
    rate = min(rows.rate.unique(), key=lambda r: abs(r - 5.5))
    here = rows[rows.rate == rate].set_index("policy")
    shares = [
        f"{shown(100 * here.violations[p], 100 * here.violations_ci[p])} %"
        for p in (VLLM, NO_SLO, "layerkv", SAVABLE)
    ]
    worse = judge_direction(-here.fewer_violations[NO_SLO], here.fewer_violations_ci[NO_SLO])
    tpot = (
        judge_direction(here.more_tpot_violations[NO_SLO], here.more_tpot_violations_ci[NO_SLO])
        == "agrees"
    )
    what = (
        f"violations at {rate:g} requests/s: vLLM; LayerKV without the SLO-aware scheduler; "
        "with it; savable"
    )
    verdict: Verdict = "direction only" if worse == "differs" and tpot else worse
    said = "without it occasionally above vLLM, by TPOT"
    return Claim.judged("Fig. 8", what, said, "; ".join(shares), verdict, WHY_NO_SLO)


WHY_BREAKDOWN = (
    "Where it begins depends on how many requests are there at once, and so on arrivals; the "
    "paper gives neither these "
    "nor the block count. With half of the blocks (figure `settings`) queueing is the larger "
    "part at 1,024 tokens."
)
WHY_CONTEXT = (
    "The gain is largest where vLLM's memory is just too small: vLLM's queue then grows to the "
    "end of the run and LayerKV's does not. With more memory it shrinks, and below vLLM's capacity "
    "(0.2 requests/s) it does not differ significantly from none (figure `settings`)."
)
WHY_CONTEXT_THROUGHPUT = (
    "The rate is far beyond capacity at long contexts. Lower, where steps fetch layers for "
    "longer than they compute: with "
    "four times the PCIe rate the loss shrinks (figure `settings`). Higher, where vLLM "
    "recomputes what it preempts, which "
    "LayerKV does not: a vLLM that swaps has as much; and at 16k, where memory holds few such "
    "prompts: with a quarter more "
    "of it vLLM has as much (figure `higher`)."
)
WHY_THROUGHPUT = (
    "Algorithm 1 keeps the TPOT objective, which vLLM does not on this profile, by beginning "
    "fewer prompts. Without it "
    "(`slo_aware=false` in the table) throughput is vLLM's."
)
WHY_DEGREE = (
    "Memory suffices on eight GPUs, and on four at 1,024 tokens: with four times as much vLLM has "
    "the same numbers. On four GPUs at 4,096 tokens it gains a little (figure `links`). "
    "Algorithm 1 makes LayerKV slower: it keeps a TPOT of 0.2 s for more requests than vLLM does "
    "by letting prompts wait. Without it (`slo_aware=false` in the table) LayerKV is not slower "
    "than vLLM. Faster all-reduces: figure `links`."
)
WHY_LINK = (
    "Rows of the same figure: vLLM with four times the memory says how much there is to gain, "
    "LayerKV without Algorithm 1 how much of it LayerKV gets. Algorithm 1 makes prompts wait as "
    "long as steps pass the TPOT objective, which they do less with faster all-reduces."
)
WHY_NARROWS = (
    "The gap that is left with more GPUs is Algorithm 1's, which lets prompts wait: without it "
    "(`slo_aware=false` in the "
    "table) there is none with eight."
)
WHY_RATE = (
    "As printed, a request with a negative allowance holds all prompts up: leaving those out gives "
    "the gain of no Algorithm 1 back, known lengths a part of it, another TPOT in eq. 1 none "
    "(figure `rules`). With any number parked as well TTFT is lower still, and more miss their "
    "TPOT: that one of the four cells comes nearest to the paper (figure `trade`). On larger "
    "models the TPOT objective makes prompts wait: without Algorithm 1 (`slo_aware=false` in the "
    "table) Yi-34B gains, and Llama-3.1-70B, which preempts nobody, has vLLM's numbers."
)
WHY_ONSET = (
    "Overload begins at a rate that depends on the lengths that a seed draws: the onset of a "
    "single seed is any of several "
    "rates of the sweep."
)
WHY_VIOLATIONS = (
    "As printed, Algorithm 1 gives the gain in TTFT away (see Fig. 6); without the requests that "
    "are late in any case it is left (figure `rules`). Seeds overload at different rates, so "
    "intervals are wide."
)
WHY_NO_SLO = (
    "At this rate neither has many violations, and seeds differ by more than the policies do. "
    "What the paper says needs a vLLM "
    "without violations by TTFT at a rate where LayerKV has some by TPOT; here TTFT is what vLLM "
    "misses first."
)
