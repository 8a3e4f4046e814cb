"""The chapter of a plan: the ranked rows, cost against what is kept, memory as predicted and as
held, and the command lines."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from twinserve.sim.report.chart import Chart, Curve, best, number
from twinserve.sim.report.found import Found, read_document
from twinserve.sim.report.page import (
    Block,
    Part,
    folded,
    heading,
    listing,
    note,
    paragraph,
    table,
    verdict,
)
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.results.checked import SHAPES, check_shape
from twinserve.sim.results.command import command
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.options import LATENCIES
from twinserve.sim.results.parts import front
from twinserve.sim.results.versions import PLANS

_ANSWERS = ("meets", "undecided", "fails")
# Fields of a question whose flag has another name.
_FLAGS = {
    **{"traces": "trace", "policies": "policy", "routers": "router", "draws": "seeds"},
    **{"peak_s": "peak", "lead_s": "lead", "detection_s": "detection", "all_sizes": "all"},
}


def plan_part(found: Found) -> Part:
    """Raises ResultsError for a file that is no plan."""
    file = found.folder / "plan.json"
    document = read_document(file)
    document = PLANS.read(document, file, ResultsError)
    check_shape(document, SHAPES["plan"], file)
    rows = document["rows"]
    question = document["question"]
    ranked = "dollars" if document["ranked_by"] == "usd" else "GPUs"
    decision = document.get("decision") or {"lines": []}
    nothing = ["Nothing keeps the objectives with so many GPUs"] * (not _enough(rows))
    asked = [f"{question['model']}, ranked by {ranked}", *document.get("asked", [question["slo"]])]
    said = [*document.get("warnings", ()), *document.get("notices", ())]
    blocks: list[Block] = [*verdict([*(decision["lines"] or nothing), *asked])]
    blocks += map(note, said)
    blocks += [_table(rows), *_load(document), *(c for c in page_charts(document) if c.curves)]
    blocks += [paragraph(one["line"]) for one in document.get("savings", ())]
    blocks += _around(rows, question.get("survive"))
    never = [f"{_name(row, rows)}: {row['reason']}" for row in rows if row["status"] == "never"]
    never += [
        f"{one['gpu']} tp{one.get('tp', '')}: {one['reason']}"
        for one in document.get("left_out", ())
    ]
    if never:
        blocks.append(folded("left out, and why", map(paragraph, never)))
    prices = document.get("prices", {})
    known = [p for gpu, p in prices.items() if any(row["gpu"] == gpu for row in rows)]
    if known:
        blocks += [heading("Prices of one GPU for an hour"), _prices(known)]
    for row in rows:
        if row["commands"]:
            router = f"twinserve route --router {row['router']}"
            lines = [*row["commands"], f"{router} --worker=http://HOST:PORT ... (a word a server)"]
            named = f"to start {row['replicas']:g} x {_name(row, rows)}"
            blocks.append(folded(named, [listing("\n".join(lines))]))
    blocks += _day(document.get("day"))
    blocks += [heading("To run it again"), listing(again(question))]
    return Part(found.title, tuple(blocks))


def _prices(prices: Sequence[Mapping]):
    names = ("gpu", "usd_per_hour", "provider", "product", "source", "date")
    head = ["GPU", "$", *names[2:]]
    return table(head, [[str(price.get(name, "")) for name in names] for price in prices])


def _load(document: Mapping) -> Iterator[Chart]:
    """Tokens over time of each trace, with the peak that is judged."""
    for peak in document.get("peaks", ()):
        load = peak.get("load")
        if load:
            at, rate = np.array(load["at_s"]), np.array(load["tokens_per_s"])
            grow = document["question"].get("grow", 1.0)
            begin = peak["window_s"][0] + peak["judged_since_s"] * grow
            marks = ((begin, "the judged peak"), (peak["window_s"][1], ""))
            yield Chart(
                "plan-load",
                f"Load over time, {peak['trace']}",
                "seconds of the recording",
                "tokens a second, prompt and output",
                (Curve("load", at, rate, 0, "step"),),
                f"Tokens that arrive a second, highest {number(float(rate.max()))}; judged from "
                f"{begin:,.0f} to {peak['window_s'][1]:,.0f} s.",
                marks=marks,
            )


def _enough(rows: Sequence[Mapping]) -> list[Mapping]:
    return [row for row in rows if row["status"] == "enough" and row["sized"]]


def _name(row: Mapping, rows: Sequence[Mapping]) -> str:
    parts = [row["gpu"], f"tp{row['tp']:g}"]
    for name in ("policy", "router"):
        parts += [row[name]] if len({other[name] for other in rows}) > 1 else []
    return " ".join(parts)


def _attained(sized: Mapping | None) -> dict[str, Mapping]:
    """By metric, of the peak that keeps least of it."""
    found: dict[str, Mapping] = {}
    for one in (one for peak in (sized or {}).get("attained", ()) for one in peak):
        if one["metric"] not in found or one["share"] < found[one["metric"]]["share"]:
            found[one["metric"]] = one
    return found


def _table(rows: Sequence[Mapping]):
    metrics = list(dict.fromkeys(m for row in rows for m in _attained(row["sized"])))
    head = ["replicas of", "replicas", "GPUs", "$/hour", "$/M tokens"]
    for metric in metrics:
        head += [f"{LATENCIES.get(metric, metric)} kept, %", "slack, %"]
    head += ["answer", "beyond doubt", "steps off", "KV predicted, %", "KV held, %"]
    head += ["held over predicted, %", "KV peak, %", "binds"]
    body = []
    for row in rows:
        if row["status"] == "never":
            continue
        sized, kept = row["sized"], _attained(row["sized"])
        least = "" if row["status"] == "enough" else ">= "
        n = row["at_least_replicas"]
        cells = [_name(row, rows), f"{least}{n:g}", f"{least}{n * row['tp']:g}"]
        cells += [_or_dash(row[k], "{:,.2f}") for k in ("usd_per_hour", "usd_per_million_tokens")]
        for metric in metrics:
            one = kept.get(metric)
            cells.append(
                "-"
                if one is None
                else f"{one['share']:.1%} [{one['low']:.1%}, {one['high']:.1%}]".replace("%", "")
            )
            cells.append("-" if one is None else _or_dash(one["slack"], "{:+.0%}").rstrip("%"))
        answer = row["status"] if row["status"] != "enough" else sized["answer"] if sized else "-"
        cells += [answer, *_closer(row.get("closer"))]
        memory = (sized or {}).get("memory")
        for name in ("predicted_share", "held_share", "exceeded"):
            cells.append("-" if not memory else f"{memory[name]:.1%}".rstrip("%"))
        cells.append("-" if not sized else f"{sized['peak_kv_share']:.1%}".rstrip("%"))
        body.append([*cells, ", ".join(LATENCIES.get(m, m) for m in row["binds"]) or "-"])
    return table(head, body)


def _closer(closer: Mapping | None) -> tuple[str, str]:
    """(replicas that meet beyond doubt, replicas with steps faster and slower)."""
    if not closer:
        return "-", "-"
    sure = next((s["replicas"] for s in closer["sizes"] if s and s["answer"] == "meets"), None)
    most = f"> {closer['steps_farthest']:g}" if "steps_farthest" in closer else "-"
    ends = [most if closer[k] is None else f"{closer[k]:g}" for k in ("steps_fast", "steps_slow")]
    seen = max((s["replicas"] for s in closer["sizes"] if s), default=None)
    beyond = _or_dash(seen, "> {:g}") if sure is None else f"{sure:g}"
    return beyond, " to ".join(dict.fromkeys(ends))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def page_charts(document: Mapping) -> Iterator[Chart]:
    """Yield the charts of several rows: one point says nothing that the table does not."""
    if len(_enough(document["rows"])) > 1:
        yield from plan_charts(document)


def plan_charts(document: Mapping) -> Iterator[Chart]:
    """Cost against the least slack of the rows that are enough, with its front; what each keeps;
    memory as predicted and as held."""
    rows = _enough(document["rows"])
    every = document["rows"]
    if not rows:
        return
    priced = document["ranked_by"] == "usd"
    cost = [row["usd_per_hour"] if priced else row["gpus"] for row in rows]
    costs = np.array([np.nan if value is None else value for value in cost], np.float64)
    axis = "dollars an hour" if priced else "GPUs"
    names = [f"{row['replicas']:g} x {_name(row, every)}, {row['sized']['answer']}" for row in rows]
    slack = np.array([_least_slack(row["sized"]) for row in rows])
    ends = front(list(zip(costs.tolist(), slack.tolist(), strict=True)), True, False)
    if ends:
        others = [i for i in range(len(rows)) if i not in ends]
        yield pareto(
            "plan-front",
            "Pareto front: cost and slack",
            axis,
            "least slack, share of the bound",
            *((costs[i], slack[i], [names[j] for j in i]) for i in (ends, others)),
            share=True,
            what="row",
        )
    yield from _kept(rows, costs, axis, names, document.get("objectives", ()))
    yield from _memory(rows, names)


def _least_slack(sized: Mapping) -> float:
    known = [o["slack"] for peak in sized["attained"] for o in peak if o["slack"] is not None]
    return min(known, default=float("nan"))


def _kept(
    rows, costs: np.ndarray, axis: str, names: Sequence[str], asked: Sequence[Mapping]
) -> Iterator[Chart]:
    bounds = {one["metric"]: one["statistic"] for one in asked}
    for metric in dict.fromkeys(m for row in rows for m in _attained(row["sized"])):
        curves = []
        for colour, answer in enumerate(_ANSWERS):
            at = [
                i
                for i, row in enumerate(rows)
                if row["sized"]["answer"] == answer and metric in _attained(row["sized"])
            ]
            kept = [_attained(rows[i]["sized"])[metric] for i in at]
            share, low, high = (np.array([k[e] for k in kept]) for e in ("share", "low", "high"))
            if at:
                about = tuple(names[i] for i in at)
                curves.append(
                    Curve(answer, costs[at], share, (2, 4, 6)[colour], "points", low, high, about)
                )
        name = LATENCIES.get(metric, metric)
        labelled = [(c.about[i], 100 * float(c.y[i])) for c in curves for i in range(len(c.y))]
        yield Chart(
            f"plan-{metric}",
            f"{name} objective kept, over cost",
            axis,
            "share of requests that keep it",
            tuple(curves),
            f"Share of the peak's requests that keep {name}, a point a row: "
            f"{best(labelled, '%', high=True)}. Bars are 95 % intervals.",
            share=True,
            level=_level(bounds.get(metric, "mean")),
        )


def _level(statistic: str) -> tuple[float, str] | None:
    """The share that an objective on a percentile asks for."""
    share = statistic.removeprefix("p")
    return None if share == statistic else (float(share) / 100, f"asked: {share} %")


def _memory(rows, names: Sequence[str]) -> Iterator[Chart]:
    at = [i for i, row in enumerate(rows) if row["sized"].get("memory")]
    if not at:
        return
    memory = [rows[i]["sized"]["memory"] for i in at]
    held = np.array([m["held_share"] for m in memory])
    predicted = np.array([m["predicted_share"] for m in memory])
    about = tuple(
        f"{names[i]}; more was held in {m['exceeded']:.1%} of the samples"
        for i, m in zip(at, memory, strict=True)
    )
    worst = max(memory, key=lambda m: m["exceeded"])["exceeded"]
    yield Chart(
        "plan-memory",
        "KV memory: predicted and held",
        "held, share of KV blocks",
        "predicted, share of KV blocks",
        (Curve("rows", held, predicted, 0, "points", about=about),),
        f"A point a row: the mean prediction of its KV memory over what was held. More than "
        f"predicted was held in at most {worst:.1%} of the samples of a row.",
    )


def _around(rows: Sequence[Mapping], survive: int | None) -> list[Block]:
    """Return sizes from the last that fails to the first that is surely enough."""
    body, said = [], []
    for row in rows:
        closer = row.get("closer")
        if closer:
            off = f"step times off by what is expected ({closer['step_time_errors']})"
            one = closer.get("rate_of_one_replica")
            which = "one that does not fail" if survive else "one alone"
            alone = "" if one is None else f"; {which} keeps {one:.0%} of the peak's rate"
            said.append(f"{_name(row, rows)}: {_closer(closer)[1]} replicas with {off}{alone}.")
            for sized in [*filter(None, [closer.get("below")]), *closer["sizes"]]:
                kept = _attained(sized)
                shares = [
                    f"{LATENCIES.get(m, m)} {o['share']:.1%} [{o['low']:.1%}, {o['high']:.1%}]"
                    for m, o in kept.items()
                ]
                cells = [_name(row, rows), f"{sized['replicas']:g}", sized["answer"]]
                body.append([*cells, "; ".join(shares), f"{closer['draws']:g}"])
    if not body:
        return []
    head = ["", "replicas", "answer", "kept [95 % interval]", "draws"]
    return [heading("Sizes around each answer"), table(head, body), *map(paragraph, said)]


def _day(day: Mapping | None) -> list[Block]:
    if not day:
        return []
    levels = [
        [
            f"{level['share']:.0%}",
            number(level["offline_tokens_per_s"]),
            level["sized"]["answer"] if level["sized"] else "-",
        ]
        for level in day["levels"]
    ]
    tokens = f"{day['offline_tokens_per_day'] / 1e6:,.0f} M offline tokens a day"
    replicas = _or_dash(day["replicas"], "{:g}")
    said = f"{day.get('gpu', '')} tp{day.get('tp', '')}, {replicas} replicas: {tokens}"
    return [
        heading("A day with offline work"),
        paragraph(f"{said} ({day['profile']})."),
        table(["load, of the peak", "offline tokens a second", "answer"], levels),
    ]


def again(question: Mapping) -> str:
    """The command that asks the question again, for a shell."""
    settings = {_FLAGS.get(name, name): value for name, value in question.items()}
    engine = settings.pop("settings", None)
    settings |= engine if isinstance(engine, Mapping) else {}
    return command("twinserve plan", settings, joined=("gpus", "tp"))
