"""Why our numbers differ from Echo's: the run that shows it, or what was tried without success."""

from __future__ import annotations

from twinserve.experiments.echo.points import ARRIVAL, AT_ONCE, BASE, OVER_TIME, PRINTED

NOT_KNOWN = "Not known: no run of this study changes what could be the cause."
_ORDER = (
    "The order of the pool, which is not printed: shuffled it gives this, listed by document "
    "x 0.92 (`pool listed by document` of `settings`)."
)
_ONE_DAY = (
    "A single day has no interval; five seeds of one minute an hour have one (`fig8` to `fig10`)."
)
DAY = NOT_KNOWN
_SLACK = (
    "SLO_r as printed gives slack for a first token that comes early, and offline work uses it: "
    "with `slo=gap` and the same exact step times all keep mean TPOT (`fig7`, rows of `perfect`)."
)
_SUM = (
    "Eq. 8 lets the longer phase hide the shorter one: with both added up all keep their "
    "objectives (`sums, TPOT bounds gaps` of `settings`)."
)
_PRINTED = f"{_SUM} {_SLACK}"
_ONE_MU = (
    "One mu for all batches lies between weights, which are read once, and attention, which adds "
    "up: with both added all keep their objectives (`sums, TPOT bounds gaps` of `settings`)."
)
SPEEDUP = {"paper": _SLACK, "echo-printed": _PRINTED, "echo-sum": _ORDER, "perfect": _ORDER}
BS_512 = (
    "Which step the paper's BS runs is not printed, and the gain depends on it: BS itself does "
    "less with 512 tokens a step (`fig6`, row `echo-bs, 512 tokens a step`)."
)
E = (
    "Short iterations cost throughput: against a BS with 512 tokens a step, whose iterations are "
    "about as short, little or nothing is lost (`fig6`, `speedup_512`)."
)
E_512 = (
    "The bound: on long documents steps of 512 tokens take BS 70 ms, and E ends its steps after "
    "51. With a TPOT of 100 ms E serves x 1.06 of that BS instead of x 0.91 (seed 0)."
)
M = (
    "The hit rate is the same with and without M (`hit_rate` of `fig6`): what is wanted is not "
    "evicted by last use either. Beside the other documents M gains."
)
NO_SHARING = (
    "Chats share no text (hit rate 0 in `fig6`), so there is nothing to choose by; beside "
    "documents S gains (the other rows of `fig6`)."
)
TPOT = {
    "paper": _SLACK,
    "echo-printed": _PRINTED,
    "echo-sum": NOT_KNOWN,
    "perfect": NOT_KNOWN,
    PRINTED: _SLACK,
}
TTFT = (
    "An online request waits for the step under way, and nothing bounds BS's: with 512 tokens a "
    "step its median falls to a third (`fig7`, row `echo-bs, 512 tokens a step`)."
)
OPPOSITE = NOT_KNOWN
HITS = (
    "What is shared is found: 86 % of the prompt tokens in this pool, 78 % in those that share "
    "less, as in the paper (`hit_rate` of `fig6`)."
)
PEAK = (
    "By reward the scheduler itself goes for cached text, so an LRU cache loses too little to tell "
    "(a drop of 4 points). First come, first served loses 20 points (`cache`)."
)
OCCUPIED = (
    "What counts as occupied, and how much memory there is. With half of the KV blocks 78 % of the "
    "steps are above half. With the cached text of offline requests counted, 92 % of the minutes "
    "are (seed 0, `watch` of experiments/echo/runs.py; 1.5 % without either)."
)
BUSY = (
    "Alone some of them miss their objectives as well (`busy`, row `online alone`). More do beside "
    "offline work by the estimate and the slack of SLO_r: in the busiest minute of seed 0 70 % "
    "keep them alone, 62 % with exact step times and `slo=gap`, and 7 % as in this figure."
)
ARRIVALS = (
    "The bursts of a minute, drawn anew each minute, cannot be foretold: without them (the rows "
    "with bursts 0 of `fig11`) the fit is close."
)
# how the tide goes
MEMORY = {
    "level": NOT_KNOWN,
    "rising": (
        "While the tide rises an hour of history is too low: what five minutes foretell is "
        "exceeded less (`memory`, rows with a rising tide)."
    ),
}
SHARED = (
    f"{_ORDER} Objectives are lost by the estimate: one factor for all batches (`estimate "
    "corrected`) is not enough, while both phases added keep all (rows `Echo`)."
)
# what is changed in figure `settings` -> the run beside it that shows why
SETTINGS = {
    BASE: _SLACK,
    "eq. 8 as printed": _PRINTED,
    "cached text counts": f"{_SLACK} What counts as gained changes little (`as in Fig. 6`).",
    "TPOT bounds gaps": _ONE_MU,
    "climb": _SLACK,
    "total context in eq. 7": _SLACK,
    "total context in eq. 7, TPOT bounds gaps": _ONE_MU,
    "sums": f"{_SLACK} So does `sums, TPOT bounds gaps`.",
    "sums, TPOT bounds gaps": _ORDER,
    "estimate corrected, TPOT bounds gaps": (
        f"{_ONE_MU} One factor for all batches is not enough: this run has it."
    ),
    "exact step times": f"{_SLACK} So does `exact step times, TPOT bounds gaps`.",
    "exact step times, TPOT bounds gaps": _ORDER,
    "sums, TPOT bounds gaps, no threshold": (
        "The threshold keeps memory that this load does not need: with it (`sums, TPOT bounds "
        "gaps`) as much is done."
    ),
    "sums, TPOT bounds gaps, pool listed by document": (
        "The gain is that of the order: BS finds as much in its cache as Echo then (`hit_rate` of "
        "this row)."
    ),
    "sums, TPOT bounds gaps, one and a half of the online rate": (
        "Seeds differ: 67 to 99.8 % keep. In the worst one (seed 3) 95 % keep alone, and 83 % with "
        "exact step times: half of the loss is the estimate's."
    ),
    "sums, TPOT bounds gaps, half of the KV memory": (
        "BS does less with half of the memory (`offline_tps` of this row), and Echo as much as "
        "with all of it (`sums, TPOT bounds gaps`)."
    ),
    "sums, TPOT bounds gaps, 512 tokens a step": (
        "BS does less with 512 tokens a step (`fig6`), and Echo, whose steps were as short before, "
        "as much."
    ),
}
# in what order offline requests are begun in figure `cache` -> why LRU's hit rate does not drop;
# why a part of M gains nothing
_SAME_HITS = (
    "By reward the scheduler itself goes for cached text, so LRU evicts little that is wanted: its "
    "hit rate is the same at trough and peak, as with 18 documents (seed 0)."
)
LRU = {
    ARRIVAL: "It drops in the mean; few documents are begun in a minute, so seeds differ by much.",
    AT_ONCE: _SAME_HITS,
    OVER_TIME: _SAME_HITS,
}
CACHE = {
    ARRIVAL: NOT_KNOWN,
    AT_ONCE: NOT_KNOWN,
    OVER_TIME: (
        "What comes one by one is asked while its document is cached: hit rates differ by 0.3 "
        "points, those of a pool submitted at once by 3 (rows `by reward`)."
    ),
}


def of_one_day(why: str) -> str:
    """Of a claim on a single day: a cause of its size stays."""
    return " ".join([*([why] if why in (HITS, OCCUPIED) else []), _ONE_DAY]) if why else ""
