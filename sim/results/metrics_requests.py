"""The columns of requests that metrics are made of, and the latencies of each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.columns import Columns
from twinserve.sim.results.schemas import ENGINE_ARRIVAL, ENGINE_FIRST_TOKEN, OUTCOMES
from twinserve.sim.results.versions import with_ends

if TYPE_CHECKING:
    import pandas as pd


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Seconds: ttft_s, tpot_s, e2el_s and normalized_s (a token), with service_class, by
    `requests`' index.

    NaN where a request has none: no token yet, not finished, or a TPOT of a single token.
    """
    import pandas as pd

    r = RequestColumns.of(requests)
    columns = {
        "service_class": r.service_class,
        "ttft_s": r.ttft,
        "tpot_s": np.where(r.output > 1, r.tpot, np.nan),
        "e2el_s": r.e2el,
        "normalized_s": r.normalized,
    }
    return pd.DataFrame(columns, index=requests.index)


@dataclass(frozen=True)
class RequestColumns:
    """The columns that latencies need, as numpy arrays of one length; seconds and tokens."""

    service_class: np.ndarray
    finished: np.ndarray
    lost: dict[
        str, np.ndarray
    ]  # outcome but "completed" -> bool[n]: which requests ended like that
    left: np.ndarray  # ended before it had all its tokens, or its client no longer waited
    arrival: np.ndarray
    last: np.ndarray  # last token emitted, NaN for none
    prompt: np.ndarray
    output: np.ndarray
    computed: np.ndarray  # tokens with KV at the end
    queued: np.ndarray  # arrival in the engine to first scheduled
    ttft: np.ndarray  # NaN: no token yet
    engine_ttft: np.ndarray | None  # None: no front end, so that it is the same
    tpot: np.ndarray  # 0 for a single token; NaN: not finished
    e2el: np.ndarray  # NaN: not finished
    normalized: np.ndarray  # e2el a token
    late: np.ndarray
    slo_ttft: np.ndarray
    slo_tpot: np.ndarray

    @classmethod
    def of(cls, table: pd.DataFrame | Columns) -> RequestColumns:
        def number(name: str) -> np.ndarray:
            return np.asarray(table[name], np.float64)

        if not isinstance(table, Columns):
            table = with_ends(table)
        outcome = np.asarray(table["outcome"], object)
        lost = {name: outcome == name for name in OUTCOMES[1:]}
        finished = np.asarray(table["finished"], bool)
        arrival, output = number("arrival_s"), number("output_tokens")
        last = np.where(output > 0, number("last_token_s"), np.nan)
        ttft = number("first_token_s") - arrival
        engine_ttft, came = None, arrival
        if ENGINE_ARRIVAL in table:
            came = number(ENGINE_ARRIVAL)
            engine_ttft = number(ENGINE_FIRST_TOKEN) - came
        e2el = np.where(finished, last - arrival, np.nan)
        single = np.where(finished, 0.0, np.nan)
        tpot = np.where(output > 1, (e2el - ttft) / np.maximum(output - 1, 1), single)
        return cls(
            service_class=np.asarray(table["service_class"], object),
            finished=finished,
            lost=lost,
            left=np.any(list(lost.values()), axis=0),
            arrival=arrival,
            last=last,
            prompt=number("prompt_tokens"),
            output=output,
            computed=number("computed_tokens"),
            queued=number("first_scheduled_s") - came,
            ttft=ttft,
            engine_ttft=engine_ttft,
            tpot=tpot,
            e2el=e2el,
            normalized=e2el / np.maximum(output, 1),
            late=number("late_tokens"),
            slo_ttft=number("slo_ttft_s"),
            slo_tpot=number("slo_tpot_s"),
        )

    def take(self, rows: np.ndarray) -> RequestColumns:
        """Of these rows: positions, or bool[n]."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        lost = {name: who[rows] for name, who in columns.pop("lost").items()}
        taken = {name: None if c is None else c[rows] for name, c in columns.items()}
        return RequestColumns(lost=lost, **taken)
