"""Results of single runs, one file each, so that an interrupted grid continues.

A file names its package sources and recorded traces. Results of other sources are reused only on
request, and results with other traces never. A file of a later format is neither used nor replaced.

A file is written whole or not at all, even if the process is killed. Nothing is forced to the disk:
after a machine failure or an edit, a damaged file is detected and its run is repeated.

Digests identify what a kept result depends on: package sources, recorded traces, files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twinserve import formats
from twinserve.formats import Format, parse_json, same
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.download import sha256_of
from twinserve.traces.verbs import list_traces
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_atomically

# Of the package, whether it is installed or reached through the links in src/twinserve.
ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "twinserve."
FORMATS = Path(formats.__file__)  # reads the data that ship; not below the links
_SIMULATOR = ("sim", "policies", "backends", "profiles", "traces", "native")
_KINDS = (".py", ".pyx", ".pxd", ".json", ".csv")  # native's compiled sources, too
# Of these: what computes a run, not what asks for runs, shows them or compares them.
_COMPUTES = (
    *("sim/engine", "sim/fleet", "sim/setup", "sim/results", "sim/serve_line"),
    *("policies", "backends", "profiles", "traces", "native"),
)


@cache
def sources_digest(work: Callable) -> str:
    """Return a digest of all that can change the result of `work`: its module, and every module and
    data file of the simulator."""
    sha = hashlib.sha256()
    for path in [*_own_modules(Path(inspect.getfile(work))), *_files_of(_SIMULATOR)]:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def code_digest(work: Callable) -> str:
    """Return a digest of what `work` computes: as `sources_digest`, without docstrings, comments
    and layout, and of the simulator without commands and reports. The same for every version of
    Python."""
    own, live = _own_modules(Path(inspect.getfile(work)), _COMPUTES), ROOT / "backends/live"
    sha = hashlib.sha256()
    for path in [*own, *_files_of(_COMPUTES)]:
        if not path.is_relative_to(live):
            sha.update(_computed_by(path).encode())
    return sha.hexdigest()


def _files_of(rooms: Sequence[str]) -> list[Path]:
    """Return the sources in these folders of the package, and `formats.py`."""
    found = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in _KINDS]
    return [*sorted(found), FORMATS]


@cache
def _computed_by(path: Path) -> str:
    text = path.read_bytes()
    if path.suffix == ".py":
        text = _without_docs(ast.parse(text)).encode()
    return hashlib.sha256(text).hexdigest()


def _without_docs(node: object) -> str:
    if isinstance(node, ast.AST):
        given = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        fields = [f"{name}={_without_docs(value)}" for name, value in given]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return ";".join(_without_docs(part) for part in node if not _is_text(part))
    return repr(node)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def traces_digest() -> str:
    """Return a digest of the files that a run finds for recorded traces, or of their stand-ins."""
    found = [
        (trace["name"], trace["where"]) for trace in list_traces() if trace["kind"] == "recorded"
    ]
    files = [
        (name, content_digest(Path(where)) if Path(where).is_file() else where.partition(":")[0])
        for name, where in found
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:24]


def content_digest(file: Path) -> str:
    """Return sha256 of a file's content, cached while the file does not change."""
    status = file.stat()
    return _content_of(file.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _content_of(file: Path, size: int, changed_ns: int) -> str:
    return sha256_of(file)


def _own_modules(file: Path, simulator: Sequence[str] = _SIMULATOR) -> list[Path]:
    """Return `file` and what it imports from the package, outside `simulator`, recursively."""
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
                if parts[0] in simulator or "/".join(parts[:2]) in simulator:
                    continue
                module = ROOT.joinpath(*parts)
                todo += [
                    module.with_suffix(".py"),
                    *(module / f"{name.name}.py" for name in node.names),
                ]
    return sorted(found)


KEPT = ".points"  # folder of the files, in that of the experiment or sweep
POINTS: Format[dict] = Format("kept points", version=1, by="name another --out", upgrades=(same,))


@dataclass(frozen=True)
class Kept:
    """rows     of the run; none if it failed
    failed   why, in one line; None if it did not
    seconds  wall time of the run; None: not known"""

    rows: list
    failed: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Store:
    """The files of one folder.

    sources  digest that a file must have; None: of any version of the code
    traces   digest that it must have
    written  digest of the sources for new files
    """

    folder: Path
    sources: str | None
    traces: str
    written: str

    @classmethod
    def of(cls, out: Path, sources: str, traces: str, any_version: bool = False) -> Store:
        """Return the store of an experiment's or sweep's folder, for these sources and traces."""
        return cls(out / KEPT, None if any_version else sources, traces, sources)

    def file(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"

    def check_writable(self) -> None:
        """Raise WorkloadError before the first run if the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise WorkloadError(
                f"{self.folder}: cannot be written ({error.strerror}): check the folder and the "
                "free space"
            ) from None

    def clear_torn(self) -> None:
        """Delete half-written files of killed processes. No other process may write here."""
        for torn in self.folder.glob(".*.json.*"):
            torn.unlink(missing_ok=True)

    def read(self, digest: str) -> Kept | None:
        """Return a run's results; None if it must run: not there, damaged, other traces or
        `sources`. Raises SettingsError for a file of a later version."""
        found = self._document(digest)
        try:
            fits = self.sources in (None, found["sources"]) and self.traces == found["traces"]
            rows = list(found["rows"])
            whole = _sum(rows) == found.get(
                "sum", _sum(rows)
            )  # files of earlier versions have none
            return Kept(rows, found.get("failed")) if fits and whole else None
        except (KeyError, TypeError, UnicodeEncodeError):
            return None

    def seconds(self, digest: str) -> float | None:
        """Return the last wall time of a run, by any code version; None if not known."""
        found = self._document(digest).get("seconds")
        return found if isinstance(found, float) else None

    def _document(self, digest: str) -> dict:
        """Return the file's content; empty if there is none, or a damaged one."""
        file = self.file(digest)
        try:
            document = dict(parse_json(file.read_text()))
        except (OSError, ValueError, TypeError):
            return {}
        return POINTS.read(document, file, SettingsError)

    def write(self, digest: str, kept: Kept) -> Kept:
        """Keep a result; returns it as a reader will find it. Raises WorkloadError."""
        rows = json.loads(dump_json(kept.rows))
        said = {"sources": self.written, "traces": self.traces, "rows": rows, "sum": _sum(rows)}
        if kept.failed is not None:
            said["failed"] = kept.failed
        if kept.seconds is not None:
            said["seconds"] = round(kept.seconds, 3)
        write_atomically(self.file(digest), dump_json(POINTS.numbered(said)).encode())
        return Kept(rows, kept.failed)


def _sum(rows: list) -> str:
    """Return a checksum of rows, which detects edits."""
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
