"""Metrics of a fleet with prefill apart from decode: what times to first token consist of, and what
was handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.files import RunRows
from twinserve.sim.results.schemas import FRONT_END_PART, TTFT_PARTS

if TYPE_CHECKING:
    import pandas as pd

_MS = 1000.0


def describe_apart(rows: RunRows) -> dict:
    """`ttft_parts` and `hand_over` of summary.json; nothing for other fleets. Parts: of requests
    that completed, as the TTFT of the summary."""
    if f"{TTFT_PARTS[0]}_s" not in rows.request_columns:
        return {}
    requests, stays = rows.requests, rows.placements
    if stays is None:
        return {}
    done = requests[requests["finished"]]
    named = (FRONT_END_PART, *TTFT_PARTS) if f"{FRONT_END_PART}_s" in done else TTFT_PARTS
    parts = {part: _in_ms(done[f"{part}_s"].to_numpy(np.float64)) for part in named}
    return {"ttft_parts": parts, "hand_over": _counted(requests, stays)}


def _in_ms(seconds: np.ndarray) -> dict:
    if not len(seconds):
        return {"mean_ms": None, "p50_ms": None, "p99_ms": None}
    p50, p99 = np.percentile(seconds, [50, 99]) * _MS
    return {"mean_ms": seconds.mean() * _MS, "p50_ms": p50, "p99_ms": p99}


def _counted(requests: pd.DataFrame, stays: pd.DataFrame) -> dict:
    """Of the stays of these requests, a warm-up's left out."""
    stays = stays[stays["request_id"].isin(set(requests["request_id"]))]
    decodes = stays["role"] == "decode"
    began, ended = stays["load_begin_s"], stays["load_end_s"]
    loads = began.notna()
    landed = loads & ended.notna() & ~stays["load_failed"]
    seconds = (ended - began)[landed].to_numpy(np.float64)
    return {
        "prefilled_apart": int((stays["outcome"] == "handed_over").sum()),
        "prefilled_locally": int((decodes & (stays["placement"] == 0)).sum()),
        "loads": int(loads.sum()),
        "loaded_tokens": int(stays.loc[landed, "load_tokens"].sum()),
        "failed_loads": int((loads & ended.notna() & stays["load_failed"]).sum()),
        "expired_leases": int(stays["lease_expired"].sum()),
        "load": _in_ms(seconds),
    }
