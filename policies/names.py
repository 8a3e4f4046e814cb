"""Classes that are found by name: those of this package, and those of other packages, through an
entry point group. Options after the name: `name:option=value,...`. Modules are imported when they
are asked for, not before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twinserve.errors import TwinserveError, worded
from twinserve.policies.base import Options

_LARGEST = 10**18  # of whole numbers: what is counted with them still fits into 64 bits


class RegistryError(TwinserveError, ValueError):
    """A name or an option that does not exist, or a value that does not fit: one line."""


@dataclass(frozen=True)
class Names:
    """kind     as errors have it: "policy"
    own      name -> "module:Class", the module below `package`; these names cannot be taken
    group    entry point group of other packages' ones
    base     class that all of them have
    """

    kind: str
    package: str
    own: Mapping[str, str]
    group: str
    base: type[Any]

    def all(self) -> list[str]:
        """Every name there is, sorted; nothing is imported."""
        return sorted({*self.own, *(point.name for point in entry_points(group=self.group))})

    def find(self, name: str) -> type[Any]:
        """The class behind a name. Raises RegistryError."""
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return getattr(import_module(f"{self.package}.{module}"), attribute)
        for point in entry_points(group=self.group):
            if point.name == name:
                return self._loaded(point)
        known = self.all()
        raise RegistryError(
            f"no {self.kind} {name!r}{hint(name, known)}; there are {', '.join(known)}"
        )

    def _loaded(self, point: EntryPoint) -> type[Any]:
        where = f"{self.kind} {point.name!r} of another package"
        try:
            found = point.load()
        except Exception as error:  # whatever that package's own code does when it is imported
            raise RegistryError(
                f"{where} cannot be loaded from {point.value}: {worded(error)}"
            ) from error
        check_class(f"{where}: {point.value}", found, self.base)
        if getattr(found, "name", None) != point.name:
            given = getattr(found, "name", None)
            raise RegistryError(f"{where}: {point.value} says name = {given!r}; call both the same")
        return found


def check_class(where: str, found: Any, base: type) -> None:
    """Raises RegistryError where `found` is no whole class of the kind."""
    fits = isinstance(found, type) and issubclass(found, base)
    if not fits:
        raise RegistryError(f"{where} is not a {base.__name__}")
    if lacks := sorted(found.__abstractmethods__):
        raise RegistryError(f"{where} lacks {', '.join(lacks)}")


def hint(name: str, known: list[str]) -> str:
    """` (did you mean 'x'?)`, or nothing."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- options ---------------------------------------------------------------------------------------
def parse_options(what: str, text: str, given_in: str) -> dict[str, str | None]:
    """Option -> value as text, of `option=value,...`; `none` is None. what: "policy 'bros'"."""
    given: dict[str, str | None] = {}
    for part in text.split(","):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not value:
            raise RegistryError(
                f"{what}: expected option=value, not {part.strip()!r} (in {given_in!r})"
            )
        if option in given:
            raise RegistryError(f"{what}: option {option!r} is given twice")
        given[option] = None if value.lower() == "none" else value
    return given


def validated(
    what: str, model: type[Options], given: Mapping[str, str | None], besides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The options given, as the model's own types. besides: names that errors list as well. Raises
    RegistryError."""
    for option in given:
        if option not in model.model_fields:
            known = [*model.model_fields, *besides]

            raise RegistryError(
                f"{what} has no option {option!r}{hint(option, known)}; it has "
                f"{', '.join(known) or 'none'}"
            )
    try:
        options = model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else "options"
        raise RegistryError(
            f"{what}, option {where}={first['input']}: {_wrong(model, where, first)}"
        ) from None
    found = options.model_dump(exclude_unset=True)
    for option, value in found.items():
        if isinstance(value, int) and value > _LARGEST:
            raise RegistryError(
                f"{what}, option {option}={value}: should be less than or equal to {_LARGEST:.0e}"
            )
    return found


def built(kind: str, what: str, known: Mapping[str, Any], text: str) -> Any:
    """One of `known`, classes by name that take their `Options`, from `name` or
    `name:option=value,...`. Raises RegistryError.

    kind  in the error for a name that is not there: "autoscaler {}"
    what  in those for options
    """
    name, colon, rest = (part.strip() for part in text.strip().partition(":"))
    if name not in known:
        raise RegistryError(
            f"there is no {kind.format(repr(name))}{hint(name, list(known))}; there are "
            f"{', '.join(known)}"
        )
    what = f"{what} {name!r}"
    options = known[name].Options
    given = parse_options(what, rest, text) if colon else {}
    return known[name](options(**validated(what, options, given)))


def _wrong(model: type[Options], option: str, error: ErrorDetails) -> str:
    """What is wrong with an option's value; of a number out of range, the whole range."""
    said, kind = _plain(error["msg"]), error["type"]
    if kind != "finite_number" and not kind.startswith(("greater_than", "less_than")):
        return said
    bounds = [
        f"{words} {getattr(bound, name):.15g}"
        for name, words in (
            ("ge", "at least"),
            ("gt", "more than"),
            ("le", "at most"),
            ("lt", "less than"),
        )
        for bound in model.model_fields[option].metadata
        if hasattr(bound, name)
    ]
    if len(bounds) < (1 if kind == "finite_number" else 2):
        return said
    return f"should be {'a finite number, ' * (kind == 'finite_number')}{' and '.join(bounds)}"


def _plain(message: str) -> str:
    """Pydantic's sentence as a part of ours."""
    return message.removeprefix("Input ").removeprefix("Value error, ").replace("\n", " ")
