"""Fleet files: pools of replicas, in YAML or JSON (docs/fleet.md).

An error is one line: file, field, what is wrong, what to do. `--fleet` also takes the content
itself, as run.json keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from twinserve.policies.drafting import Method
from twinserve.sim.setup.config import SettingsError, StepTimesName, below
from twinserve.sim.setup.speculation import MOST_DRAFTS
from twinserve.sim.setup.yaml_text import parse_yaml, said_of, text_of

AGGREGATED, PREFILL, DECODE = "aggregated", "prefill", "decode"
_APART = (PREFILL, DECODE)
_SHORT = re.compile(r"(\d{1,9})P(\d{1,9})D", re.IGNORECASE | re.ASCII)
MOST_REPLICAS = 4096


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PortSettings(_Part):
    """Network ports of a replica; achieved rates of all its ranks together, in one direction.

    network_gb_per_s    to and from other replicas; None: 50 a GPU, as one NIC of 400 Gbit/s
    network_latency_us  of one transfer
    """

    pcie_gb_per_s: float | None = Field(None, gt=0, le=1e6)
    network_gb_per_s: float | None = Field(None, gt=0, le=1e6)
    network_latency_us: float = Field(10.0, ge=0, le=1e6)


class ConnectorSettings(_Part):
    """How KV moves from prefill to decode replicas, as `Connector` and `Push`
    (sim/fleet/connector.py)."""

    transfer: Literal["pull", "push"] = "pull"
    load_failures: Literal["fail", "recompute"] = "fail"
    lease_s: float = Field(30.0, gt=0, le=1e6)
    push_poll_ms: float = Field(1.0, ge=0, le=1e6)
    push_timeout_s: float = Field(480.0, gt=0, le=1e6)

    @model_validator(mode="after")
    def _of_one_kind(self) -> ConnectorSettings:
        given = sorted(name for name in self.model_fields_set if name.startswith("push_"))
        if given and self.transfer != "push":
            raise ValueError(f"{given[0]}: nothing is pushed; write transfer: push, or drop it")
        return self


class SpeculateSettings(_Part):
    """Speculation on a pool's replicas: the parts of `--speculate`, each a field
    (sim/setup/speculation.py)."""

    k: int = Field(ge=1, le=MOST_DRAFTS)
    method: Method = "eagle"
    acceptance: float | None = Field(None, ge=0, le=1)
    rates: list[float] | None = Field(None, min_length=1, max_length=MOST_DRAFTS)
    length: float | None = Field(None, ge=1, le=MOST_DRAFTS + 1)
    batches: str | None = Field(None, min_length=1)
    draft: str | None = Field(None, min_length=1)
    cost: float | None = Field(None, ge=0, le=1)

    @field_validator("batches", "draft")
    @classmethod
    def _one_field(cls, given: str | None) -> str | None:
        if given is not None and "," in given:  # `text` would have it end there
            raise ValueError("has a comma; give each field by itself")
        return given

    @property
    def text(self) -> str:
        """Return the settings as `--speculate` takes them."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        if self.rates is not None:
            given["rates"] = "/".join(f"{rate!r}" for rate in self.rates)
        return ",".join(f"{name}={value}" for name, value in given.items() if value is not None)


class PoolSettings(_Part):
    """Replicas that are alike. A missing field takes the value of its flag."""

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
    kv_offloading_size: float | None = Field(None, gt=0, le=1e9)
    kv_offloading_options: str | None = Field(None, min_length=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    kv_cache_dtype: Literal["auto", "fp8"] | None = None
    engine_version: str | None = None
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
    speculate: SpeculateSettings | None = None
    ports: PortSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_server(cls, given: object) -> object:
        """Replace from_vllm, as_model and gpu by the settings of that server."""
        if not isinstance(given, dict) or given.get("from_vllm") is None:
            return given
        from twinserve.sim.serve_line.settings import from_vllm  # for those that give one

        own = {k: v for k, v in given.items() if k not in ("from_vllm", "as_model", "gpu")}
        drafts = given.get("speculate") and "k=1"  # the pool's own stands
        made = from_vllm(str(given["from_vllm"]), {**given, "speculate": drafts}).settings
        if "fleet" in made:
            raise ValueError(
                "from_vllm: this manifest has pools of its own; give it to --from-vllm"
            )
        policy = {"policy": made["policy"][0]}
        taken = {k: v for k, v in made.items() if k in cls.model_fields and k != "speculate"}
        return below({**taken, **policy}, own)

    @field_validator("speculate", mode="before")
    @classmethod
    def _no_text(cls, given: object) -> object:
        if isinstance(given, str):
            raise ValueError("write its parts as fields, as {k: 3, acceptance: 0.7}")
        return given

    @field_validator("role")
    @classmethod
    def _served_role(cls, role: str) -> str:
        if role not in (AGGREGATED, *_APART):
            raise ValueError(
                f"there is no such role; write {PREFILL}, {DECODE} or {AGGREGATED}, or drop it"
            )
        return role

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that the pool names, by flag."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.speculate is not None:
            given["speculate"] = self.speculate.text
        return {k: v for k, v in given.items() if k not in ("name", "role", "ports", "policy")}


class FleetSettings(_Part):
    """router  with options after a colon; None: as --router

    If pools have the roles prefill and decode:

    prefill_router  of prefill replicas; None: a second one like `router`
    local_prefill   which prompts are computed on their decode replica (sim/fleet/connector.py)
    connector       how KV is handed over
    """

    pools: list[PoolSettings] = Field(min_length=1)
    router: str | None = None
    prefill_router: str | None = None
    local_prefill: str | None = None
    connector: ConnectorSettings | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> FleetSettings:
        names = [self.name_of(i) for i in range(len(self.pools))]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(
                    f"pools[{i}].name: another pool is called {name!r}; choose another name"
                )
        self._check_roles()
        count = sum(pool.replicas for pool in self.pools)
        if count > MOST_REPLICAS:
            raise ValueError(f"pools: {count:,} replicas; at most {MOST_REPLICAS:,} are simulated")
        return self

    def _check_roles(self) -> None:
        roles = [pool.role for pool in self.pools]
        for i, pool in enumerate(self.pools):
            if pool.speculate is not None and pool.role in _APART:
                raise ValueError(
                    f"pools[{i}].speculate: drafts on replicas of the role {pool.role} are not "
                    "simulated; drop it, or the roles"
                )
        if not self.apart:
            given = ("prefill_router", "local_prefill", "connector")
            for name in given:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}: no pool has the role {PREFILL}; give roles to pools, or drop it"
                    )
            for i, pool in enumerate(self.pools):
                ports = pool.ports
                if ports is not None and ports.model_fields_set - {"pcie_gb_per_s"}:
                    raise ValueError(
                        f"pools[{i}].ports: {AGGREGATED} replicas send nothing over a network; "
                        "drop its network_ fields"
                    )
            return
        if AGGREGATED in roles:
            raise ValueError(
                f"pools[{roles.index(AGGREGATED)}].role: a fleet with {PREFILL} and {DECODE} pools "
                "cannot have other pools; give every pool one of these two roles"
            )
        for role in _APART:
            if role not in roles:
                raise ValueError(f"pools: no pool has the role {role}; add one")

    @property
    def apart(self) -> bool:
        """Whether separate replicas compute the prompts."""
        return any(pool.role != AGGREGATED for pool in self.pools)

    @property
    def names(self) -> list[str]:
        """The named profiles, policies and routers, which may be files."""
        named = [name for pool in self.pools for name in (pool.profile, pool.policy)]
        named += [pool.speculate.draft for pool in self.pools if pool.speculate is not None]
        return [n for n in (*named, self.router, self.prefill_router) if n is not None]

    def name_of(self, index: int) -> str:
        return self.pools[index].name or f"pool-{index}"


@dataclass(frozen=True)
class FleetFile:
    """where  name for errors: `--fleet fleet.yaml`
    text   the pools as one line of JSON, for run.json and `--fleet`. The router is kept as a
           setting of its own"""

    where: str
    settings: FleetSettings
    text: str


def read_fleet(given: str) -> FleetFile:
    """Read a file's path, its content (begins with a brace), or `2P6D`: numbers of prefill and
    decode replicas. Raises SettingsError."""
    if short := _SHORT.fullmatch(given.strip()):
        where, text = f"--fleet {given}", json.dumps(of_roles(int(short[1]), int(short[2])))
    elif given.lstrip().startswith("{"):
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
        raise SettingsError(f"{where}: {said_of(error, _part_of, 'pool')}") from None
    text = json.dumps(settings.model_dump(exclude_unset=True, exclude={"router"}), sort_keys=True)
    return FleetFile(where, settings, text)


def of_roles(prefill: int, decode: int) -> dict[str, list]:
    """Return the content of a fleet file with so many prefill and decode replicas."""
    counts = {PREFILL: prefill, DECODE: decode}
    return {"pools": [{"name": role, "role": role, "replicas": n} for role, n in counts.items()]}


# -- errors ----------------------------------------------------------------------------------------
_PARTS: Mapping[str, type[_Part]] = {
    "pools": PoolSettings,
    "ports": PortSettings,
    "speculate": SpeculateSettings,
    "connector": ConnectorSettings,
}


def _part_of(loc: Sequence[int | str]) -> type[_Part]:
    """Return the model that has the last field of `loc`."""
    inside = [part for part in loc[:-1] if isinstance(part, str)]
    return _PARTS[inside[-1]] if inside else FleetSettings
