"""What the Echo paper says beside what our tables say. It prints few numbers: x3.3, 78.6 %, 95 %, 6
x, > 50 %, 90 %."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from twinserve.experiments.echo import causes
from twinserve.experiments.echo.points import ALONE, BS_512, PARTS, PRINTED, SHORT
from twinserve.experiments.echo.runs import AIM, LADDER
from twinserve.experiments.study.verdict import (
    Claim,
    Verdict,
    judge,
    judge_bound,
    judge_direction,
    worst,
)
from twinserve.sim.sweep.statistics import shown

BS, BS_E, BS_E_S, ECHO = LADDER
BELIEFS = {
    "paper": "eqs. 6, 7 and the sentence before 8, slo=cumulative",
    "echo-printed": "eqs. 6-8 as printed, slo=cumulative",
    "echo-sum": "sums, slo=gap",
    "perfect": "exact step times, slo=gap",
}
SPEEDUP, HIT_RATE, PEAK_OVER_TROUGH, COVERED = 3.3, 0.786, 6.0, 0.95
NO_STEP = 0.02  # a change of throughput that is none
NO_DROP = 0.05  # of a hit rate


def _text(row: pd.Series, column: str, factor: float = 1.0, unit: str = "") -> str:
    return shown(factor * row[column], factor * row[f"{column}_ci"]) + unit


def _keeping(row: Mapping) -> Verdict:
    """What x 3.3 with the online objectives kept is: both."""
    kept = judge_bound(row["attainment"] - AIM, row["attainment_ci"])
    return worst(kept, judge(row["speedup"], row["speedup_ci"], SPEEDUP, 1.0))


def day_claims(table: pd.DataFrame) -> list[Claim]:
    row = table.iloc[0]
    verdict = judge(row.ratio, row.ratio_ci, PEAK_OVER_TROUGH, 1.0)
    what = (
        "requests from 12:00 to 14:00 over those from 4:00 to 6:00 (the generator's shape is "
        "the paper's)"
    )
    return [
        Claim.judged("Fig. 2", what, "about x 6", f"x {_text(row, 'ratio')}", verdict, causes.DAY)
    ]


def throughput_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for estimator, said in BELIEFS.items():
        mine = table[table.estimator == estimator]
        if mine.empty:
            continue
        echo = mine[mine.policy == ECHO]
        among = echo[echo.attainment >= AIM] if (echo.attainment >= AIM).any() else echo
        best = among.loc[among.speedup.idxmax()]
        ours = (
            f"x {_text(best, 'speedup')} ({best.pool}); online objectives kept by "
            f"{_text(best, 'attainment', 100, ' %')}"
        )
        what = (
            "offline tokens/s, Echo over BS: the most with online objectives kept (if there "
            f"is one); {said}"
        )
        found.append(
            Claim.judged(
                "Fig. 6",
                what,
                f"up to x {SPEEDUP:g}",
                ours,
                _keeping(best),
                causes.SPEEDUP[estimator],
            )
        )
        found += _over_512(best, said)
        for pool, part in mine.groupby("pool", sort=False):
            rows = part.set_index("policy")
            found += _rungs(rows, f"{pool}; {said}")
    return found


def _over_512(best: pd.Series, said: str) -> list[Claim]:
    """The same over a BS that runs as an engine of the paper's time did."""
    if not np.isfinite(best.speedup_512):
        return []
    verdict = judge(best.speedup_512, best.speedup_512_ci, SPEEDUP, 1.0)
    what = f"the same over BS with 512 tokens a step; {said}"
    ours = f"x {_text(best, 'speedup_512')} ({best.pool})"
    return [Claim.judged("Fig. 6", what, f"up to x {SPEEDUP:g}", ours, verdict, causes.BS_512)]


def _slightly_below(ratio: float, half: float) -> Verdict:
    verdict = judge_bound(1 - ratio, half)
    return "direction only" if verdict == "agrees" and ratio < 0.9 else verdict


def _rungs(rows: pd.DataFrame, setting: str) -> list[Claim]:
    """The order of the ladder in one setting, as far as its rungs were run."""
    if BS_E not in rows.index:
        return []
    found = []
    e, above = rows.loc[BS_E], rows.loc[[BS_E_S, ECHO]]
    verdict = _slightly_below(e.speedup, e.speedup_ci)
    what = f"offline tokens/s, BS+E over BS, {setting}"
    found.append(
        Claim.judged(
            "Fig. 6", what, "slightly below 1", f"x {_text(e, 'speedup')}", verdict, causes.E
        )
    )
    if np.isfinite(e.speedup_512):
        what, ours = f"{what}, BS with 512 tokens a step", f"x {_text(e, 'speedup_512')}"
        verdict = _slightly_below(e.speedup_512, e.speedup_512_ci)
        found.append(Claim.judged("Fig. 6", what, "slightly below 1", ours, verdict, causes.E_512))
    verdict = worst(
        *(judge_bound(row.step - 1 - NO_STEP, row.step_ci) for row in above.itertuples())
    )
    texts = [f"x {_text(row, 'speedup')}" for _, row in rows.loc[[BS_E, BS_E_S, ECHO]].iterrows()]
    steps = [f"x {_text(row, 'step')}" for _, row in above.iterrows()]
    ours = f"{', '.join(texts)}; seed by seed {', '.join(steps)} over the one before"
    why = causes.NO_SHARING if setting.startswith("sharegpt") else causes.M
    what = f"BS+E, BS+E+S, Echo over BS, {setting}"
    found.append(Claim.judged("Fig. 6", what, "each more than the one before", ours, verdict, why))
    return found


def latency_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    medians = table[table["quantile"] == 0.5]
    for estimator, said in BELIEFS.items():
        rows = medians[medians.estimator == estimator].set_index("policy")
        for policy in (BS_E, BS_E_S, ECHO, PRINTED):
            if policy not in rows.index:
                continue
            row = rows.loc[policy]
            texts = [
                _text(row, name, 100, " %")
                for name in ("ttft_attainment", "tpot_attainment", "in_time")
            ]
            what = f"online requests within 1 s and 50 ms (mean TPOT), {policy}, {SHORT}; {said}"
            ours = f"TTFT {texts[0]}, TPOT {texts[1]}; last token within TTFT + i TPOT {texts[2]}"
            verdict = judge_bound(row.attainment - AIM, row.attainment_ci)
            found.append(
                Claim.judged(
                    "Fig. 7",
                    what,
                    "at least 90 %",
                    ours,
                    verdict,
                    causes.TPOT[PRINTED if policy == PRINTED else estimator],
                    False,
                )
            )
        if {BS, ECHO} <= set(rows.index):
            others = rows.drop([BS, BS_512, PRINTED, ALONE], errors="ignore")
            verdict = worst(
                *(
                    judge_direction(row.ttft_more, row.ttft_more_ci, whole=rows.ttft_s[BS])
                    for row in others.itertuples()
                )
            )
            said_ours = ", ".join(
                f"{name} {_text(row, 'ttft_s', 1000, ' ms')}" for name, row in rows.iterrows()
            )
            what = f"median TTFT, BS is lowest, {SHORT}; {said}"
            found.append(Claim.judged("Fig. 7", what, "lowest", said_ours, verdict, causes.TTFT))
    return found


def opposite_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in table[table.policy == ECHO].to_dict("records"):
        verdict = judge_bound(-row["correlation"], row["correlation_ci"])
        texts = [
            shown(row[name], row[f"{name}_ci"], 2) for name in ("correlation", "correlation_used")
        ]
        said = BELIEFS[row["estimator"]]
        what = f"correlation of active online and offline requests over the day, {said}"
        ours = f"{texts[0]} (of their memory: {texts[1]})"
        found.append(
            Claim.judged("Fig. 8", what, "opposite directions", ours, verdict, causes.OPPOSITE)
        )
    return found


def hit_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for _, row in table.iterrows():
        setting = f"{row.policy}, {BELIEFS[row['estimator']]}"
        if row.policy == ECHO:
            verdict = judge(row.hit_rate, row.hit_rate_ci, HIT_RATE, None)
            what = f"prefix hit rate of offline prompts, {SHORT}, {setting}"
            ours = _text(row, "hit_rate", 100, " %")
            found.append(
                Claim.judged("Fig. 9", what, f"{HIT_RATE:.1%}", ours, verdict, causes.HITS, False)
            )
        if not np.isfinite(row["drop"]):  # nothing offline was begun in one of them
            continue
        ours = (
            f"trough {_text(row, 'hit_rate_trough', 100, ' %')}, peak "
            f"{_text(row, 'hit_rate_peak', 100, ' %')}"
        )
        stable = row.policy == ECHO
        effect = NO_DROP - abs(row["drop"]) if stable else row["drop"] - NO_DROP
        verdict = judge_bound(effect, row.drop_ci)
        what = f"hit rate through the online peak, {setting}"
        found.append(
            Claim.judged(
                "Fig. 9", what, "stable" if stable else "drops", ours, verdict, causes.PEAK, False
            )
        )
    return found


def whole_day_claims(table: pd.DataFrame) -> list[Claim]:
    """Those of Figs. 8 to 10, of a day without a gap."""
    found = [*opposite_claims(table), *hit_claims(table), *occupied_claims(table)]
    return [
        replace(claim, what=f"{claim.what}, whole day", why=causes.of_one_day(claim.why))
        for claim in found
    ]


def cache_claims(table: pd.DataFrame) -> list[Claim]:
    """M of Figs. 6 and 9, in parts, in settings of ours."""
    found = []
    for row in table.to_dict("records"):
        if row["part"] == PARTS[0]:
            ours = f"{shown(100 * row['drop'], 100 * row['drop_ci'])} points"
            verdict = judge_bound(row["drop"] - NO_DROP, row["drop_ci"])
            what = (
                "hit rate of the trough over that of the peak with an LRU cache, 12 "
                f"documents, {row['order']}"
            )
            found.append(
                Claim.judged("Fig. 9", what, "drops", ours, verdict, causes.LRU[row["order"]])
            )
            continue
        more = f"{shown(100 * row['more_hits'], 100 * row['more_hits_ci'])} points"
        ours = f"x {shown(row['gain'], row['gain_ci'])} (hit rate {more} higher)"
        verdict = judge_bound(row["gain"] - 1 - NO_STEP, row["gain_ci"])
        said = (
            "M's eviction order" if row["part"] == PARTS[1] else "M's eviction order and threshold"
        )
        what = f"offline tokens/s, {said} over an LRU cache, 12 documents, {row['order']}"
        found.append(
            Claim.judged("Fig. 6", what, "more", ours, verdict, causes.CACHE[row["order"]])
        )
    return found


def occupied_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in table[table.policy == ECHO].to_dict("records"):
        texts = {
            n: f"{shown(100 * row[n], 100 * row[f'{n}_ci'])} %"
            for n in ("half_full", "online_cached", "offline_cached")
        }
        verdict = judge_bound(row["half_full"] - 0.5, row["half_full_ci"])
        what = (
            "iterations with more than half of the memory occupied by running requests, "
            f"Echo, {BELIEFS[row['estimator']]}"
        )
        ours = (
            f"{texts['half_full']} (free: online {texts['online_cached']}, offline "
            f"{texts['offline_cached']} of the memory)"
        )
        found.append(Claim.judged("Fig. 10", what, "most", ours, verdict, causes.OCCUPIED, False))
    return found


def busiest_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in table[table.policy != ALONE].to_dict("records"):
        kept, missed = (
            shown(100 * row[name], 100 * row[f"{name}_ci"]) for name in ("attainment", "missed")
        )
        verdict = judge_bound(row["attainment"] - AIM, row["attainment_ci"])
        what = f"online requests within 1 s and 50 ms around the busiest minutes, {row['policy']}"
        ours = f"{kept} %; those that miss are {missed} % of the day's"
        found.append(
            Claim.judged("Fig. 7", what, "at least 90 %", ours, verdict, causes.BUSY, False)
        )
    return found


def arrival_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in table.to_dict("records"):
        texts = {
            n: f"{shown(100 * row[n], 100 * row[f'{n}_ci'])} %" for n in ("error", "above_high")
        }
        sign = judge_bound(row["correlation"], row["correlation_ci"])
        close = (
            "agrees"
            if judge_bound(row["correlation"] - 0.9, row["correlation_ci"]) == "agrees"
            else "direction only"
        )
        verdict = close if sign == "agrees" else sign
        what = (
            "arrivals a minute follow the mean of the last 15 minutes (correlation), bursts "
            f"{row['burstiness']:g}"
        )
        ours = f"{shown(row['correlation'], row['correlation_ci'])}; mean error {texts['error']}"
        found.append(Claim.judged("Fig. 11", what, "curves", ours, verdict, causes.ARRIVALS, False))
        verdict = judge(1 - row["above_high"], row["above_high_ci"], COVERED, None)
        what = f"minutes within mean + 2 deviations, bursts {row['burstiness']:g}"
        ours = f"{shown(100 - 100 * row['above_high'], 100 * row['above_high_ci'])} %"
        found.append(
            Claim.judged(
                "Fig. 11",
                what,
                "curves; 95 % of a normal distribution",
                ours,
                verdict,
                causes.ARRIVALS,
                False,
            )
        )
    return found


def memory_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in table.to_dict("records"):
        covered, half = 1 - row["exceeded"], row["exceeded_ci"]
        verdict = judge(covered, half, COVERED, None)
        what = (
            "seconds in which online requests hold no more than mu + 2 sigma of "
            f"{row['history_s'] / 60:g} minutes, {row['tide']} tide, bursts {row['burstiness']:g}"
        )
        ours = (
            f"{shown(100 * covered, 100 * half)} % (kept for nothing: "
            f"{100 * row['spare']:.2g} % of the memory)"
        )
        why = causes.MEMORY[row["tide"]]
        found.append(Claim.judged("Sec. 5.3", what, "95 %", ours, verdict, why, False))
    return found


def sharing_claims(table: pd.DataFrame) -> list[Claim]:
    """x3.3 where decodes on one document read it once."""
    found = []
    for row in table[table.shared_prefix & (table.policy != "BS")].to_dict("records"):
        texts = {n: shown(row[n], row[f"{n}_ci"]) for n in ("speedup", "gain")}
        kept = shown(100 * row["attainment"], 100 * row["attainment_ci"])
        ours = (
            f"x {texts['speedup']}, kept by {kept} %; x {texts['gain']} of {row['policy']} with "
            "attention that reads a document for each"
        )
        what = f"{row['policy']} over BS, {row['pool']}, a document is read once for its decodes"
        verdict, paper = _keeping(row), f"up to x {SPEEDUP:g}, objectives kept"
        found.append(Claim.judged("Fig. 6", what, paper, ours, verdict, causes.SHARED))
    return found


def setting_claims(table: pd.DataFrame) -> list[Claim]:
    """Each variant stands beside x3.3 with the objectives kept; it is labelled, none is a
    default."""
    found = []
    for row in table[table.policy == ECHO].to_dict("records"):
        texts = {n: shown(row[n], row[f"{n}_ci"]) for n in ("speedup", "speedup_rps")}
        kept, in_time = (
            shown(100 * row[name], 100 * row[f"{name}_ci"]) for name in ("attainment", "in_time")
        )
        ours = (
            f"x {texts['speedup']} (requests: x {texts['speedup_rps']}), kept by {kept} %, as "
            f"printed (TTFT + i TPOT) by {in_time} %"
        )
        what = f"Echo over BS, {SHORT}, {row['change']}"
        paper = f"up to x {SPEEDUP:g}, objectives kept"
        found.append(
            Claim.judged(
                "Fig. 6", what, paper, ours, _keeping(row), causes.SETTINGS[row["change"]], False
            )
        )
    return found
