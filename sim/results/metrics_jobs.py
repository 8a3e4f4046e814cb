"""Job completion times and fair ratios, Justitia's measures of efficiency and fairness.

A job is a group of requests: an application with its stages, or a session with its turns. The
best-effort pool never ends, so it is no job; its batches are counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from twinserve.sim.results.files import POOL_GROUP, RunRows
from twinserve.sim.results.options import percentile_name

if TYPE_CHECKING:
    import pandas as pd


def job_completion(requests: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each job, by name: service_class, arrival_s, end_s, finished, jct_s (first
    arrival to end).

    Jobs are the groups in order of first submission, or single requests without groups. A job is
    finished when all its submitted requests are; otherwise jct_s is NaN.
    """
    members, key = _applications(requests), "group"
    if len(members) == 0:
        members, key = requests[requests["group"].isna()], "request_id"
    jobs = _spans(members.groupby(key, sort=False))
    jobs.index.name = "job"
    return jobs


def describe_jobs(requests: pd.DataFrame, percentiles: Sequence[float] = ()) -> dict | None:
    """Return `applications` of summary.json, with further percentiles; None without groups."""
    members = _applications(requests)
    if len(members) == 0:
        return None
    jobs = job_completion(members)
    jct = jobs["jct_s"].to_numpy(np.float64)
    jct = jct[~np.isnan(jct)]
    return {
        "submitted": len(jobs),
        "completed": len(jct),
        "mean_jct_s": float(jct.mean()) if len(jct) else None,
        "median_jct_s": float(np.median(jct)) if len(jct) else None,
        **{
            f"{percentile_name(q)}_jct_s": float(np.percentile(jct, q)) if len(jct) else None
            for q in (90, 99, *percentiles)
        },
    }


def describe_pool(requests: pd.DataFrame) -> dict | None:
    """Return `pool` of the best-effort class: durations of its batches; None without a pool."""
    members = requests[requests["group"] == POOL_GROUP]
    if len(members) == 0:
        return None
    seconds = _spans(members.groupby("stage", sort=True))["jct_s"]
    done = seconds.dropna().to_numpy(np.float64)
    return {
        "batches": len(seconds),
        "batches_completed": len(done),
        "mean_batch_s": float(done.mean()) if len(done) else None,
    }


def fair_ratio(rows: RunRows, fair_rows: RunRows) -> pd.DataFrame:
    """Return jct_s, fair_jct_s and fair_ratio by job: its completion time over that in a fair run.

    Both runs must have one request list. Only jobs that ended in both are returned; above 1 the job
    ended later than its fair share promises (Justitia, Fig. 10, with VTC as the fair policy).
    """
    import pandas as pd

    jobs = job_completion(rows.requests)["jct_s"].dropna()
    fair = job_completion(fair_rows.requests)["jct_s"].dropna().rename("fair_jct_s")
    both = pd.concat([jobs, fair], axis=1, join="inner")
    both["fair_ratio"] = both["jct_s"] / both["fair_jct_s"]
    return both


def summarise_fair_ratio(ratios: pd.DataFrame) -> dict:
    """Summarise `fair_ratio`: jobs, mean, p90 and max ratio, and the share not delayed."""
    values = ratios["fair_ratio"].to_numpy(np.float64)
    if len(values) == 0:
        return dict.fromkeys(
            ("mean_fair_ratio", "p90_fair_ratio", "max_fair_ratio", "not_delayed"), None
        ) | {"jobs": 0}
    return {
        "jobs": len(values),
        "mean_fair_ratio": float(values.mean()),
        "p90_fair_ratio": float(np.percentile(values, 90)),
        "max_fair_ratio": float(values.max()),
        "not_delayed": float((values <= 1).mean()),
    }


def _applications(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["group"].notna() & (requests["group"] != POOL_GROUP)]


def _spans(groups) -> pd.DataFrame:
    spans = groups.agg(
        service_class=("service_class", "first"),
        arrival_s=("arrival_s", "min"),
        end_s=("last_token_s", "max"),
        finished=("finished", "all"),
    )
    spans["finished"] = spans["finished"].astype(bool)
    spans["jct_s"] = (spans["end_s"] - spans["arrival_s"]).where(spans["finished"])
    return spans
