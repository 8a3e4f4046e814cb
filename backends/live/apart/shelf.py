"""A folder of small files (at best in shared memory) in which engines of this machine announce KV
that is kept for a fetch.

    ENGINE.json             the place of its KV tensors (`shared.py`)
    ENGINE/REQUEST          its KV is kept; there until it is given up
    ENGINE/REQUEST.beat     the last heartbeat of the engine that is going to fetch it
    ENGINE/REQUEST.done     it was fetched, or is not wanted

REQUEST is the SHA-256 of its name: names may be of any length, and have dots and slashes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

_MEMORY = Path("/dev/shm")
_BEGINS = "twinserve-apart-"
_LOCK = "lock"


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder in shared memory if there is any, and remove it at the end. A killed process
    cannot remove its folder, so the next run does."""
    place = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    take_away_old(place)
    with tempfile.TemporaryDirectory(prefix=_BEGINS, dir=place) as name:
        new = Path(name) / f".{_LOCK}"
        with new.open("w") as lock:  # the system gives it up with the process, however that ends
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(name) / _LOCK)
            yield name


def take_away_old(place: Path) -> None:
    """Remove folders in `place` of ended runs. One without a lock has just begun."""
    for lock in place.glob(f"{_BEGINS}*/{_LOCK}"):
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it is in use, another user's, or gone meanwhile


class Shelf:
    """The shelf of one engine. Times are seconds of the clock that all engines share."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._about = folder / f"{quote(engine, safe='')}.json"
        self._folder = folder / quote(engine, safe="")
        self._folder.mkdir(parents=True, exist_ok=True)

    # -- of the engine that keeps --------------------------------------------------------------
    def tell(self, about: dict) -> None:
        """State the place of the engine's KV. Earlier entries of an engine of this name are
        removed, since its blocks hold other KV now."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        _write(self._about, json.dumps(about))

    def put(self, request: str) -> None:
        _write(self._file(request), "")

    def last_beat(self, request: str) -> float:
        """Return when the last heartbeat was sent, or minus infinity."""
        try:
            return float(self._file(request, ".beat").read_text())
        except FileNotFoundError:
            return float("-inf")

    def is_done(self, request: str) -> bool:
        return self._file(request, ".done").exists()

    def take_away(self, request: str) -> None:
        for mark in ("", ".beat", ".done"):
            self._file(request, mark).unlink(missing_ok=True)

    # -- of the engine that fetches ------------------------------------------------------------
    def about(self) -> dict:
        """Return what the engine states. Raises FileNotFoundError if it has not come up."""
        return json.loads(self._about.read_text())

    def has(self, request: str) -> bool:
        return self._file(request).exists()

    def beat(self, request: str, now: float) -> None:
        if self.has(request):
            _write(self._file(request, ".beat"), repr(float(now)))

    def done(self, request: str) -> None:
        if self.has(request):
            _write(self._file(request, ".done"), "")

    def _file(self, request: str, mark: str = "") -> Path:
        name = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / (name + mark)


def _write(path: Path, text: str) -> None:
    """As a whole: half of it is never read."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
