"""Folders of results: written whole or not at all, under distinct names."""

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from twinserve.errors import TwinserveError
from twinserve.formats import made_folder


class ResultsError(TwinserveError, ValueError):
    """Results that cannot be written or read, in one line: what is wrong, where, and what to do."""


def folder(label: str) -> str:
    """Return a policy's label as a folder name."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in label)


def folders(labels: Iterable[str]) -> dict[str, str]:
    """Return a distinct folder name by label: of two that are equal the later gets a number."""
    found: dict[str, str] = {}
    for label in labels:
        name, number = folder(label), 2
        while name.lower() in {taken.lower() for taken in found.values()}:
            name, number = f"{folder(label)}-{number}", number + 1
        found[label] = name
    return found


def policy_of(name: str, label: object) -> str:
    """Return a run's name for readers: its folder, or the policy's text if `folders` made it."""
    parent, slash, last = name.rpartition("/")
    text = str(label)
    return f"{parent}{slash}{text}" if last == folder(text) else name


def resolved(out_dir: str | os.PathLike) -> Path:
    """Resolve links, so that the target is replaced. Raises ResultsError: impossible name."""
    try:
        out = Path(out_dir).resolve()
        str(out).encode()
    except UnicodeEncodeError:
        shown = str(out_dir).encode("utf-8", "backslashreplace").decode()
        raise ResultsError(f"{shown}: is no UTF-8; name another folder") from None
    except (OSError, RuntimeError, ValueError):  # links in a circle, a null character
        raise ResultsError(f"{out_dir!s}: is no path to a folder; name another one") from None
    return out


def check_folder(out: Path, overwrite: bool, marker: str) -> None:
    """Raise ResultsError if a comparison (with a file `marker`) could not be written."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / marker).exists()):
        raise ResultsError(f"{out}: holds other files than a comparison; name a new folder")
    if any(out.iterdir()) and not overwrite:
        raise ResultsError(
            f"{out}: already holds a comparison; name another folder, or add --overwrite"
        )


def try_to_write(out: Path) -> None:
    """Raise ResultsError if the folder `out` could not be made."""
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_prefix(out, "partial"), dir=parent))
    except OSError as error:
        raise ResultsError(why_unwritable(out, error)) from error


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into. The folder replaces `out` at the end, or is deleted after an
    error. Leftovers of killed processes are deleted first. Raises ResultsError."""
    try:
        with ExitStack() as stack:
            stack.enter_context(made_folder(out.parent))
            _clear_dead(out)
            partial = Path(tempfile.mkdtemp(prefix=_prefix(out, "partial"), dir=out.parent))
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private to the user
            yield partial
            _swap_in(partial, out)
    except OSError as error:
        raise ResultsError(why_unwritable(out, error)) from error


def _prefix(out: Path, what: str) -> str:
    """Return the name of this process's hidden folder next to `out`: writer and purpose."""
    return f".{out.name}.{what}-{_host()}-{os.getpid()}-"


def _host() -> str:
    return folder(socket.gethostname())


def _clear_dead(out: Path) -> None:
    """Delete hidden folders next to `out` of ended processes on this host."""
    ours = re.compile(rf"\.{re.escape(out.name)}\.(?:partial|former)-{re.escape(_host())}-(\d+)-")
    for beside in out.parent.iterdir():
        found = ours.match(beside.name)
        if found is not None and not _alive(int(found[1])):
            shutil.rmtree(beside, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def may_replace(out: Path, files: Collection[str], overwrite: bool, or_else: str = "") -> None:
    """Raise ResultsError unless `out` can be made, is empty, or holds only `files` and `overwrite`
    is set. or_else: further advice."""
    if not out.name:
        raise ResultsError(f"{out}: the root folder cannot hold a run; name another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ResultsError(f"{out}: is a file; name a folder")
    try:
        content = sorted(entry.name for entry in out.iterdir())
    except OSError as error:
        raise ResultsError(why_unwritable(out, error)) from error
    foreign = [name for name in content if name not in files]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise ResultsError(f"{out}: holds other files ({shown}); name an empty or new folder")
    if content and not overwrite:
        raise ResultsError(
            f"{out}: already holds a run; name another folder, or replace it with --overwrite"
            f"{or_else}"
        )


def _swap_in(partial: Path, out: Path) -> None:
    """Move folder `partial` to `out`; the old content stays whole until then."""
    if not out.exists():
        os.rename(partial, out)
        return
    former = Path(tempfile.mkdtemp(prefix=_prefix(out, "former"), dir=out.parent))
    try:
        os.rename(out, former / "run")
        try:
            os.rename(partial, out)
        except BaseException:
            os.rename(former / "run", out)
            raise
    finally:
        shutil.rmtree(former, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def why_unwritable(out: Path, error: OSError) -> str:
    reason = {
        errno.ENOSPC: "the disk is full; free some room or name another folder",
        errno.EACCES: "no permission to write there; name another folder",
        errno.EPERM: "no permission to write there; name another folder",
        errno.EROFS: "read-only file system; name another folder",
        errno.ENOTDIR: "part of the path is a file; name another folder",
        errno.EEXIST: "part of the path is a file; name another folder",
    }.get(error.errno, f"{error.strerror or error}; name another folder")
    return f"{out}: cannot be written: {reason}"
