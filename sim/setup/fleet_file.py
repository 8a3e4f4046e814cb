"""Fleet files: which pools of replicas serve the requests, in YAML or JSON (docs/fleet.md).

Whatever is wrong is one line: file, field, what is wrong, what to do. `--fleet` also takes the
content itself, as run.json keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from twinserve.policies.names import hint
from twinserve.sim.setup.config import SettingsError, StepTimesName
from twinserve.sim.setup.yaml_text import parse_yaml, text_of

AGGREGATED = "aggregated"
_APART = ("prefill", "decode")
MOST_REPLICAS = 4096


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PortSettings(_Part):
    """What transfers pass through. pcie_gb_per_s: achieved, of all ranks of a replica together, in
    one direction."""

    pcie_gb_per_s: float = Field(gt=0, le=1e6)


class PoolSettings(_Part):
    """Replicas that are alike. What it does not name is as the flags have it."""

    name: str | None = Field(None, min_length=1, max_length=60)
    replicas: int = Field(1, ge=1, le=MOST_REPLICAS)
    role: str = AGGREGATED
    profile: str | None = None
    step_times: StepTimesName | None = None
    policy: str | None = None
    kv: str | None = None
    prefix_caching: bool | None = None
    block_tokens: int | None = Field(None, ge=1)
    num_blocks: int | None = Field(None, ge=1, le=10**15)
    host_blocks: int | None = Field(None, ge=0, le=10**15)
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    ports: PortSettings | None = None

    @field_validator("role")
    @classmethod
    def _served_role(cls, role: str) -> str:
        if role in _APART:
            raise ValueError(
                f"prefill and decode apart are not simulated yet; write {AGGREGATED}, or drop it"
            )
        if role != AGGREGATED:
            raise ValueError(f"there is no such role; write {AGGREGATED}, or drop it")
        return role

    @property
    def flags(self) -> dict[str, Any]:
        """Those settings of a run that the pool names, as its flags are called."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return {k: v for k, v in given.items() if k not in ("name", "role", "ports", "policy")}


class FleetSettings(_Part):
    """router  with options after a colon; None: the one of the flags"""

    pools: list[PoolSettings] = Field(min_length=1)
    router: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> FleetSettings:
        names = [self.name_of(i) for i in range(len(self.pools))]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"pools[{i}].name: {name!r} is that of another pool; choose one")
        count = sum(pool.replicas for pool in self.pools)
        if count > MOST_REPLICAS:
            raise ValueError(f"pools: {count:,} replicas; at most {MOST_REPLICAS:,} are simulated")
        return self

    @property
    def names(self) -> list[str]:
        """Profiles, policies and the router that it names, which may be files."""
        named = [name for pool in self.pools for name in (pool.profile, pool.policy)]
        return [name for name in (*named, self.router) if name is not None]

    def name_of(self, index: int) -> str:
        return self.pools[index].name or f"pool-{index}"


@dataclass(frozen=True)
class FleetFile:
    """where  as errors have it: `--fleet fleet.yaml`
    text   the pools as one line of JSON: what run.json keeps, and `--fleet` takes. The router is
           kept as a setting of its own
    """

    where: str
    settings: FleetSettings
    text: str


def read_fleet(given: str) -> FleetFile:
    """A file's path, or its content where that begins with a brace. Raises SettingsError."""
    if given.lstrip().startswith("{"):
        where, text = "--fleet", given
    else:
        where, text = f"--fleet {given}", text_of(f"--fleet {given}", given)
    content = parse_yaml(where, text)
    if not isinstance(content, dict):
        raise SettingsError(
            f"{where}: holds no settings; write pools: and below it a list of pools, as docs/"
            "fleet.md has it"
        )
    try:
        settings = FleetSettings.model_validate(content)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_said(error)}") from None
    text = json.dumps(settings.model_dump(exclude_unset=True, exclude={"router"}), sort_keys=True)
    return FleetFile(where, settings, text)


# -- errors ----------------------------------------------------------------------------------------
_PARTS: Mapping[str, type[_Part]] = {"pools": PoolSettings, "ports": PortSettings}


def _said(error: ValidationError) -> str:
    """The first thing that is wrong: field, what, and what to do."""
    errors = error.errors()  # a typo explains what is missing
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    loc, given = first["loc"], first.get("input")
    path, said = _path(loc), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = sorted(_part_of(loc).model_fields)
        return (
            f"{path}: there is no such field{hint(str(loc[-1]), known)}; there are "
            f"{', '.join(known)}"
        )
    if first["type"] == "missing":
        return f"{path}: is missing; give it"
    if first["type"] == "too_short":
        return f"{path}: the list is empty; write at least one pool"
    if not loc:
        return said
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, type(None))) else ""
    return f"{path}: {said[0].lower()}{said[1:]}{shown}"


def _path(loc: Sequence[int | str]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")


def _part_of(loc: Sequence[int | str]) -> type[_Part]:
    """Whose fields the last part of `loc` should be one of."""
    inside = [part for part in loc[:-1] if isinstance(part, str)]
    return _PARTS[inside[-1]] if inside else FleetSettings
