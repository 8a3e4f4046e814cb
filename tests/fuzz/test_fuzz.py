"""Whatever is typed and whatever a file holds: an answer, or one line that says what is wrong.
Never a traceback, never a hang, nothing left behind."""

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.cases import COMMANDS, READS, RECORD, RUN, SMALL, Case, draw, lay_out, prepare
from twinserve.sim.cli.main import VERBS, main

LIMIT_S = 30  # of CPU time a case; the longest takes a second
WAITS_S = 600  # until a case that takes no CPU time is taken for one that hangs
CASES, PROCESSES = 1000, 100
CODES = (0, 1, 2)  # 1: a sweep with runs that failed


class Hang(BaseException):
    """Longer than LIMIT_S or WAITS_S; says which, and where that was."""


def _hang(number: int, frame: FrameType | None) -> None:
    limit = f"{LIMIT_S} s of CPU time" if number == signal.SIGPROF else f"{WAITS_S} s"
    at = "" if frame is None else f" at {frame.f_code.co_filename}, line {frame.f_lineno}"
    raise Hang(f"still there after {limit}{at}")


@contextlib.contextmanager
def limits():
    """Raises Hang in its body. A machine that others keep busy makes no case longer."""
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    former = {number: signal.signal(number, _hang) for number in timers}
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAITS_S)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, former[number])


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
        assert re.search(r": .*\w", lines[0]), f"{where}: an error without a word"
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
    code: object = 0
    try:
        with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                main(words)
    except SystemExit as end:
        code = end.code or 0
    except (Exception, Hang) as error:
        raise AssertionError(f"{str(words)[:600]}: {error!r}"[:900]) from error
    return code, err.getvalue()


def as_process(words: list[str]) -> tuple[object, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "twinserve.sim.cli.main", *map(os.fsencode, words)],
        capture_output=True,
        timeout=WAITS_S,
    )
    return ended.returncode, ended.stderr.decode("utf-8", "replace")


@pytest.mark.nightly
@given(st.integers(0, 2**63 - 1))
@settings(  # never less than CASES; and a number cannot be shrunk to a simpler case
    max_examples=max(CASES, examples(CASES).max_examples), phases=[Phase.generate]
)
def test_whatever_is_given_ends_in_an_answer_or_one_line(run, number):
    executed.run = run
    executed(draw(number, run), in_process)


@pytest.mark.nightly
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


def test_every_command_is_drawn():
    drawn = {draw.split()[0] for draw, _ in (*COMMANDS, *READS)}
    # a server, and what prints a fixed text
    beside = {"emulate", "completion"}
    assert set(VERBS) - beside <= drawn, set(VERBS) - drawn


def test_what_is_damaged_is_taken_when_it_is_whole(tmp_path, capsys):
    """Else its cases would test nothing but the first check of a reader."""
    prepare(tmp_path)
    for command, content in READS[-3:]:
        name = "fuzzed.json"
        if "FILE.gz" in command:
            (tmp_path / f"{name}.gz").write_bytes((tmp_path / RECORD).read_bytes())
        (tmp_path / name).write_text(content)
        with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as end:
            main(command.replace("FILE", name).split())
        assert not end.value.code, (command, capsys.readouterr().err)
