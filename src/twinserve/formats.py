"""Version numbers of the files that twinserve writes and reads again. docs/formats.md lists them.

A program reads what it wrote itself and what earlier ones wrote. A file of a later program may mean
something else by the same words, so it is refused in one line that says what to do.

To change a format: raise its `version`, and append to its `upgrades` what makes content of the
version before into content of the new one. Writers and readers know only the present version.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")
KEY = "version"


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

    ValueError where an upgrade is missing.
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
