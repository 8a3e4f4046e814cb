"""Versions of result folders, and upgrades of earlier ones (docs/invariants.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from twinserve.formats import Format
from twinserve.sim.results.columns import OUTCOMES, PLACEMENTS, REQUESTS
from twinserve.traces.catalog import resolve as resolve_name
from twinserve.traces.generators.synth import is_synthetic

if TYPE_CHECKING:
    import pandas as pd

# Columns that some results of version 0 do not have (`with_ends`).
_ADDED = {"outcome", "ended_s", "computed_tokens"}
# Columns that have another name in some results of version 0: name then -> name now.
RENAMED = {"klass": "service_class"}


def with_ends(requests: pd.DataFrame) -> pd.DataFrame:
    """Add the columns on how `requests` ended, as for a run in which none ended early."""
    if _ADDED <= set(requests) or "finished" not in requests:
        return requests
    finished = requests["finished"].to_numpy(bool)
    return requests.assign(
        outcome=np.where(finished, OUTCOMES[0], None),
        ended_s=requests["last_token_s"].where(finished),
        computed_tokens=requests["prompt_tokens"] + (requests["output_tokens"] - 1).clip(lower=0),
    )


@dataclass(frozen=True)
class Stored:
    """A result folder, or a part of it, as read: tables by the names of TABLES, and run.json
    without its number. Upgrades change this and skip missing tables."""

    tables: dict[str, pd.DataFrame]
    run: dict


def _from_0(stored: Stored) -> Stored:
    """Version 1 names a request's class `service_class`, and has the ends of requests."""
    tables = {name: frame.rename(columns=RENAMED) for name, frame in stored.tables.items()}
    if "requests" in tables:
        tables["requests"] = with_ends(tables["requests"])
    return dataclasses.replace(stored, tables=tables)


def _from_1(stored: Stored) -> Stored:
    """Version 2 has the stays of requests and the replicas: here one stay each, and always up."""
    tables = dict(stored.tables)
    if "requests" in tables:
        tables["placements"] = one_stay_each(tables["requests"])
        tables["replicas"] = up_all_the_time(tables["requests"], made_of(stored.run))
    return dataclasses.replace(stored, tables=tables)


def _from_2(stored: Stored) -> Stored:
    """Version 3 replays arrivals unchanged by default."""
    settings = stored.run.get("config")
    if not isinstance(settings, dict):
        return stored
    return dataclasses.replace(stored, run=stored.run | {"config": with_load(settings)})


def with_load(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings before version 3: named traces then ran at 70 % of the capacity."""
    silent = all(settings.get(name) is None for name in ("load", "rate", "rate_scale"))
    trace = str(settings.get("trace", "mooncake"))
    if silent and (is_synthetic(trace) or resolve_name(trace)):
        return {**settings, "load": 0.7}
    return dict(settings)


def _from_3(stored: Stored) -> Stored:
    """Version 4 by default schedules asynchronously, and adds host time to synchronous steps."""
    settings = stored.run.get("config")
    if not isinstance(settings, dict):
        return stored
    return dataclasses.replace(stored, run=stored.run | {"config": with_host(settings)})


def with_host(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of a run before version 4."""
    return {"async_scheduling": False, "host_time": "none", **settings}


def one_stay_each(requests: pd.DataFrame) -> pd.DataFrame:
    """Return PLACEMENTS of requests that stayed on one replica."""
    same = [name for name in PLACEMENTS if name in REQUESTS]
    return requests[same].assign(
        request=np.arange(len(requests)), placement=0, role="serve", placed_s=requests["arrival_s"]
    )


def made_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of REPLICAS, from a run.json."""
    kv = run.get("kv", {})
    return {
        "policy": run.get("label"),
        "ledger": kv.get("ledger"),
        "profile": run.get("profile", {}).get("name"),
        "num_blocks": kv.get("num_blocks", 0),
        "block_tokens": kv.get("block_tokens", 0),
    }


def up_all_the_time(requests: pd.DataFrame, made: Mapping[str, Any]) -> pd.DataFrame:
    """Return REPLICAS of a run whose equal replicas were up from start to end."""
    import pandas as pd

    never = {f"{life}_s": np.nan for life in ("draining", "down")}
    indices = np.arange(int(requests["replica"].max()) + 1 if len(requests) else 1)
    return pd.DataFrame({"replica": indices}).assign(
        role="serve", **made, warming_s=0.0, up_s=0.0, **never, failed=False
    )


RESULTS: Format[Stored] = Format(
    "result folders",
    version=4,
    by="simulate --out DIR",
    upgrades=(_from_0, _from_1, _from_2, _from_3),
)

# limit.json and plan.json, which `twinserve report` reads.
LIMITS: Format[dict] = Format("limits", version=1, by="twinserve limit --out DIR", oldest=1)
PLANS: Format[dict] = Format("plans", version=1, by="twinserve plan --out DIR", oldest=1)
