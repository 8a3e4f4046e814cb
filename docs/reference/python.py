"""The reference of Python: public names with signatures and docstrings."""

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from docs.reference.markdown import docstring, text


@dataclass(frozen=True)
class Section:
    """A part of a page: a module, and which of its names; None: all public ones that it has."""

    title: str
    module: str
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Page:
    title: str
    said: str
    sections: tuple[Section, ...]


_API = "twinserve.sim.api"
USERS = Page(
    "Python",
    "This page is made from the code. [In Python](../terminal.md#in-python) shows how the names "
    "are used. `import twinserve as ts` has them all.",
    (
        Section(
            "Calls",
            "twinserve",
            ("simulate", "sweep", "plan", "limit", "compare", "check", "read_runs"),
        ),
        Section(
            "Results",
            "twinserve",
            ("Run", "Runs", "Sweep", "Plan", "Limits", "Comparison", "Check", "Plot"),
        ),
        Section("Plots of runs", f"{_API}.plots", ("Plots",)),
        Section("Errors", "twinserve", ("TwinserveError",)),
        Section("Settings", f"{_API}.settings", ("Settings", "EngineSettings")),
    ),
)
CONTRACTS = Page(
    "Contracts",
    "This page is made from the code. It has what a [policy](../your_own_policy.md), a memory "
    "ledger, a [router](../routers.md) and a backend must be. "
    "[How it is built](../architecture.md) says how they meet.",
    (
        Section("Policies", "twinserve.policies.base"),
        Section("Plans", "twinserve.policies.plan"),
        Section("Requests", "twinserve.policies.requests"),
        Section("Memory ledgers", "twinserve.policies.kv.base"),
        Section("Routers", "twinserve.sim.fleet.routers.base"),
        Section("Backends", "twinserve.backends.base"),
        Section("Step times", "twinserve.profiles.composition"),
    ),
)


def page(of: Page) -> str:
    """The whole page, in Markdown."""
    parts = [f"# {of.title}", of.said]
    for section in of.sections:
        module = import_module(section.module)
        parts.append(f"## {section.title}")
        if section.names is None:
            parts += [f"Module `{section.module}`.", docstring(inspect.getdoc(module) or "")]
        for name in section.names or public(module):
            parts += _object(name, getattr(module, name))
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def public(module: ModuleType) -> list[str]:
    """Classes and functions that it defines, in the order of its text."""
    found = [
        (inspect.getsourcelines(value)[1], name)
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        if value.__module__ == module.__name__
    ]
    return [name for _, name in sorted(found)]


def _object(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if not inspect.isclass(value):
        yield from _function(name, value)
        return
    yield _listing(_head(name, value))
    yield docstring(_own_doc(value))
    for member, said in _members(value):
        yield f"#### {name}.{member}"
        yield from said


def _function(name: str, value: Any) -> Iterator[str]:
    yield _listing(f"{name}{_signature(value)}")
    yield docstring(inspect.getdoc(value) or "")


def _listing(line: str) -> str:
    return f"```python\n{line}\n```"


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    kept = [one for name, one in signature.parameters.items() if name not in ("self", "cls")]
    short = str(signature.replace(parameters=kept)).replace("'", "")
    if len(short) < 90:
        return short
    back = short.rpartition(" -> ")[2]
    stars = _with_stars(kept)
    return "(\n" + "".join(f"    {one},\n" for one in stars) + f") -> {back}"


def _with_stars(parameters: list[inspect.Parameter]) -> list[str]:
    out: list[str] = []
    for one in parameters:
        kinds = (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        if one.kind == one.KEYWORD_ONLY and not any(o.startswith("*") for o in out):
            out.append("*")
        assert one.kind in (*kinds, one.POSITIONAL_OR_KEYWORD, one.VAR_KEYWORD)
        out.append(str(one).replace("'", ""))
    return out


def _head(name: str, value: type) -> str:
    """As the class begins, with its fields where it has some."""
    fields: dict[str, str] = {}
    if dataclasses.is_dataclass(value):
        fields = {f.name: str(f.type) for f in dataclasses.fields(value)}
    elif issubclass(value, enum.Enum):
        return f"class {name}: " + ", ".join(one.name for one in value)
    elif issubclass(value, dict) or hasattr(value, "__total__"):
        fields = {k: str(v) for k, v in value.__annotations__.items()}
    elif hasattr(value, "model_fields"):
        fields = {k: str(v.annotation) for k, v in value.model_fields.items()}
    lines = [f"    {k}: {_shown(v)}" for k, v in fields.items() if not k.startswith("_")]
    return "\n".join([f"class {name}{':' if lines else ''}", *lines])


def _shown(kind: str) -> str:
    if kind.startswith("ForwardRef("):
        kind = kind.removeprefix("ForwardRef(").partition(", module=")[0].removesuffix(")")
    return kind.strip("'\"").removeprefix("<class '").removesuffix("'>").replace("typing.", "")


def _own_doc(value: type) -> str:
    """A dataclass without a docstring gets its signature for one; that says nothing."""
    said = inspect.cleandoc(value.__doc__ or "")
    return "" if said.startswith(f"{value.__name__}(") else said


def _members(value: type) -> Iterator[tuple[str, list[str]]]:
    """Public methods and properties of its own."""
    for name, member in list(vars(value).items()):  # pydantic may build a class that is looked at
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        function = getattr(function, "__func__", function)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__module__ != value.__module__:
            continue  # made by pydantic or dataclasses
        said = inspect.getdoc(function) or ""
        if getattr(function, "__isabstractmethod__", False):
            said = f"To be written. {said}"
        if function is member or inspect.ismethoddescriptor(member):
            yield name, [_listing(f"{name}{_signature(function)}"), docstring(said)]
        else:
            back = inspect.signature(function).return_annotation
            kind = text(f": {_shown(str(back))}") if back is not inspect.Signature.empty else ""
            yield name, [f"Property{kind}", docstring(said)]
