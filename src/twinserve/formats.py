"""Rules of all files that twinserve writes and reads again: version numbers, the depth of JSON, and
whole files or none. docs/invariants.md lists the files.

A program reads what it wrote itself and what earlier ones wrote. A file of a later program may mean
something else by the same words, so it is refused in one line that says what to do.

To change a format: raise its `version`, and append to its `upgrades` what makes content of the
version before into content of the new one. Writers and readers know only the present version.
"""

from __future__ import annotations

import csv
import json
import os
import reprlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")
KEY = "version"
DEEPEST = 100  # brackets within brackets of a JSON document; no settings need ten


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """As json.loads, hooks included. Raises ValueError, never RecursionError, also for what is so
    deep that a walk through it would meet Python's limit."""
    try:
        found = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, depth = [found], 0
    while level:
        if depth >= DEEPEST:
            raise ValueError(_TOO_DEEP)
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        depth += 1
    return found


_TOO_DEEP = f"more than {DEEPEST} nested brackets"


def shipped_text(package: str | None, name: str) -> str:
    """A file that ships with the module's `package`."""
    inner = (package or "twinserve").split(".")[1:]  # importlib.resources takes long to load
    return Path(__file__).parent.joinpath(*inner, name).read_text(encoding="utf-8")


def shipped_rows(package: str | None, name: str) -> list[dict[str, str]]:
    """The rows of a CSV file that ships. Lines that begin with # are remarks."""
    lines = shipped_text(package, name).splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def shipped_json(package: str | None, name: str) -> dict[str, Any]:
    """What a JSON file that ships holds."""
    return json.loads(shipped_text(package, name))


def number_or_none(cell: str) -> float | None:
    """None for an empty cell."""
    return float(cell) if cell else None


@contextmanager
def made_folder(folder: str | PathLike[str]) -> Iterator[Path]:
    """The folder, made with those above it; those that were not there go again where anything
    fails. Raises OSError."""
    wanted = Path(folder)
    new = [one for one in (wanted, *wanted.parents) if not one.exists()]
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
    except BaseException:
        for one in new:
            with suppress(OSError):  # another process writes there by now
                one.rmdir()
        raise


@contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[Path]:
    """A file to write into, which takes the place of `path` at the end, or goes where anything
    fails, with the folders that were made for it. Raises OSError."""
    target = Path(path)
    with made_folder(target.parent) as folder:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.")
        os.close(handle)
        partial = Path(temporary)
        try:
            yield partial
            partial.chmod(0o644)  # mkstemp makes it private; it is as readable as any other result
            os.replace(partial, target)
        except OSError as error:  # what fails while it writes names no file, or the hidden one
            if error.errno is not None and error.filename in (None, temporary):
                error.filename = str(target)
            raise
        finally:
            partial.unlink(missing_ok=True)


def same(content: Content) -> Content:
    """The upgrade to a version that differs from the one before in its number alone."""
    return content


@dataclass(frozen=True)
class Format(Generic[Content]):
    """One kind of file, or of folder.

    name      in the plural, as errors have it: "result folders"
    version   of what is written now
    by        what writes one: command or setting
    oldest    that was ever written, and what a file without a number is taken for. 0: files were
              written before they had numbers
    upgrades  upgrades[i] makes content of version oldest + i into content of the next version;
              what content is, is the reader's affair

    Raises ValueError if an upgrade is missing.
    """

    name: str
    version: int
    by: str
    oldest: int = 0
    upgrades: tuple[Callable[[Content], Content], ...] = ()

    def __post_init__(self) -> None:
        if self.oldest + len(self.upgrades) != self.version:
            raise ValueError(
                f"{self.name}: {len(self.upgrades)} upgrades do not lead from version "
                f"{self.oldest} to version {self.version}; each version needs one"
            )

    def numbered(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """`document` as it is written, with the number of the present version."""
        return {KEY: self.version} | {k: v for k, v in document.items() if k != KEY}

    def opened(
        self, document: Mapping[str, Any], where: str | PathLike[str], error: type[Exception]
    ) -> tuple[dict[str, Any], int]:
        """A written document without its number, and its version. Raises `error` as `check`."""
        version = self.check(document[KEY], where, error) if KEY in document else self.oldest
        return {key: value for key, value in document.items() if key != KEY}, version

    def check(self, number: object, where: str | PathLike[str], error: type[Exception]) -> int:
        """The version that a file says. Raises `error`, one line that begins with `where`: a later
        version than this program reads, or no positive whole number."""
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            if number <= self.version:
                return number
            said = f"is of version {reprlib.repr(number)}"
        else:
            said = f"has version {reprlib.repr(number)}, which is no positive whole number"
        raise error(
            f"{where}: {said}, and this twinserve reads {self.name} up to version "
            f"{self.version}: upgrade twinserve, or write it again with this one ({self.by})"
        )

    def upgraded(self, content: Content, version: int) -> Content:
        """Content of the present version, made of content of `version`."""
        for upgrade in self.upgrades[version - self.oldest :]:
            content = upgrade(content)
        return content

    def read(
        self: Format[dict[str, Any]],
        document: Mapping[str, Any],
        where: str | PathLike[str],
        error: type[Exception],
    ) -> dict[str, Any]:
        """A written document as one of the present version, without its number: for formats whose
        content is that document. Raises `error` as `check`."""
        return self.upgraded(*self.opened(document, where, error))
