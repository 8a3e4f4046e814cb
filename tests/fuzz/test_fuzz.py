"""Whatever is typed and whatever a file holds: an answer, or one line that says what is wrong.
Never a traceback, never a hang, nothing left behind."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.cases import RUN, SMALL, Case, draw, lay_out, prepare
from twinserve.sim.cli.main import main

LIMIT_S = 30  # of a case; the longest takes a second on a quiet machine
CASES, PROCESSES = 1000, 100
CODES = (0, 1, 2)  # 1: a sweep with runs that failed


class Hang(BaseException):
    """Longer than LIMIT_S."""


def _hang(*_) -> None:
    raise Hang


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Results to be damaged."""
    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder)
    with contextlib.chdir(folder), pytest.raises(SystemExit):
        main([*f"simulate {SMALL} --no-async-scheduling --decisions --out {RUN}".split()])
    return folder / RUN


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check(case: Case, code: object, err: str, left: set[str]) -> None:
    """What holds for every case."""
    where = f"{case.words}"[:600]
    assert code in CODES, f"{where}: ended with {code}"
    assert "Traceback" not in err and "Warning" not in err, f"{where}: {err[-600:]}"
    if code == 2:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and err.rstrip().splitlines()[-1] == lines[0], f"{where}: {err}"
        assert len(lines[0]) < 12_000 and not left, f"{where}: {left}"
    else:
        assert not case.refused, f"{where}: taken"
        hidden = {name for name in left if Path(name).name.startswith(".")}
        assert not hidden, f"{where}: {hidden}"


def executed(case: Case, execute) -> None:
    """Run a case in a folder of its own and check it. execute(words) gives (code, stderr)."""
    with tempfile.TemporaryDirectory(prefix="twinserve-fuzz-") as name:
        folder = Path(name)
        prepare(folder)
        lay_out(case, folder, executed.run)
        before = entries(folder)
        with contextlib.chdir(folder):
            code, err = execute(case.words)
        check(case, code, err, entries(folder) - before)


def in_process(words: list[str]) -> tuple[object, str]:
    out, err = io.StringIO(), io.StringIO()
    former = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT_S)
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                main(words)
    except SystemExit as end:
        code = end.code or 0
    except Exception as error:
        raise AssertionError(f"{str(words)[:600]}: {error!r}"[:900]) from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    return code, err.getvalue()


def as_process(words: list[str]) -> tuple[object, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "twinserve.sim.cli.main", *map(os.fsencode, words)],
        capture_output=True,
        timeout=2 * LIMIT_S,
    )
    return ended.returncode, ended.stderr.decode("utf-8", "replace")


@pytest.mark.slow
@given(st.integers(0, 2**63 - 1))
@examples(CASES, phases=[Phase.generate])  # a number cannot be shrunk to a simpler case
def test_whatever_is_given_ends_in_an_answer_or_one_line(run, number):
    executed.run = run
    executed(draw(number, run), in_process)


@pytest.mark.slow
def test_so_it_does_in_processes_of_its_own(run):
    executed.run = run
    numbers = random.Random(28)
    for _ in range(PROCESSES):
        case = draw(numbers.getrandbits(63), run)
        if not any("\0" in word for word in case.words):
            executed(case, as_process)


def test_a_number_always_draws_the_same_case(run):
    assert [draw(n, run) for n in range(50)] == [draw(n, run) for n in range(50)]
    assert len({str(draw(n, run)) for n in range(50)}) > 45
