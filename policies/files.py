"""Classes that stand in a file of their own, without a package: `FILE.py:Class`."""

from __future__ import annotations

import re
import sys
import traceback
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from twinserve.policies.names import Names, RegistryError, check_class, hint

# a file's name may have colons: it ends where `.py` does
IN_FILE = re.compile(r"(?P<file>.+?\.py)(?::(?P<cls>[^:]*))?")
WITH_OPTIONS = re.compile(rf"(?P<name>{IN_FILE.pattern})(?P<colon>:(?P<rest>.*))?", re.DOTALL)


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
