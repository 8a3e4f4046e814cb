"""The `<file>.meta.json` of a trace that we wrote: facts that its rows cannot express."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from twinserve.formats import Format, parse_json, same
from twinserve.traces.readers.columns import MAX_SECONDS, MAX_TOKENS, shown
from twinserve.traces.workload import (
    ApplicationInfo,
    BestEffortPool,
    Provenance,
    Workload,
    WorkloadError,
)

FORMAT = "mooncake+"
SIDECAR: Format[dict] = Format(
    "traces' sidecars",
    version=2,
    by="twinserve trace convert, trace synth, or simulate --export",
    oldest=1,
    upgrades=(same,),  # from 1, which had no closed loops over the list and no stages
)
SUFFIX = ".meta.json"


class Pool(BaseModel):
    """BestEffortPool on disk."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)
    batch: int = Field(ge=1, le=1_000_000)
    prompt_tokens: tuple[int, int] = Field(strict=False)
    output_tokens: tuple[int, int] = Field(strict=False)
    seed: int = Field(ge=0)
    # without an end, or with one that no clock comes to, batches would follow each other for ever
    until_s: float | None = Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _bounds(cls, bounds: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= bounds[0] <= bounds[1] <= MAX_TOKENS:
            raise ValueError(f"lengths {bounds[0]} .. {bounds[1]}: need 1 <= low <= high")
        return bounds


class App(BaseModel):
    """ApplicationInfo on disk."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)
    kind: str
    text: str | None = None


class Source(BaseModel):
    """Where the rows came from before they were written."""

    name: str
    path: str | None = None
    sha256: str | None = None
    replica: bool = False


class Meta(BaseModel):
    """Content of a sidecar. `sha256` is that of the data file; `prefix` False means that the hash
    ids were made up for tools that need them and share nothing; `concurrency` is that of a closed
    loop, `stages_s` are those of a stated load; `group_names` only if the rows do not show their
    order; `applications` by the name of their group."""

    format: str = FORMAT
    version: int = SIDECAR.version
    time_unit: str = Field(default="ms", pattern="^(ms|s)$")
    block_size: int = Field(ge=1, le=2**31)
    rows: int = Field(ge=1)
    sha256: str
    prefix: bool = True
    group_names: list[str] | None = None
    applications: dict[str, App] | None = None
    pool: Pool | None = None
    concurrency: int | None = Field(default=None, ge=1)
    stages_s: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    source: Source
    transforms: list[str] = []
    notices: list[str] = []


def path_of(path: str | Path) -> Path:
    return Path(f"{path}{SUFFIX}")


def load(path: str | Path) -> Meta | None:
    """Return a trace file's sidecar, None without one of ours; WorkloadError: broken, or later."""
    beside = path_of(path)
    try:
        text = beside.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise WorkloadError(f"{beside}: cannot be read ({shown(str(e))}): remove it") from None
    try:
        content = parse_json(text)
    except ValueError:
        raise WorkloadError(f"{beside}: not JSON: remove it or write the trace again") from None
    if type(content) is not dict or content.get("format") != FORMAT:
        return None
    content = SIDECAR.read(content, beside, WorkloadError)
    try:
        return Meta.model_validate(content)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(map(str, first["loc"])) or "file"
        raise WorkloadError(
            f"{beside}: field '{field}': {shown(first['msg'])}: remove it or write the trace again"
        ) from None


def describe(w: Workload, digest: str, block_size: int, first_seen: list[str]) -> Meta:
    """The sidecar of a workload about to be written; `first_seen`: its groups in row order."""
    p = w.provenance
    return Meta(
        block_size=block_size,
        rows=len(w),
        sha256=digest,
        prefix=w.prefix is not None,
        group_names=list(w.group_names) if w.group_names != first_seen else None,
        applications={w.group_names[g]: App(**asdict(a)) for g, a in w.applications.items()}
        or None,
        pool=Pool(**asdict(w.pool)) if w.pool is not None else None,
        concurrency=w.concurrency,
        stages_s=list(w.stages_s),
        source=Source(name=p.name, path=p.path, sha256=p.sha256, replica=p.replica),
        transforms=list(p.transforms),
        notices=list(p.notices),
    )


def dump(meta: Meta) -> bytes:
    return (json.dumps(meta.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


def apply(w: Workload, meta: Meta, digest: str) -> Workload:
    """The workload as it was before writing. A file edited since keeps its units, and says so."""
    p = w.provenance
    edited = (
        () if digest == meta.sha256 else ("the file was changed after its sidecar was written",)
    )
    source = Provenance(
        meta.source.name,
        path=p.path,
        sha256=digest,
        replica=meta.source.replica,
        transforms=tuple(meta.transforms),
        notices=(*meta.notices, *p.notices, *edited),
    )
    pool = BestEffortPool(**meta.pool.model_dump()) if meta.pool is not None else None
    w = replace(
        w,
        provenance=source,
        pool=pool,
        concurrency=meta.concurrency,
        stages_s=tuple(meta.stages_s),
        prefix=w.prefix if meta.prefix else None,
    )
    return _with_applications(w if edited else _renumbered(w, meta), meta)


def _with_applications(w: Workload, meta: Meta) -> Workload:
    if not meta.applications:
        return w
    known = {name: ApplicationInfo(a.kind, a.text) for name, a in meta.applications.items()}
    return replace(
        w, applications={g: known[name] for g, name in enumerate(w.group_names) if name in known}
    )


def _renumbered(w: Workload, meta: Meta) -> Workload:
    """With the groups in the order that the sidecar says."""
    if meta.group_names is None:
        return w
    index = {name: i for i, name in enumerate(meta.group_names)}
    if len(index) < len(meta.group_names) or any(name not in index for name in w.group_names):
        return w
    renumbered = np.array([index[name] for name in w.group_names] + [-1], np.int64)
    return replace(w, group=renumbered[w.group], group_names=meta.group_names)
