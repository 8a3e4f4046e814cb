"""The figures of the LayerKV paper: `twinserve study layerkv [FIGURE ...]`. What
comes out: docs/layerkv.md."""

from collections.abc import Callable, Mapping

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.layerkv import claims, points
from twinserve.experiments.layerkv.claims import beside_vllm
from twinserve.experiments.layerkv.points import LLAMA
from twinserve.experiments.layerkv.runs import VLLM, serve
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import Bars, lines_of, ylog
from twinserve.experiments.study.study import Figure, Study, titled

DATA = texts(__file__, "data.yaml")
LOOKS = DATA.LOOKS
TTFT = {"ttft_s": ("mean TTFT, s", 1.0)}
TAIL = {"ttft_p99_s": ("P99 TTFT, s", 1.0)}
TPOT = {"tpot_s": ("mean TPOT, s", 1.0)}
THROUGHPUT = {"tokens_per_s": ("output tokens/s", 1.0)}
MEANS = TTFT | TPOT | THROUGHPUT
MISSED = {"violations": ("violations, %", 100.0), "ttft_violations": ("by TTFT, %", 100.0)}
MISSED |= {"tpot_violations": ("by TPOT, %", 100.0)}
RATE = "requests/s"


def _finish(axes, metric: str) -> None:
    if metric.startswith("ttft") and "violations" not in metric:
        ylog(axes, metric)


def _by_context(axes, metric: str) -> None:
    axes.set_xscale("log", base=2)
    _finish(axes, metric)


def lines(column: str | None, metrics: Mapping, x: str, xlabel: str = "", **more) -> Callable:
    """Over x, a line for each policy."""
    finish = more.pop("finish", _finish)
    return lines_of(column, metrics, x, "policy", LOOKS, finish, xlabel=xlabel, **more)


def bars(group: str, *more: str, named: Callable[[object], str] = str) -> Callable:
    """Means of each variant, a row of panels for each value of `group`. more: metrics."""
    labels = {name: label for name, (label, _) in (MEANS | TAIL).items()}
    labels |= {"recomputes": "preempted, recomputed", "parked_most": "most that are parked"}
    labels |= {"ttft_violations": "miss by TTFT", "tpot_violations": "miss by TPOT"}
    metrics = {name: labels[name] for name in more or MEANS}

    def draw(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
        table = table.assign(**{group: table[group].map(named)})
        Bars("variant", None, metrics, group)(canvas, table, found)

    return draw


# -- figures ---------------------------------------------------------------------------------------
_figure = titled(claims.TEXTS.TITLES)


def figure(name: str, grid, table, plot, said=lambda table: ()) -> Figure:
    return _figure(name, grid, serve, table, plot, said)


TOKENS = "{:,} tokens".format
STUDY = Study(
    "layerkv",
    "Xiong et al., LayerKV",
    [
        figure(
            "fig1",
            points.BY_CONTEXT,
            claims.BY_CONTEXT,
            lines(
                None,
                TTFT | TPOT | {"queued_part": ("queueing, % of TTFT", 100.0)},
                "context",
                "tokens of prompt",
                finish=_by_context,
                only={"policy": VLLM, "model": LLAMA},
            ),
            claims.breakdown_claims,
        ),
        figure(
            "fig4",
            points.BY_CONTEXT,
            claims.BY_CONTEXT,
            lines("model", MEANS, "context", "tokens of prompt", finish=_by_context),
            claims.context_claims,
        ),
        figure(
            "fig5",
            points.BY_DEGREE,
            claims.BY_DEGREE,
            lines("context", TTFT | THROUGHPUT, "tp", "degree of parallelism", title=TOKENS),
            claims.degree_claims,
        ),
        figure(
            "parking",
            points.PARKING,
            beside_vllm("context", "variant"),
            bars("context", *MEANS, "parked_most", named=TOKENS),
        ),
        figure(
            "requests",
            points.BY_REQUESTS,
            beside_vllm("context", "requests", "policy"),
            lines(
                "context",
                TTFT | {"ttft_gain": ("vLLM's mean TTFT over it", 1.0)} | TPOT,
                "requests",
            ),
        ),
        figure(
            "fig6",
            points.BY_RATE,
            claims.BY_RATE,
            lines("model", MEANS, "rate", RATE),
            claims.rate_claims,
        ),
        figure(
            "fig7",
            points.BY_RATE,
            claims.BY_RATE,
            lines("model", TAIL, "rate", RATE),
            claims.tail_claims,
        ),
        figure(
            "fig8",
            points.BY_RATE,
            claims.BY_RATE,
            lines("model", MISSED, "rate", RATE, only={"model": LLAMA}),
            claims.violation_claims,
        ),
        figure(
            "trade",
            points.TRADE,
            beside_vllm("rate", "policy"),
            lines(None, TTFT | TAIL, "tpot_s", "mean TPOT, s"),
        ),
        figure(
            "rules",
            points.OF_RULES,
            beside_vllm("rate", "variant"),
            bars("rate", *TTFT, *[*MISSED][1:], named=f"{{:g}} {RATE}".format),
        ),
        figure("contention", points.CONTENTION, beside_vllm("engine", "variant"), bars("engine")),
    ],
)
