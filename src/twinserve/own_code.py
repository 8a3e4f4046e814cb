"""Classes that are found by name: those of this package, those of other packages through an entry
point group, and those in a file of their own, `FILE.py:Class`. And where such code fails. Modules
are imported when they are asked for, not before. Below every room."""

import builtins
import importlib.metadata
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from twinserve.errors import TwinserveError, worded

GROUPS = ("twinserve.policies", "twinserve.kv", "twinserve.routers", "twinserve.readers")
# a file's name may have colons: it ends where `.py` does
IN_FILE = re.compile(r"(?P<file>.+?\.py)(?::(?P<cls>[^:]*))?")
WITH_OPTIONS = re.compile(rf"(?P<name>{IN_FILE.pattern})(?P<colon>:(?P<rest>.*))?", re.DOTALL)


class RegistryError(TwinserveError, ValueError):
    """A name or an option that does not exist, or a value that does not fit: one line."""


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of `group` in all installed packages."""
    return _entry_points(tuple((folder, _changed(folder)) for folder in sys.path)).select(
        group=group
    )


@lru_cache(1)  # a file is read for each package, which takes milliseconds
def _entry_points(folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """folders: where packages are, and when a package came or went there last."""
    found = importlib.metadata.entry_points()  # once: to ask for a group reads all files, too
    return EntryPoints(point for group in GROUPS for point in found.select(group=group))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


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
        near = hint(name, known)
        if Path(f"{name}.py").is_file():
            near = f" (did you mean {name}.py:CLASS?)"
        raise RegistryError(f"no {self.kind} {name!r}{near}; there are {', '.join(known)}")

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
    """Raises RegistryError if `found` is no whole class of the kind, or if a method that each such
    class has cannot be called as it will be."""
    fits = isinstance(found, type) and issubclass(found, base)
    if not fits:
        raise RegistryError(f"{where} is not a {base.__name__}")
    if lacks := sorted(found.__abstractmethods__):
        raise RegistryError(f"{where} lacks {', '.join(lacks)}")
    for name in sorted(base.__abstractmethods__):
        if not callable(method := getattr(base, name)):  # a property
            continue
        given = inspect.signature(method).parameters
        try:
            inspect.signature(getattr(found, name)).bind(*given)
        except TypeError:
            raise RegistryError(
                f"{where}.{name} takes other arguments; write {name}({', '.join(given)})"
            ) from None


def hint(name: str, known: list[str]) -> str:
    """` (did you mean 'x'?)`, or nothing."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# -- a file of its own -----------------------------------------------------------------------------
def class_in_file(names: Names, file: str, wanted: str) -> type[Any]:
    """The class `wanted` of the kind that `names` has. Raises RegistryError."""
    kind, base = names.kind, names.base
    module = _module(kind, file)
    if not hasattr(module, wanted):
        known = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
        ]
        lacks = f"has no {wanted!r}{hint(wanted, known)}" if wanted else "needs a class"
        there = (
            f"write {file}:{' or '.join(known)}"
            if known
            else f"it has no subclass of {base.__name__}"
        )
        raise RegistryError(f"{kind} file {file} {lacks}; {there}")
    found, where = getattr(module, wanted), f"{kind} file {file}: {wanted}"
    check_class(where, found, base)
    name = getattr(found, "name", None)
    if not (isinstance(name, str) and name):
        raise RegistryError(f"{where} lacks a name; give it one, as name = {wanted.lower()!r}")
    if name in names.all():
        raise RegistryError(f"{where} says name = {name!r}, which another {kind} has; choose one")
    return found


def label(names: Names, text: str) -> str:
    """Return `mine:chunk=64` for `file.py:Mine:chunk=64`, with the class's own name; any other text
    as it is."""
    found = WITH_OPTIONS.fullmatch(text)
    if found is None or text.partition(":")[0] in names.all():
        return text
    try:
        own = class_in_file(names, found["file"], found["cls"] or "")
    except RegistryError:  # told where it is run
        return text
    return f"{own.name}{found['colon'] or ''}"


def _module(kind: str, file: str) -> ModuleType:
    """What is in `file`, run once in this process as long as it stays as it is."""
    path = Path(file).expanduser().absolute()
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise RegistryError(f"{kind} file {file}: there is no such file; check the path") from None
    except OSError as error:
        raise RegistryError(f"{kind} file {file}: cannot be read ({error.strerror})") from None
    digest = sha256(source).hexdigest()
    name = f"{path.stem}_{sha256(f'{path} {digest}'.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(__file__=str(path), __sha256__=digest)
        try:
            exec(compile(source, path, "exec"), vars(module))
        except (Exception, SystemExit) as error:  # whatever the file's own code does
            del sys.modules[name]
            raise RegistryError(f"{kind} file {file}{_said(error, str(path))}") from error
    return sys.modules[name]


def _said(error: BaseException, path: str) -> str:
    """`, line 3: NameError: name 'x' is not defined`; the last line of the file that led there."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename == path:
        lines, message = [error.lineno], error.msg
    line = f", line {lines[-1]}" if lines else ""
    return " ".join(f"{line}: {type(error).__name__}: {message}".split())


def file_sha256(found: type[Any]) -> str | None:
    """Of the file whose class it is, as it was when it was read; None for one from a package."""
    return getattr(sys.modules.get(found.__module__), "__sha256__", None)


# -- what it does wrong ----------------------------------------------------------------------------
def fault(error: BaseException) -> str | None:
    """`mine.py:18: 'SystemView' has no 'now_s' (did you mean 'now'?)`: the last line of the user's
    own code that led to the error, and what went wrong there. None: no such code was called."""
    for each in _chain(error):
        frames = [(f, line) for f, line in traceback.walk_tb(each.__traceback__) if _is_own(f)]
        if frames:
            frame, line = frames[-1]
            file = os.path.relpath(frame.f_code.co_filename)
            shown = frame.f_code.co_filename if file.startswith("..") else file
            return f"{shown}:{line}: {_wrong(each, frame)}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It, and what it was raised from; simpy raises copies of what its processes raise."""
    seen: list[BaseException] = []
    after: BaseException | None = error
    while after is not None and after not in seen:
        yield after
        seen.append(after)
        after = after.__cause__ or after.__context__


def _is_own(frame: FrameType) -> bool:
    if "__sha256__" in frame.f_globals:
        return True
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package != "twinserve" and package in {
        point.module.partition(".")[0] for group in GROUPS for point in entry_points(group=group)
    }


def _wrong(error: BaseException, frame: FrameType) -> str:
    """What Python says, without words for its own readers."""
    name = getattr(error, "name", None)
    if isinstance(error, AttributeError) and name and error.obj is not None:
        return f"{type(error.obj).__name__!r} has no {name!r}{hint(name, dir(error.obj))}"
    if isinstance(error, NameError) and name:
        known = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
        return f"there is no {name!r}{hint(name, known)}"
    said = worded(error)
    kind = type(error).__name__
    return said if said == kind or isinstance(error, TwinserveError) else f"{kind}: {said}"
