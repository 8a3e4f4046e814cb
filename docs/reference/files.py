"""The reference of files: versions, columns and fields."""

import inspect
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.reference.markdown import cell, code, docstring, table
from twinserve.formats import Format, shipped_rows
from twinserve.profiles.profile import Profile
from twinserve.sim.results import columns as schemas
from twinserve.sim.setup.failures import FaultSettings
from twinserve.sim.setup.fleet_file import (
    ConnectorSettings,
    FleetSettings,
    PoolSettings,
    PortSettings,
)

# Every format with a version: module and name.
FORMATS = (
    "sim.results.versions:RESULTS",
    "sim.results.versions:LIMITS",
    "sim.results.versions:PLANS",
    "sim.results.versions:LIMITS",
    "sim.results.decisions:LOG",
    "sim.results.routing:ROUTING",
    "traces.readers.sidecar:SIDECAR",
    "profiles.profile:PROFILE",
    "profiles.front_end:FRONT_END",
    "profiles.measured.samples:SAMPLES",
    "sim.sweep.points:POINTS",
    "experiments.study.study:FIGURES",
    "experiments.campaign.setup:CAMPAIGN",
)
# Files that people write by hand, and profiles.
DOCUMENTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("A fleet file", "Of `--fleet`, in YAML or JSON ([fleets](../fleet.md)).", FleetSettings),
    ("One of its `pools`", "", PoolSettings),
    ("The `ports` of a pool", "", PortSettings),
    ("Its `connector`", "", ConnectorSettings),
    (
        "A row of a file of failures",
        "Of `--failures`, in YAML, JSON or CSV ([failures](../fleet.md#failures)).",
        FaultSettings,
    ),
    ("A profile", "As `twinserve calibrate` writes it ([profiles](../profiles.md)).", Profile),
)
_HEAD = """# Columns and fields of files

This page is made from the code. [Files and their versions](../invariants.md#formats-of-files)
says what changed with each version, and which files have none. [Traces](../traces.md) has the
formats of traces and measurements, [metrics](../metrics.md) what stands in `summary.json`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD, "## Versions", _versions(), "## Tables of a result folder", _of_tables()]
    for name in schemas.TABLES | schemas.OPTIONAL_TABLES:
        parts += [f"### {name}.parquet", _columns(name)]
    parts.append("## Fields of documents")
    for title, said, model in DOCUMENTS:
        parts += [f"### {title}", *filter(None, [said, docstring(inspect.getdoc(model) or "")])]
        parts.append(_fields(model))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def formats() -> list[Format]:
    """Those of FORMATS."""
    found = []
    for place in FORMATS:
        module, _, name = place.partition(":")
        found.append(getattr(import_module(f"twinserve.{module}"), name))
    return found


def _versions() -> str:
    rows = [(cell(f.name), str(f.version), str(f.oldest), cell(f.by)) for f in formats()]
    return table(("format", "version written", "oldest read", "written by"), rows)


def _of_tables() -> str:
    optional = ", ".join(f"`{name}.parquet`" for name in schemas.OPTIONAL_TABLES)
    return (
        "`simulate --out` writes them. Times are seconds on the simulated clock. Runs in which "
        f"something was to fail have {optional} too."
    )


def _columns(name: str) -> str:
    rows = [
        (code(row["column"]), row["type"], cell(row["meaning"]))
        for row in shipped_rows("twinserve.sim.results", "columns.csv")
        if row["table"] == name
    ]
    return table(("column", "type", "what it is"), rows)


def _fields(model: type[BaseModel]) -> str:
    rows = [
        (code(name), code(_kind(field)), _default(field))
        for name, field in model.model_fields.items()
    ]
    return table(("field", "type", "default"), rows)


def _kind(field: FieldInfo) -> str:
    return _type(field.annotation)


def _type(kind: Any) -> str:
    if kind is type(None):
        return "null"
    origin, several = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(map(repr, several))
    if origin in (Union, UnionType):
        return " | ".join(map(_type, several))
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(_type, several))}"
    return getattr(kind, "__name__", str(kind))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    return code("null" if value is None else repr(value))
