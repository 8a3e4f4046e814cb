"""What the Echo paper says beside what our tables say. It prints few numbers: x3.3, 78.6 %, 95 %, 6
x, > 50 %, 90 %."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from twinserve.experiments.echo.points import ALONE, BS_512, PARTS, PRINTED, SHORT
from twinserve.experiments.echo.runs import AIM, LADDER
from twinserve.experiments.study.claims import Number, Row, most, rows_of, texts
from twinserve.experiments.study.verdict import Claim, Verdict, worst

TEXTS = texts(__file__)
BS, BS_E, BS_E_S, ECHO = LADDER
BELIEFS = {
    "paper": "eqs. 6, 7 and the sentence before 8, slo=cumulative",
    "echo-printed": "eqs. 6-8 as printed, slo=cumulative",
    "echo-sum": "sums, slo=gap",
    "perfect": "exact step times, slo=gap",
}
SPEEDUP, HIT_RATE, PEAK_OVER_TROUGH, COVERED = 3.3, 0.786, 6.0, 0.95
UP_TO = f"up to x {SPEEDUP:g}"
KEEPING = f"{UP_TO}, objectives kept"
NO_STEP = 0.02  # a change of throughput that is none
NO_DROP = 0.05  # of a hit rate


def _per_cent(share: Number) -> str:
    return f"{100 * share} %"


def _keeping(row: Row) -> Verdict:
    """What x 3.3 with the online objectives kept is: both."""
    return worst(row.attainment.above(AIM), row.speedup.beside(SPEEDUP, 1.0))


def day_claims(table: pd.DataFrame) -> list[Claim]:
    ratio = rows_of(table)[0].ratio
    what = (
        "requests from 12:00 to 14:00 over those from 4:00 to 6:00 (the generator's shape is "
        "the paper's)"
    )
    verdict = ratio.beside(PEAK_OVER_TROUGH, 1.0)
    return [Claim.judged("Fig. 2", what, "about x 6", f"x {ratio}", verdict, TEXTS.DAY)]


# -- Fig. 6 ----------------------------------------------------------------------------------------
def throughput_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for estimator, said in BELIEFS.items():
        mine = table[table.estimator == estimator]
        if mine.empty:
            continue
        echo = rows_of(mine, policy=ECHO)
        best = most([row for row in echo if row.attainment.mean >= AIM] or echo, "speedup")
        kept = f"online objectives kept by {_per_cent(best.attainment)}"
        ours = f"x {best.speedup} ({best.pool}); {kept}"
        what = (
            "offline tokens/s, Echo over BS: the most with online objectives kept (if there "
            f"is one); {said}"
        )
        why = TEXTS.SPEEDUP[estimator]
        found.append(Claim.judged("Fig. 6", what, UP_TO, ours, _keeping(best), why))
        if best.speedup_512.known:  # BS as an engine of the paper's time ran it
            verdict = best.speedup_512.beside(SPEEDUP, 1.0)
            what = f"the same over BS with 512 tokens a step; {said}"
            ours = f"x {best.speedup_512} ({best.pool})"
            found.append(Claim.judged("Fig. 6", what, UP_TO, ours, verdict, TEXTS.BS_512))
        for pool, part in mine.groupby("pool", sort=False):
            found += _rungs({row.policy: row for row in rows_of(part)}, f"{pool}; {said}")
    return found


def _slightly_below(ratio: Number) -> Verdict:
    verdict = ratio.below(1)
    return "direction only" if verdict == "agrees" and ratio.mean < 0.9 else verdict


def _rungs(rows: dict[str, Row], setting: str) -> list[Claim]:
    """The order of the ladder in one setting, as far as its rungs were run."""
    if BS_E not in rows:
        return []
    e, *above = (rows[policy] for policy in LADDER[1:])
    what = f"offline tokens/s, BS+E over BS, {setting}"
    over = [(what, e.speedup, TEXTS.E)]
    if e.speedup_512.known:
        over.append((f"{what}, BS with 512 tokens a step", e.speedup_512, TEXTS.E_512))
    found = [
        Claim.judged("Fig. 6", what, "slightly below 1", f"x {by}", _slightly_below(by), why)
        for what, by, why in over
    ]
    verdict = worst(*((row.step - 1).above(NO_STEP) for row in above))
    texts = ", ".join(f"x {row.speedup}" for row in (e, *above))
    steps = ", ".join(f"x {row.step}" for row in above)
    ours = f"{texts}; seed by seed {steps} over the one before"
    why = TEXTS.NO_SHARING if setting.startswith("sharegpt") else TEXTS.M
    what = f"BS+E, BS+E+S, Echo over BS, {setting}"
    found.append(Claim.judged("Fig. 6", what, "each more than the one before", ours, verdict, why))
    return found


def cache_claims(table: pd.DataFrame) -> list[Claim]:
    """M of Figs. 6 and 9, in parts, in settings of ours."""
    found = []
    for row in rows_of(table):
        if row.part == PARTS[0]:
            what = (
                "hit rate of the trough over that of the peak with an LRU cache, 12 "
                f"documents, {row.order}"
            )
            ours, verdict = f"{100 * row.drop} points", row.drop.above(NO_DROP)
            why = TEXTS.LRU[row.order]
            found.append(Claim.judged("Fig. 9", what, "drops", ours, verdict, why))
            continue
        ours = f"x {row.gain} (hit rate {100 * row.more_hits} points higher)"
        said = "M's eviction order" + ("" if row.part == PARTS[1] else " and threshold")
        what = f"offline tokens/s, {said} over an LRU cache, 12 documents, {row.order}"
        verdict, why = (row.gain - 1).above(NO_STEP), TEXTS.CACHE[row.order]
        found.append(Claim.judged("Fig. 6", what, "more", ours, verdict, why))
    return found


def sharing_claims(table: pd.DataFrame) -> list[Claim]:
    """x3.3 where decodes on one document read it once."""
    return [
        Claim.judged(
            "Fig. 6",
            f"{row.policy} over BS, {row.pool}, a document is read once for its decodes",
            KEEPING,
            f"x {row.speedup}, kept by {_per_cent(row.attainment)}; x {row.gain} of {row.policy} "
            "with attention that reads a document for each",
            _keeping(row),
            TEXTS.SHARED,
        )
        for row in rows_of(table[table.policy != "BS"], shared_prefix=True)
    ]


def setting_claims(table: pd.DataFrame) -> list[Claim]:
    """Each variant stands beside x3.3 with the objectives kept; it is labelled, none is a
    default."""
    return [
        Claim.judged(
            "Fig. 6",
            f"Echo over BS, {SHORT}, {row.change}",
            KEEPING,
            f"x {row.speedup} (requests: x {row.speedup_rps}), kept by "
            f"{_per_cent(row.attainment)}, as printed (TTFT + i TPOT) by {_per_cent(row.in_time)}",
            _keeping(row),
            TEXTS.SETTINGS[row.change],
            False,
        )
        for row in rows_of(table, policy=ECHO)
    ]


# -- Fig. 7 ----------------------------------------------------------------------------------------
def latency_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for estimator, said in BELIEFS.items():
        rows = {row.policy: row for row in rows_of(table, quantile=0.5, estimator=estimator)}
        for policy in (BS_E, BS_E_S, ECHO, PRINTED):
            if policy in rows:
                found.append(_in_time(rows[policy], estimator))
        if {BS, ECHO} <= set(rows):
            lowest = rows[BS].ttft_s.mean
            others = [rows[name] for name in rows if name not in (BS, BS_512, PRINTED, ALONE)]
            verdict = worst(*(row.ttft_more.more(whole=lowest) for row in others))
            ours = ", ".join(f"{name} {1000 * row.ttft_s} ms" for name, row in rows.items())
            what = f"median TTFT, BS is lowest, {SHORT}; {said}"
            found.append(Claim.judged("Fig. 7", what, "lowest", ours, verdict, TEXTS.TTFT))
    return found


def _in_time(row: Row, estimator: str) -> Claim:
    what = f"online requests within 1 s and 50 ms (mean TPOT), {row.policy}, {SHORT}; "
    ours = (
        f"TTFT {_per_cent(row.ttft_attainment)}, TPOT {_per_cent(row.tpot_attainment)}; last "
        f"token within TTFT + i TPOT {_per_cent(row.in_time)}"
    )
    why = TEXTS.TPOT[PRINTED if row.policy == PRINTED else estimator]
    verdict, what = row.attainment.above(AIM), what + BELIEFS[estimator]
    return Claim.judged("Fig. 7", what, "at least 90 %", ours, verdict, why, False)


def busiest_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim.judged(
            "Fig. 7",
            f"online requests within 1 s and 50 ms around the busiest minutes, {row.policy}",
            "at least 90 %",
            f"{_per_cent(row.attainment)}; those that miss are {_per_cent(row.missed)} of the "
            "day's",
            row.attainment.above(AIM),
            TEXTS.BUSY,
            False,
        )
        for row in rows_of(table[table.policy != ALONE])
    ]


# -- Figs. 8 to 10 ---------------------------------------------------------------------------------
def opposite_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim.judged(
            "Fig. 8",
            "correlation of active online and offline requests over the day, "
            f"{BELIEFS[row.estimator]}",
            "opposite directions",
            f"{row.correlation:2} (of their memory: {row.correlation_used:2})",
            row.correlation.below(),
            TEXTS.OPPOSITE,
        )
        for row in rows_of(table, policy=ECHO)
    ]


def hit_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in rows_of(table):
        setting, stable = f"{row.policy}, {BELIEFS[row.estimator]}", row.policy == ECHO
        if stable:
            what = f"prefix hit rate of offline prompts, {SHORT}, {setting}"
            verdict, ours = row.hit_rate.beside(HIT_RATE), _per_cent(row.hit_rate)
            printed = f"{HIT_RATE:.1%}"
            found.append(Claim.judged("Fig. 9", what, printed, ours, verdict, TEXTS.HITS, False))
        if not row.drop.known:  # nothing offline was begun in one of them
            continue
        trough, peak = _per_cent(row.hit_rate_trough), _per_cent(row.hit_rate_peak)
        verdict = abs(row.drop).below(NO_DROP) if stable else row.drop.above(NO_DROP)
        what, printed = f"hit rate through the online peak, {setting}", ("drops", "stable")[stable]
        ours = f"trough {trough}, peak {peak}"
        found.append(Claim.judged("Fig. 9", what, printed, ours, verdict, TEXTS.PEAK, False))
    return found


def occupied_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim.judged(
            "Fig. 10",
            "iterations with more than half of the memory occupied by running requests, "
            f"Echo, {BELIEFS[row.estimator]}",
            "most",
            f"{_per_cent(row.half_full)} (free: online {_per_cent(row.online_cached)}, offline "
            f"{_per_cent(row.offline_cached)} of the memory)",
            row.half_full.above(0.5),
            TEXTS.OCCUPIED,
            False,
        )
        for row in rows_of(table, policy=ECHO)
    ]


def whole_day_claims(table: pd.DataFrame) -> list[Claim]:
    """Those of Figs. 8 to 10, of a day without a gap."""
    found = [*opposite_claims(table), *hit_claims(table), *occupied_claims(table)]
    return [
        replace(claim, what=f"{claim.what}, whole day", why=_of_one_day(claim.why))
        for claim in found
    ]


def _of_one_day(why: str) -> str:
    """Of a claim on a single day: a cause of its size stays."""
    stays = f"{why} " if why in (TEXTS.HITS, TEXTS.OCCUPIED) else ""
    return f"{stays}{TEXTS.ONE_DAY}" if why else ""


# -- Fig. 11 and Sec. 5.3 --------------------------------------------------------------------------
def arrival_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in rows_of(table):
        bursts, follows = f"bursts {row.burstiness:g}", row.correlation.above()
        close = "agrees" if row.correlation.above(0.9) == "agrees" else "direction only"
        within = 1 - row.above_high
        claims = (
            (
                f"arrivals a minute follow the mean of the last 15 minutes (correlation), {bursts}",
                "curves",
                f"{row.correlation}; mean error {_per_cent(row.error)}",
                close if follows == "agrees" else follows,
            ),
            (
                f"minutes within mean + 2 deviations, {bursts}",
                "curves; 95 % of a normal distribution",
                _per_cent(within),
                within.beside(COVERED),
            ),
        )
        found += [Claim.judged("Fig. 11", *claim, TEXTS.ARRIVALS, False) for claim in claims]
    return found


def memory_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim.judged(
            "Sec. 5.3",
            "seconds in which online requests hold no more than mu + 2 sigma of "
            f"{row.history_s / 60:g} minutes, {row.tide} tide, bursts {row.burstiness:g}",
            "95 %",
            f"{_per_cent(1 - row.exceeded)} (kept for nothing: {100 * row.spare:.2g} % of "
            "the memory)",
            (1 - row.exceeded).beside(COVERED),
            TEXTS.MEMORY[row.tide],
            False,
        )
        for row in rows_of(table)
    ]
