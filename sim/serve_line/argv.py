"""The options of `vllm serve`, read with the rules of its own parser.

options.csv has a line for each option of 0.32 and each that was removed since 0.6. A line has the
number of words, whether the option is simulated, and its first and last releases. Names and numbers
are compared with `vllm.engine.arg_utils` and `vllm.entrypoints` by a live test. `since` and `gone`
are the first releases, of those at hand, with and without the option.
"""

import argparse
import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NoReturn

from twinserve.profiles.kv_memory.releases import Release, parse_release
from twinserve.sim.serve_line.words import ServeLineError, human_integer, human_length, plain

# Releases whose parsers were at hand. What was first seen in one may be as old as the one before.
_SEEN = tuple(
    parse_release(text)
    for text in "0.6.0 0.7.3 0.8.5 0.9.2 0.10.1 0.11.0 0.12.0 0.15.1 0.17.1 0.19.1 0.21.0 0.24.0 "
    "0.28.0 0.32.0".split()
)
_BOOLEANS_WITH_VALUE: Release = (0, 8, 5)  # before, --enable-chunked-prefill took True or False


@dataclass(frozen=True)
class Option:
    """short: other names. takes: kind of value. treated: taken, passed (means nothing here), warned
    (matters and is not simulated) or refused. why: of the last two."""

    name: str
    short: tuple[str, ...]
    takes: str
    treated: str
    since: Release | None
    gone: Release | None
    why: str

    def in_release(self, release: Release | None) -> bool:
        """Whether that release may know it; None: 0.32, or what went before."""
        if release is None:
            return True
        earlier = [seen for seen in _SEEN if self.since is not None and seen < self.since]
        too_old = bool(earlier) and release <= earlier[-1]
        return not too_old and (self.gone is None or release < self.gone)


@cache
def options() -> dict[str, Option]:
    """By long name."""
    text = resources.files(__package__).joinpath("options.csv").read_text(encoding="utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        since, gone = (parse_release(row[k]) if row[k] else None for k in ("since", "gone"))
        name, short = row["name"], tuple(row["short"].split())
        found[name] = Option(name, short, row["takes"], row["treated"], since, gone, row["why"])
    return found


@dataclass
class Given:
    """A command line. values: by long name, the last of two; order: of names; said: words of
    each."""

    model: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ServeLineError(message)


class _Keep(argparse.Action):
    """Keeps a value under the option's long name, with what was said."""

    def __init__(self, *args, option: str, flag: bool | None = None, **more) -> None:
        super().__init__(*args, **more)
        self.option, self.flag = option, flag

    def __call__(self, parser, namespace, values, said=None) -> None:
        given: Given = namespace.given
        if self.flag is not None:
            values = not (said or "").startswith("--no-")
        given.values.pop(self.option, None)  # the last of two counts, and its place
        given.values[self.option] = values
        given.said[self.option] = said or self.option


_TYPES: dict[str, Callable[[str], Any]] = {
    "whole": int,
    "number": float,
    "integer": human_integer,
    "length": human_length,
}


@cache
def _parser(release: Release | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", add_help=False, exit_on_error=False)
    parser.add_argument("model_tag", nargs="?")
    present = [option for option in options().values() if option.in_release(release)]
    taken: set[str] = set()
    for option in sorted(present, key=lambda option: option.gone is not None):
        names = [name for name in (option.name, *option.short) if name not in taken]
        more: dict[str, Any] = {"action": _Keep, "option": option.name, "dest": option.name}
        if option.takes in ("flag", "switch"):
            names += [f"--no-{option.name[2:]}"] * (option.takes == "switch")
            more |= {"nargs": 0, "flag": True}
        elif option.takes in ("many", "maybe"):
            more |= {"nargs": "+" if option.takes == "many" else "?"}
        else:
            more["type"] = _unless_empty(_TYPES.get(option.takes, str), option.takes)
        parser.add_argument(*names, **more)
        taken.update(names)
    return parser


def _unless_empty(read: Callable[[str], Any], takes: str) -> Callable[[str], Any]:
    """A variable without a value stands for any number; whether that matters is decided later."""

    def value(text: str) -> Any:
        if plain(text) != text:
            return text
        try:
            return read(text)
        except ValueError as error:
            if read in (human_integer, human_length):
                raise argparse.ArgumentTypeError(str(error)) from None
            raise

    value.__name__ = {"whole": "whole number", "integer": "number"}.get(takes, takes)
    return value


def read_argv(argv: Sequence[str], release: Release | None = None) -> Given:
    """What the words after `vllm serve` say. release: whose options they are; None: those of 0.32,
    and what earlier ones had. Raises ServeLineError as vLLM's parser would."""
    given = Given()
    words, nested = _with_dotted(_dashes(_with_old_booleans(argv, release)))
    try:
        found, rest = _parser(release).parse_known_args(
            words, argparse.Namespace(given=given, **dict.fromkeys(("model_tag",)))
        )
    except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        raise ServeLineError(plain(str(error))) from None
    if rest:
        raise ServeLineError(f"{_unknown(plain(rest[0]), release)}")
    for name, value in nested.items():
        given.values[name] = value
        given.said.setdefault(name, f"{name}.{next(iter(value), '')}")
    given.model = given.values.get("--model", found.model_tag)
    if found.model_tag is not None and "--model" in given.values:
        raise ServeLineError(
            f"{plain(found.model_tag)} and --model {plain(given.values['--model'])} both name the "
            "model; drop one"
        )
    for name, value in given.values.items():
        if options()[name].takes == "json" and isinstance(value, str):
            given.values[name] = _json(name, value)
    return given


def _unknown(word: str, release: Release | None) -> str:
    name = "--" + word.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")
    option = options().get(name)
    if option is None or release is None:
        return f"{word}: vLLM has no such option; drop it, or check how it is written"
    named = ".".join(map(str, release))
    gone = option.gone is not None and release >= option.gone
    when = "has removed it" if gone else "does not have it yet"
    return f"{word}: vLLM {named} {when}; drop it, or name the release that runs"


def _dashes(argv: Sequence[str]) -> list[str]:
    """Underscores of names as dashes; `-O3` and `-O=3` as the option that it is."""
    words = []
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            head, dot, tail = name.partition(".")
            words.append(head.replace("_", "-") + dot + tail + equals + value)
        elif re.fullmatch(r"-O=?[0-3]", word):
            words += ["--optimization-level", word[-1]]
        elif word == "-O" and argv[i + 1 : i + 2] and argv[i + 1] in "0123":
            words.append("--optimization-level")
        else:
            words.append(word)
    return words


def _with_old_booleans(argv: Sequence[str], release: Release | None) -> list[str]:
    """`--enable-chunked-prefill=False` and `... False`, which releases up to 0.7.3 took."""
    if release is not None and release >= _BOOLEANS_WITH_VALUE:
        return list(argv)
    words: list[str] = []
    for word in argv:
        before = words[-1:] == ["--enable-chunked-prefill"] and word.lower() in ("true", "false")
        said = re.fullmatch(r"(?i)--enable[-_]chunked[-_]prefill(?:=(true|false))?", word)
        if before:
            words[-1] = _on_or_off(word)
        elif said:
            words.append(_on_or_off(said[1] or "true"))
        else:
            words.append(word)
    return words


def _on_or_off(value: str) -> str:
    return f"--{'' if value.lower() == 'true' else 'no-'}enable-chunked-prefill"


def _with_dotted(words: list[str]) -> tuple[list[str], dict[str, dict]]:
    """Without `--option.key value`, and what these say by option."""
    kept: list[str] = []
    nested: dict[str, dict] = {}
    pending = iter(words)
    for word in pending:
        name, equals, value = word.partition("=")
        if not (word.startswith("-") and "." in name and re.match(r"--?[a-z]", word)):
            kept.append(word)
            continue
        if not equals:
            value = next(pending, "")
        listed = name.endswith("+")
        head, *keys = name.removesuffix("+").split(".")
        option = _by_name().get(head)
        if option is None:
            kept.append(word)
            continue
        part = nested.setdefault(option.name, {})
        for key in keys[:-1]:
            part = part.setdefault(key, {})
        part[keys[-1]] = value.split(",") if listed else _scalar(value)
    return kept, nested


@cache
def _by_name() -> dict[str, Option]:
    return {name: option for option in options().values() for name in (option.name, *option.short)}


def is_option(word: str) -> bool:
    """Whether a word begins as an option of vLLM."""
    name = word.split("=", 1)[0].split(".", 1)[0]
    name = name.replace("_", "-") if name.startswith("--") else name
    return name in _by_name() or f"--{name.removeprefix('--no-')}" in options()


def _scalar(text: str) -> Any:
    for read in (json.loads, human_integer):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _expanded(text: str) -> str:
    """JSON with `80G` and its kin as numbers (`_expand_json_human_readable_numbers`)."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    number = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
    outside = [number.sub(lambda said: str(human_integer(said[0])), one) for one in parts[::2]]
    parts[::2] = outside
    return "".join(parts)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(_expanded(plain(text)))
    except ValueError:
        if text.strip().startswith("{"):
            raise ServeLineError(f"{name} {plain(text)!r}: this is not JSON; correct it") from None
        return text
