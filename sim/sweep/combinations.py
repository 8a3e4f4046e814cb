"""Combinations of settings: from files and grids to the list of runs.

Files are those of `vllm bench sweep` (`--serve-params`, `--bench-params`): JSON with a list of
objects, or an object of named objects, each one combination; keys with `_` or `-`, values as the
flags have them. Several sources are crossed. `--link-vars` keeps the combinations in which two
settings are equal. After vllm/benchmarks/sweep/param_sweep.py and serve.py (0.32).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

from twinserve.formats import parse_json
from twinserve.policies.names import hint
from twinserve.sim.results.paths import text_of
from twinserve.sim.setup.config import RANKS, SettingsError, SimulationConfig
from twinserve.sim.setup.option_groups import VLLM_NAMES
from twinserve.sim.sweep.repeats import Repeat

NAME = "_benchmark_name"  # vLLM's key for the name of a combination
FIELDS = SimulationConfig.model_fields


@dataclass(frozen=True)
class Entry:
    """One combination of one source. where: for errors; settings: by name, as given."""

    where: str
    settings: Mapping[str, Any]
    name: str | None = None


@dataclass(frozen=True)
class Source:
    """A file, or one setting of the grid: alternative combinations."""

    where: str
    entries: tuple[Entry, ...]

    @property
    def names(self) -> set[str]:
        """The settings that any combination names."""
        return {name for entry in self.entries for name in entry.settings}


# -- reading ---------------------------------------------------------------------------------------
def read_params(file: Path) -> Source:
    """Return the combinations of a JSON file. Raises SettingsError with file and entry."""
    where = f"--params {file}"
    try:
        content = parse_json(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        raise SettingsError(f"{where}: there is no such file; check the path") from None
    except OSError as error:
        raise SettingsError(f"{where}: cannot be read ({error.strerror})") from None
    except _Twice as error:
        raise SettingsError(f"{where}: {error} is given twice in one object; keep one") from None
    except ValueError as error:
        raise SettingsError(f"{where}: this is not JSON ({error}); correct it") from None
    return listed(where, content)


def listed(where: str, content: Any) -> Source:
    """Return a source from a list of objects, or an object of named ones. Raises SettingsError."""
    if isinstance(content, Mapping):
        found = [(f"entry {name!r}", name, value) for name, value in content.items()]
    elif isinstance(content, (list, tuple)):
        found = [(f"entry {number}", None, value) for number, value in enumerate(content, 1)]
    else:
        found = []
    if not found:
        raise SettingsError(
            f"{where}: holds no combination; write a list of objects, or an object of named ones"
        )
    entries = tuple(_entry(f"{where}, {what}", name, value) for what, name, value in found)
    _check_names(entries)
    return Source(where, entries)


class _Twice(Exception):
    """A repeated key of an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(repr(key))
        found[key] = value
    return found


def _entry(where: str, name: str | None, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise SettingsError(f"{where}: is no object; write settings and values: {{...}}")
    settings: dict[str, Any] = {}
    for key, given in value.items():
        if key == NAME:
            name = str(given)
            continue
        setting = _setting(where, key)
        if setting in settings:
            raise SettingsError(f"{where}: {setting} is given twice; keep one of them")
        settings[setting] = _value(setting, given)
    return Entry(where, settings, name)


def _check_names(entries: Sequence[Entry]) -> None:
    known: dict[str, str] = {}
    for entry in entries:
        if entry.name is None:
            continue
        if entry.name in known:
            raise SettingsError(f"{entry.where}: another entry is called {entry.name!r}")
        known[entry.name] = entry.where


def read_grid(texts: Iterable[str]) -> list[Source]:
    """Return a source for each `--grid NAME=VALUE,VALUE,...`; a repeated setting adds values.

    VALUE,VALUE  is split at commas, but `option=value` continues the value before it, so that a
                 policy keeps its options
    [...]        a JSON list, for values with other commas

    Raises SettingsError.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        where = f"--grid {text}"
        if not equals or not rest.strip():
            raise SettingsError(f"{where}: write NAME=VALUE,VALUE,... or NAME=[JSON list]")
        found.setdefault(_setting(where, key.strip()), []).extend(_values(where, rest.strip()))
    return [axis("--grid", name, values) for name, values in found.items()]


def axis(flag: str, name: str, values: Sequence[Any]) -> Source:
    """Return a source with one setting. Raises SettingsError: unknown setting, or no values."""
    name = _setting(flag, name)
    if not values:
        raise SettingsError(f"{flag} {name}: has no value; write at least one")
    entries = tuple(
        Entry(f"{flag} {name}={text_of(value)}", {name: _value(name, value)}) for value in values
    )
    return Source(f"{flag} {name}", entries)


def of_policies(texts: Sequence[str]) -> Source:
    """Return the policies that flags name, one for each run."""
    return Source(
        "--policy", tuple(Entry(f"--policy {text}", {"policy": (text,)}) for text in texts)
    )


def _values(where: str, text: str) -> list[Any]:
    if text.startswith("["):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise SettingsError(f"{where}: this is no JSON list ({error}); correct it") from None
        if not found:
            raise SettingsError(f"{where}: the list is empty; write at least one value")
        return found
    values: list[str] = []
    for part in map(str.strip, text.split(",")):
        option, equals, _ = part.partition("=")
        if values and equals and option.isidentifier():
            values[-1] += f",{part}"
        elif part:
            values.append(part)
        else:
            raise SettingsError(f"{where}: a value is empty; write NAME=VALUE,VALUE,...")
    return values


def _setting(where: str, key: str) -> str:
    name = key.removeprefix("--").replace("-", "_")
    name = {theirs: ours for ours, theirs in VLLM_NAMES.items()}.get(name, name)
    if name not in FIELDS:
        raise SettingsError(
            f"{where}: no setting {key!r} that may vary{hint(name, list(FIELDS))}; there are "
            f"{', '.join(sorted(FIELDS))}"
        )
    return name


def _value(name: str, value: Any) -> Any:
    """Return a value for the model of settings: texts of several values as on the command line."""
    if name == "policy":
        return tuple(value) if isinstance(value, list) else (value,)
    if isinstance(value, str):
        kinds = get_args(FIELDS[name].annotation)
        if value.lower() == "none" and type(None) in kinds and str not in kinds:
            return None
        if any(get_origin(kind) is tuple for kind in kinds):
            return tuple(value.replace(",", " ").split())
    return tuple(value) if isinstance(value, list) else value


# -- crossing --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Combination:
    """One entry of each source."""

    parts: tuple[Entry, ...]

    @property
    def where(self) -> str:
        return " with ".join(part.where for part in self.parts)

    @property
    def name(self) -> str | None:
        """The joined names of its named entries."""
        return ", ".join(part.name for part in self.parts if part.name is not None) or None

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.settings.items()}


def read_links(text: str) -> list[tuple[str, str]]:
    """`--link-vars left=right,...`. Raises SettingsError."""
    links = []
    for part in filter(None, map(str.strip, text.split(","))):
        left, equals, right = part.partition("=")
        if not equals:
            raise SettingsError(f"--link-vars {part}: write SETTING=SETTING,...")
        where = f"--link-vars {part}"
        links.append((_setting(where, left.strip()), _setting(where, right.strip())))
    return links


def crossed(
    sources: Sequence[Source], links: Sequence[tuple[str, str]] = ()
) -> Iterator[Combination]:
    """Return every choice of an entry from each source, the last source's changing fastest; with
    `links`, those that name both settings of each link, with equal values.

    Raises SettingsError if two sources name one setting that is not linked with itself.
    """
    joined = {left for left, right in links if left == right}
    seen: dict[str, str] = {}
    for source in sources:
        for name in sorted(source.names - joined):
            if name in seen:
                raise SettingsError(
                    f"{source.where}: {name} is set by {seen[name]} as well; keep one of them, or "
                    f"keep their common values with --link-vars {name}={name}"
                )
            seen[name] = source.where
    for parts in product(*(source.entries for source in sources)):
        found = Combination(parts)
        if all(_linked(found, left, right) for left, right in links):
            yield found


def _linked(combination: Combination, left: str, right: str) -> bool:
    """Return whether both settings are named, with all values equal."""
    given = [
        (name, text_of(part.settings[name]))
        for part in combination.parts
        for name in {left, right}
        if name in part.settings
    ]
    least = 2 if left == right else 1
    enough = all(sum(name == wanted for name, _ in given) >= least for wanted in (left, right))
    return enough and len({value for _, value in given}) == 1


# -- runs ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    axes    the combination's settings as on the command line, and its name
    config  all settings; one policy
    where   for errors
    told_by the setting that differs between the runs of its combination
    """

    axes: Mapping[str, Any]
    config: SimulationConfig
    where: str
    told_by: str = "seed"

    @property
    def copy(self) -> dict[str, Any]:
        """The seed, and the setting that differs between the runs of its combination."""
        return {"seed": self.config.seed, self.told_by: getattr(self.config, self.told_by)}

    def __str__(self) -> str:
        seed = self.copy
        return " ".join(f"{name}={text_of(value)}" for name, value in {**self.axes, **seed}.items())


def runs_of(
    combinations: Iterable[Combination], repeat: Repeat, build: Callable[[dict], SimulationConfig]
) -> list[Run]:
    """Return a run for each combination and each of its copies, the copies changing fastest.

    build  adds the run's other settings to a combination's; its ValueError is reported with the
           combination

    Raises SettingsError: refused settings, several policies in one run, a repeated combination, no
    combination at all.
    """
    runs: list[Run] = []
    seen: dict[SimulationConfig, str] = {}
    for combination in combinations:
        where = combination.where or "the flags"
        try:
            config = build(combination.settings)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
        if len(config.policy) != 1:
            raise SettingsError(f"{where}: a run has one policy; make an entry of each")
        name = {} if combination.name is None else {"name": combination.name}
        given = {k: v for k, v in combination.settings.items() if k != "seed"}
        named = {key: getattr(config, key) for key in given}
        # ranks went into the profile's name
        named |= {key: value for key, value in given.items() if key in RANKS}
        for copy in repeat.copies(config):
            run = Run({**name, **named}, copy, where, repeat.told_by)
            if run.config in seen:
                again = seen[run.config]
                raise SettingsError(f"{where}: with seed {copy.seed} is the same run as {again}")
            seen[run.config] = where
            runs.append(run)
    if not runs:
        raise SettingsError(
            "--link-vars: no combination has equal values of the linked settings; add some"
        )
    return runs
