"""The figures of the Echo paper: `twinserve study echo [FIGURE ...]`. What comes
out: docs/echo.md."""

from collections.abc import Callable, Mapping

from twinserve.experiments.echo import claims, points, tables
from twinserve.experiments.echo.runs import (
    LADDER,
    foretold_arrivals,
    foretold_memory,
    hours,
    serve,
    watch,
)
from twinserve.experiments.study.curves import Bars, lines_of, of_runs, one_seed, ylog
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study, titled
from twinserve.experiments.study.tables import Table

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "black", "tab:brown", "tab:cyan")
NAMES = (*LADDER, points.ALONE, points.PRINTED, points.BS_512)
LOOKS = {name: {"color": colour} for name, colour in zip(NAMES, COLOURS, strict=True)}
THIN = {"": {"marker": "", "linewidth": 0.8}}  # of a line of many points
HOUR = "hour of the day"
SPEEDUP = {"speedup": "offline tokens/s over BS", "attainment": "share of online objectives kept"}
FREE = {
    "occupied": ("occupied, %", 100.0),
    "online_cached": ("online, free, %", 100.0),
    "offline_cached": ("offline, free, %", 100.0),
}


def over_a_day(column: str | None, series: str | None, metrics: Mapping) -> Callable:
    looks = THIN if series is None else {}
    draw = lines_of(column, metrics, "hour", series, looks, xlabel=HOUR)
    return of_runs(draw, tables.of_day)


HITS = over_a_day(
    None,
    "setting",
    {"hit_rate": ("prefix hit rate, %", 100.0), "arrivals": ("online requests/s", 1.0)},
)
EXPECTED = lines_of(
    "burstiness",
    {
        "actual": ("requests/s, actual", 1.0),
        "mean": ("mean of 15 minutes", 1.0),
        "high": ("mean + 2 deviations", 1.0),
    },
    "hour",
    None,
    THIN,
    title="bursts of a minute: {:g}".format,
    xlabel=HOUR,
)
FORETOLD = lines_of(
    "tide", {"share": ("online memory, %", 100.0)}, "minute", "what", split="bursts"
)


# -- figures ---------------------------------------------------------------------------------------
figure = titled(claims.TEXTS.TITLES)


def served(name: str, grid, table, plot, claims) -> Figure:
    return figure(name, grid, serve, table, plot, claims)


def watched(name: str, grid: Grid, plot, claims) -> Figure:
    return figure(name, grid, watch, tables.of_series, plot, claims)


STUDY = Study(
    "echo",
    "Wang et al., Echo",
    [
        figure(
            "fig2",
            Grid({}),
            hours,
            Table(("hour",), ("rate", "ratio")),
            lines_of(None, {"rate": ("requests/s", 1.0)}, "hour", None, xlabel=HOUR),
            claims.day_claims,
        ),
        served(
            "fig6",
            points.THROUGHPUT,
            tables.beside_bs("pool", "estimator"),
            Bars("pool", "policy", SPEEDUP, group="estimator"),
            claims.throughput_claims,
        ),
        served(
            "fig7",
            points.LATENCIES,
            tables.quantiles,
            lines_of(
                "estimator",
                {"ttft_s": ("TTFT, s", 1.0), "tpot_s": ("mean TPOT of a request, s", 1.0)},
                "quantile",
                "policy",
                LOOKS,
                ylog,
                claims.BELIEFS.get,
                "share of requests",
            ),
            claims.latency_claims,
        ),
        watched(
            "fig8",
            points.ACTIVE,
            over_a_day(
                "setting",
                None,
                {
                    "online": ("online requests with KV", 1.0),
                    "offline": ("offline requests with KV", 1.0),
                },
            ),
            claims.opposite_claims,
        ),
        watched("fig9", points.ACTIVE, HITS, claims.hit_claims),
        watched("fig10", points.ACTIVE, over_a_day("setting", None, FREE), claims.occupied_claims),
        watched("day", points.WHOLE_DAY, HITS, claims.whole_day_claims),
        figure(
            "fig11",
            Grid({"burstiness": points.BURSTS}),
            foretold_arrivals,
            tables.of_arrivals,
            of_runs(EXPECTED, one_seed),
            claims.arrival_claims,
        ),
        figure(
            "memory",
            points.MEMORY,
            foretold_memory,
            tables.of_memory,
            of_runs(FORETOLD, tables.foretold),
            claims.memory_claims,
        ),
        served(
            "cache",
            points.CACHES,
            tables.BESIDE_LRU,
            Bars(
                "order",
                "part",
                {
                    "gain": "offline tokens/s over LRU",
                    "hit_rate_trough": "hit rate, trough",
                    "hit_rate_peak": "hit rate, peak",
                    "attainment": "share of online objectives kept",
                },
            ),
            claims.cache_claims,
        ),
        served(
            "settings",
            points.SETTINGS,
            tables.beside_bs("change"),
            Bars("change", "policy", SPEEDUP | {"hit_rate": "hit rate"}),
            claims.setting_claims,
        ),
    ],
)
