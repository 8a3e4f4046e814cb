"""Options after a name: `name:option=value,...`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twinserve.own_code import RegistryError, hint
from twinserve.policies.base import Options

_LARGEST = 10**18  # of whole numbers: what is counted with them still fits into 64 bits


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
