"""Finding a named trace in folders, and fetching it once."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from twinserve.errors import worded
from twinserve.traces.catalog import TraceInfo
from twinserve.traces.workload import WorkloadError

SEARCH_PATH_VARIABLE = "TWINSERVE_TRACES"
CACHE_VARIABLE = "TWINSERVE_CACHE"
TIMEOUT_S = 5.0  # to connect, and between two pieces of data
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
                if digest != info.sha256:
                    raise WorkloadError(
                        f"{path}: sha256 {digest[:12]}... is not that of {info.name} "
                        f"({info.sha256[:12]}...): remove it, or give its path to use it as it is"
                    )
                return path
    path = cache / info.files[0]
    if path.is_file() and info.sha256 == sha256_of(path):
        return path
    return None


def download(url: str, target: Path, sha256: str, progress: Progress | None = None) -> Path:
    """Fetches a file to `target`, which appears only when it is complete and has the right hash.

    Raises NotReachable if it cannot be fetched, WorkloadError if the content is not the expected
    one.
    """
    import pooch  # takes half of a second, and most runs fetch nothing
    import requests

    pooch.get_logger().setLevel("ERROR")  # the caller says what there is to say
    reach = pooch.HTTPDownloader(progressbar=_Reported(url, progress), timeout=TIMEOUT_S)
    try:
        pooch.retrieve(url, f"sha256:{sha256}", target.name, target.parent, downloader=reach)
    except requests.ConnectionError:
        raise NotReachable(f"{url}: not reachable (no connection, or it broke)") from None
    except requests.HTTPError as e:
        raise NotReachable(f"{url}: not reachable (HTTP {e.response.status_code})") from None
    except (requests.RequestException, OSError) as e:
        text = getattr(e, "strerror", None) or worded(e)
        raise NotReachable(f"{url}: cannot be downloaded ({text})") from None
    except ValueError:  # pooch's word for another hash
        raise WorkloadError(
            f"{url}: its sha256 is not the expected {sha256[:12]}...: "
            "the published file has changed; give a local file by its path"
        ) from None
    os.chmod(target, 0o644)
    return target


class _Reported:
    """pooch's progress bar: tells `progress`, and ends what cannot be the trace."""

    def __init__(self, url: str, progress: Progress | None) -> None:
        self.total = 0  # set by pooch; 0 where the server does not say
        self._url, self._progress, self._done = url, progress, 0

    def update(self, size: int) -> None:
        self._done += size
        if self._done > MAX_BYTES:
            raise NotReachable(f"{self._url}: more than {MAX_BYTES} bytes: not the trace")
        if self._progress is not None:
            done = min(
                self._done, self.total or self._done
            )  # the last piece is told as a whole one
            self._progress(done, self.total or None)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass
