"""The folder that engines of one run have in common."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Remove folders in `place` of runs that have ended. A folder without a lock belongs to a run
    that has just begun."""
    for lock in place.glob(f"{_BEGINS}*/{_LOCK}"):
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it is in use, another user's, or gone meanwhile
