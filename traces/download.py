"""Finding a named trace in folders, and fetching it once."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from twinserve.traces.catalog import TraceInfo
from twinserve.traces.workload import WorkloadError

SEARCH_PATH_VARIABLE = "TWINSERVE_TRACES"
CACHE_VARIABLE = "TWINSERVE_CACHE"
TIMEOUT_S = 5.0  # to connect, and between two pieces of data
PIECE_BYTES = 1 << 16
MAX_BYTES = 1 << 32

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says
SearchPath = str | Path | Sequence[str | Path] | None


class NotReachable(WorkloadError):
    """A download that failed on the way: no network, a server error, no place to put it."""


def search_folders(search_path: SearchPath = None) -> list[Path]:
    """Folders to look in: the argument, or the environment's TWINSERVE_TRACES (a path list)."""
    if search_path is None:
        search_path = os.environ.get(SEARCH_PATH_VARIABLE, "")
    if isinstance(search_path, Path):
        search_path = [search_path]
    elif isinstance(search_path, str):
        search_path = search_path.split(os.pathsep)
    return [Path(folder).expanduser() for folder in search_path if str(folder)]


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where downloads are kept: the argument, TWINSERVE_CACHE, or ~/.cache/twinserve/traces."""
    chosen = cache_dir or os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path("~/.cache/twinserve/traces").expanduser()


def sha256_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be read ({e.strerror}): check the file") from None


def find_local(info: TraceInfo, folders: Sequence[Path], cache: Path) -> Path | None:
    """The trace's file in the search path, then in the cache; None if it is in neither.

    Raises WorkloadError for a file of the right name in the search path with other content. One in
    the cache is a broken download: it is passed over, and replaced by the next download.
    """
    for folder in folders:
        for name in info.files:
            path = folder / name
            if path.is_file():
                digest = sha256_of(path)
                if info.sha256 not in (None, digest):
                    raise WorkloadError(
                        f"{path}: sha256 {digest[:12]}... is not that of {info.name} "
                        f"({info.sha256[:12]}...): remove it, or give its path to use it as it is"
                    )
                return path
    path = cache / info.files[0]
    if path.is_file() and info.sha256 in (None, sha256_of(path)):
        return path
    return None


def download(
    url: str, target: Path, sha256: str | None = None, progress: Progress | None = None
) -> Path:
    """Streams a file to `target`, which appears only when it is complete and has the right hash.

    Raises NotReachable if it cannot be fetched, WorkloadError if the content is not the expected
    one.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise NotReachable(f"{target}: cannot be written ({e.strerror}): check the cache") from None
    try:
        with os.fdopen(handle, "wb") as out:
            digest = _stream(url, out, progress)
        if sha256 not in (None, digest):
            raise WorkloadError(
                f"{url}: sha256 {digest[:12]}... is not the expected {sha256[:12]}...: "
                "the published file has changed; give a local file by its path"
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _stream(url: str, out, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            size = reply.headers.get("Content-Length")
            total = int(size) if size and size.isdigit() else None
            while piece := reply.read(PIECE_BYTES):
                done += len(piece)
                if done > MAX_BYTES:
                    raise NotReachable(f"{url}: more than {MAX_BYTES} bytes: not the trace")
                digest.update(piece)
                out.write(piece)
                if progress is not None:
                    progress(done, total)
    except (OSError, http.client.HTTPException, ValueError) as e:
        if isinstance(e, WorkloadError):
            raise
        reason = getattr(e, "reason", None) or getattr(e, "strerror", None) or str(e)
        text = " ".join(str(reason).split()) or type(e).__name__
        raise NotReachable(f"{url}: not reachable ({text})") from None
    if total is not None and done != total:
        raise NotReachable(f"{url}: the connection broke after {done} of {total} bytes")
    return digest.hexdigest()
