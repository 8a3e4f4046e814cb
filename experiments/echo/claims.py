"""Compare what the Echo paper says with our tables. It prints few numbers: x3.3, 78.6 %, 95 %, 6 x,
> 50 %, 90 %. The words are in texts.yaml."""

from dataclasses import replace

import pandas as pd

from twinserve.experiments.echo.points import ALONE, BS_512, PARTS, PRINTED
from twinserve.experiments.echo.runs import AIM, LADDER
from twinserve.experiments.study.claims import Number, Row, most, rows_of, teller, texts
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
NO_STEP = 0.02  # a change of throughput that is none
NO_DROP = 0.05  # of a hit rate
tell = teller(TEXTS)


def _keeping(row: Row) -> Verdict:
    """What x 3.3 with the online objectives kept is: both."""
    return worst(row.attainment.above(AIM), row.speedup.beside(SPEEDUP, 1.0))


def day_claims(table: pd.DataFrame) -> list[Claim]:
    row = rows_of(table)[0]
    return [tell("day", row.ratio.beside(PEAK_OVER_TROUGH, 1.0), row)]


# -- Fig. 6 ----------------------------------------------------------------------------------------
def throughput_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for estimator, said in BELIEFS.items():
        mine = table[table.estimator == estimator]
        if mine.empty:
            continue
        echo = rows_of(mine, policy=ECHO)
        best = most([row for row in echo if row.attainment.mean >= AIM] or echo, "speedup")
        why = TEXTS.SPEEDUP[estimator]
        found.append(tell("speedup", _keeping(best), best, said=said, why=why))
        if best.speedup_512.known:  # BS as an engine of the paper's time ran it
            verdict = best.speedup_512.beside(SPEEDUP, 1.0)
            found.append(tell("speedup_512", verdict, best, said=said))
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
    found = [tell("e", _slightly_below(e.speedup), e, setting=setting)]
    if e.speedup_512.known:
        found.append(tell("e_512", _slightly_below(e.speedup_512), e, setting=setting))
    verdict = worst(*((row.step - 1).above(NO_STEP) for row in above))
    over_bs = ", ".join(f"x {row.speedup}" for row in (e, *above))
    steps = ", ".join(f"x {row.step}" for row in above)
    why = TEXTS.NO_SHARING if setting.startswith("sharegpt") else TEXTS.M
    said = {"setting": setting, "over_bs": over_bs, "steps": steps, "why": why}
    return [*found, tell("rungs", verdict, **said)]


def cache_claims(table: pd.DataFrame) -> list[Claim]:
    """M of Figs. 6 and 9, in parts, in settings of ours."""
    found = []
    for row in rows_of(table):
        if row.part == PARTS[0]:
            found.append(tell("lru", row.drop.above(NO_DROP), row, why=TEXTS.LRU[row.order]))
            continue
        said = "M's eviction order" + ("" if row.part == PARTS[1] else " and threshold")
        verdict, why = (row.gain - 1).above(NO_STEP), TEXTS.CACHE[row.order]
        found.append(tell("eviction", verdict, row, said=said, why=why))
    return found


def setting_claims(table: pd.DataFrame) -> list[Claim]:
    """Compare each variant with x3.3, objectives kept. Each is labelled, none is a default."""
    return [
        tell("setting", _keeping(row), row, why=TEXTS.SETTINGS[row.change])
        for row in rows_of(table, policy=ECHO)
    ]


# -- Fig. 7 ----------------------------------------------------------------------------------------
def latency_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for estimator, said in BELIEFS.items():
        rows = {row.policy: row for row in rows_of(table, quantile=0.5, estimator=estimator)}
        for policy in (BS_E, BS_E_S, ECHO, PRINTED):
            if policy in rows:
                verdict = rows[policy].attainment.above(AIM)
                why = TEXTS.TPOT[PRINTED if policy == PRINTED else estimator]
                found.append(tell("in_time", verdict, rows[policy], said=said, why=why))
        if {BS, ECHO} <= set(rows):
            lowest = rows[BS].ttft_s.mean
            others = [rows[name] for name in rows if name not in (BS, BS_512, PRINTED, ALONE)]
            verdict = worst(*(row.ttft_more.more(whole=lowest) for row in others))
            medians = ", ".join(f"{name} {1000 * row.ttft_s} ms" for name, row in rows.items())
            found.append(tell("ttft", verdict, said=said, medians=medians))
    return found


# -- Figs. 8 to 10 ---------------------------------------------------------------------------------
def opposite_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        tell("opposite", row.correlation.below(), row, said=BELIEFS[row.estimator])
        for row in rows_of(table, policy=ECHO)
    ]


def hit_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in rows_of(table):
        said, stable = BELIEFS[row.estimator], row.policy == ECHO
        if stable:
            found.append(tell("hits", row.hit_rate.beside(HIT_RATE), row, said=said))
        if row.drop.known:  # else nothing offline was begun in one of them
            verdict = abs(row.drop).below(NO_DROP) if stable else row.drop.above(NO_DROP)
            printed = "stable" if stable else "drops"
            found.append(tell("peak", verdict, row, said=said, printed=printed))
    return found


def occupied_claims(table: pd.DataFrame) -> list[Claim]:
    return [
        tell("occupied", row.half_full.above(0.5), row, said=BELIEFS[row.estimator])
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
        follows = row.correlation.above()
        close = "agrees" if row.correlation.above(0.9) == "agrees" else "direction only"
        found.append(tell("follows", close if follows == "agrees" else follows, row))
        within = 1 - row.above_high
        found.append(tell("within", within.beside(COVERED), row, within=within))
    return found


def memory_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for row in rows_of(table):
        within = 1 - row.exceeded
        said = {"minutes": row.history_s / 60, "within": within, "spared": 100 * row.spare}
        why = TEXTS.MEMORY[row.tide]
        found.append(tell("memory", within.beside(COVERED), row, **said, why=why))
    return found
