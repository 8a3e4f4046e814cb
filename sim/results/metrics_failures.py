"""Metrics of failures: what became of the requests that were hit, and how long it took."""

from __future__ import annotations

import numpy as np

from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_requests import RequestColumns

_SUMMED = ("requests", "failed", "retried", "migrated", "left", "lost_kv_tokens")


def describe_failures(rows: RunRows) -> dict:
    """`failures` of summary.json, where anything was to fail. Counts of what was hit are sums over
    failures: a request that lost two replicas counts twice. late: requests, each once."""
    table = rows.failures
    if table is None:
        return {}
    took = (table["recovered_s"] - table["at_s"]).to_numpy(np.float64)
    known = took[~np.isnan(took)]
    found = {
        "crashes": int((table["kind"] == "crash").sum()),
        "others": int((table["kind"] != "crash").sum()),
        **{name: int(table[name].sum()) for name in _SUMMED},
        "late": _late(rows),
        "discarded_output_tokens": _discarded(rows),
        "mean_recovery_s": float(known.mean()) if len(known) else None,
        "max_recovery_s": float(known.max()) if len(known) else None,
        "not_recovered": len(took) - len(known),
    }
    return {"failures": found}


def _discarded(rows: RunRows) -> int:
    """Of requests that began anew; so did requests moved from drained replicas."""
    requests = rows.request_columns
    return int(requests["discarded_tokens"].sum()) if "discarded_tokens" in requests else 0


def _late(rows: RunRows) -> int:
    """Requests that lost a replica, completed all the same, and missed an objective."""
    requests = rows.request_columns
    if "failures" not in requests:
        return 0
    r = RequestColumns.of(requests)
    hit = requests["failures"] > 0
    missed = (r.ttft > r.slo_ttft) | (r.tpot > r.slo_tpot)
    return int((hit & r.finished & missed).sum())
