"""Commands as a shell runs them, but in this process."""

from collections.abc import Callable, Iterable

import pytest


def status(command: Callable[[list[str]], None], words: Iterable[object]) -> int:
    """The exit status of `command` (`main`, `simulate_main`) with these words."""
    with pytest.raises(SystemExit) as end:
        command([*map(str, words)])
    return int(end.value.code or 0)


def refused(capsys, command: Callable[[list[str]], None], words: Iterable[object]) -> str:
    """The one line with which a command refuses what it is given."""
    capsys.readouterr()
    code = status(command, words)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), err
    return err
