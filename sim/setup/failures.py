"""Failures of a run, from a file (YAML, JSON or CSV) or from mean times (docs/fleet.md). An error
is one line: file, row, field, what to do."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from twinserve.errors import worded
from twinserve.policies.names import hint
from twinserve.sim.fleet.faults import Fault, Kind, Schedule
from twinserve.sim.fleet.recovery import Action, Recovery
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.yaml_text import parse_yaml, said_of, text_of

_LATEST_S = 1e9
_MOST_CRASHES = 10_000
_FLAG = "--failures"
_OF_KIND = {"factor": Kind.SLOW, "grace_s": Kind.DRAIN}


class FaultSettings(BaseModel):
    """A row of the file, with the fields of `Fault`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    replica: int = Field(ge=0, le=4095)
    kind: str = Kind.CRASH.value
    at_s: float = Field(ge=0, le=_LATEST_S)
    until_s: float | None = Field(None, ge=0, le=_LATEST_S)
    factor: float | None = Field(None, gt=1, le=1e6)
    grace_s: float | None = Field(None, ge=0, le=_LATEST_S)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, given: Any) -> Any:
        """Refuse `true`: Python reads it as 1, but the file's author meant no number."""
        if isinstance(given, bool):
            raise ValueError("is true or false; write a number, 1 for one")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> FaultSettings:
        kinds = [kind.value for kind in Kind]
        if self.kind not in kinds:
            raise ValueError(
                f"kind: there is no kind {self.kind!r}{hint(self.kind, kinds)}; there are "
                f"{', '.join(kinds)}"
            )
        if self.until_s is not None and not self.until_s > self.at_s:
            raise ValueError(
                f"until_s: {self.until_s:g} is not after at_s ({self.at_s:g}); drop it for a "
                "failure that lasts"
            )
        for name, kind in _OF_KIND.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise ValueError(
                    f"{name}: is for the kind {kind}, and this is {self.kind}; drop it"
                )
        if self.kind == Kind.SLOW and self.factor is None:
            raise ValueError("factor: is missing; write the factor on step times, as 2")
        return self

    @property
    def fault(self) -> Fault:
        until_s = math.inf if self.until_s is None else self.until_s
        kind, factor = Kind(self.kind), self.factor or 1.0
        return Fault(kind, self.replica, self.at_s, until_s, factor, self.grace_s)


def read_failures(given: str) -> tuple[str, list[FaultSettings]]:
    """Return the file's name for errors, and its rows. The text is a path, or the content if it
    begins with a bracket. Raises SettingsError."""
    inline = given.lstrip().startswith("[")
    where = _FLAG if inline else f"{_FLAG} {given}"
    text = given if inline else text_of(where, given)
    rows = _csv(where, text) if given.lower().endswith(".csv") else parse_yaml(where, text)
    if isinstance(rows, dict) and list(rows) == ["failures"]:
        rows = rows["failures"]
    if not isinstance(rows, list) or not rows:
        raise SettingsError(
            f"{where}: holds no list of failures; write one a line, as "
            "- {replica: 0, kind: crash, at_s: 60, until_s: 120}"
        )
    return where, [_row(where, i, row) for i, row in enumerate(rows, 1)]


def _csv(where: str, text: str) -> list[dict[str, Any]]:
    try:
        found = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise SettingsError(f"{where}: this is not CSV: {worded(error)}; correct it") from error
    rows = []
    for i, row in enumerate(found, 1):
        if None in row:
            raise SettingsError(
                f"{where}: row {i}: has more fields than the header names; drop some"
            )
        rows.append({name.strip(): v.strip() for name, v in row.items() if v and v.strip()})
    return rows


def _row(where: str, number: int, row: Any) -> FaultSettings:
    if not isinstance(row, dict):
        raise SettingsError(
            f"{where}: row {number}: {row!r} is no failure; write {{replica: 0, at_s: 60}}"
        )
    try:
        return FaultSettings.model_validate(row)
    except ValidationError as error:
        said = said_of(error, lambda _: FaultSettings, "failure")
    raise SettingsError(f"{where}: row {number}: {said}")


def resolve_failures(
    config: SimulationConfig, replicas: int, ranks: bool
) -> tuple[SimulationConfig, Schedule]:
    """Return settings with the file's content (for run.json), and the schedule of failures. ranks:
    some of the fleet's replicas share experts. Raises SettingsError."""
    if ranks:
        raise SettingsError(
            f"{_FLAG if config.mttf is None else '--mttf'}: failures of data-parallel ranks that "
            "share experts are not simulated; choose a profile without dp"
        )
    if config.failures is None:
        return config, Schedule((), config.mttf, config.mttr or 0.0, config.seed, config.start_up)
    where, rows = read_failures(config.failures)
    for number, row in enumerate(rows, 1):
        if row.replica >= replicas:
            raise SettingsError(
                f"{where}: row {number}: replica: there is no {row.replica}; the fleet has "
                f"{replicas}, from 0"
            )
    _check_apart(where, rows)
    faults = tuple(row.fault for row in rows)
    text = json.dumps([row.model_dump(exclude_none=True) for row in rows], sort_keys=True)
    kept = config.model_copy(update={"failures": text})
    return kept, Schedule(faults, seed=config.seed, start_up_s=config.start_up)


def check_crashes(schedule: Schedule, replicas: int, last_s: float) -> None:
    """Raise SettingsError if a run up to `last_s` seconds would have too many crashes."""
    if schedule.mttf_s is None:
        return
    cycle_s = schedule.mttf_s + schedule.mttr_s + schedule.start_up_s
    if (crashes := replicas * last_s / cycle_s) > _MOST_CRASHES:
        raise SettingsError(
            f"--mttf {schedule.mttf_s:g}: means {crashes:,.0f} crashes up to the last arrival, and "
            f"at most {_MOST_CRASHES:,} are simulated; raise it, or --mttr"
        )


def _check_apart(where: str, rows: Sequence[FaultSettings]) -> None:
    """Raise SettingsError if two failures overlap on one replica."""
    of: dict[tuple[int, str], list[tuple[Fault, int]]] = {}
    for number, row in enumerate(rows, 1):
        what = "gone" if row.kind in (Kind.CRASH, Kind.DRAIN) else row.kind
        of.setdefault((row.replica, what), []).append((row.fault, number))
    for (replica, _), found in of.items():
        found.sort(key=lambda one: one[0].at_s)
        for (first, n), (then, m) in pairwise(found):
            if then.at_s < first.until_s:
                ends = "for ever" if math.isinf(first.until_s) else f"until {first.until_s:g} s"
                raise SettingsError(
                    f"{where}: row {m}: at_s: replica {replica} has the {first.kind} of row {n} "
                    f"{ends}; let one begin after the other"
                )


def resolve_recovery(config: SimulationConfig) -> Recovery:
    return Recovery(Action(config.on_failure), config.retries, config.detection)
