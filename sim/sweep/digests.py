"""What a kept result depends on, as digests: sources of the package, recorded traces, files."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path

from twinserve.traces.download import sha256_of
from twinserve.traces.verbs import list_traces

# Of the package, whether it is installed or reached through the links in src/twinserve.
ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "twinserve."
_SIMULATOR = ("sim", "policies", "backends", "profiles", "traces")


@cache
def sources_digest(work: Callable) -> str:
    """Of whatever can change what `work` returns: its own module, and every module and data file of
    the simulator."""
    found = sorted(
        path
        for room in _SIMULATOR
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".json", ".npz")
    )
    sha = hashlib.sha256()
    for path in [*_own_modules(Path(inspect.getfile(work))), *found]:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def traces_digest() -> str:
    """Of the files that a run would find for the recorded traces; where there is none, of what
    stands in for it."""
    found = [
        (trace["name"], trace["where"]) for trace in list_traces() if trace["kind"] == "recorded"
    ]
    files = [
        (name, content_digest(Path(where)) if Path(where).is_file() else where.partition(":")[0])
        for name, where in found
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:24]


def content_digest(file: Path) -> str:
    """sha256 of a file's content, read once as long as the file stays as it is."""
    status = file.stat()
    return _content_of(file.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _content_of(file: Path, size: int, changed_ns: int) -> str:
    return sha256_of(file)


def _own_modules(file: Path) -> list[Path]:
    """`file`, and the modules of the package outside of the simulator that it imports, and
    theirs."""
    found, todo = set(), [file.resolve()]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            named = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and named.startswith(_PACKAGE):
                parts = named.split(".")[1:]
                if parts[0] in _SIMULATOR:
                    continue
                module = ROOT.joinpath(*parts)
                todo += [
                    module.with_suffix(".py"),
                    *(module / f"{name.name}.py" for name in node.names),
                ]
    return sorted(found)
