"""An error is one line with words in it, whatever raised it and however little that said."""

import re

import cyclopts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.errors import TwinserveError, worded
from twinserve.sim.cli.main import run_app
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.one import failure
from twinserve.traces.workload import WorkloadError

EXPECTED = (
    *(TwinserveError, SettingsError, WorkloadError, NoProgressError, MemoryError, OverflowError),
    *(OSError, TimeoutError, FileNotFoundError, PermissionError, ConnectionResetError),
    *(cyclopts.CycloptsError, KeyboardInterrupt),
)
ANY = (*EXPECTED, RuntimeError, KeyError, AssertionError, StopIteration, ValueError)
BLANK = st.sampled_from([(), ("",), (" ",), ("\n\n",), (5, ""), (5, " "), (5, "", "f")])


@st.composite
def raised(draw, kinds):
    """An exception with little or nothing to say, that may come after others."""
    kind = draw(st.sampled_from(kinds))
    given = draw(BLANK)
    if not issubclass(kind, OSError):  # the others take no number, or it would be what they say
        given = tuple(one for one in given if one != 5)[:1]
    error = kind() if kind is cyclopts.CycloptsError else kind(*given)
    if draw(st.booleans()):
        error.__cause__ = draw(st.sampled_from(ANY))(*draw(st.sampled_from([(), ("why",)])))
    return error


@given(raised(EXPECTED))
@examples(100)
def test_a_command_ends_in_one_line_that_has_words(error):
    app = cyclopts.App()

    @app.default
    def command():
        raise error

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda line, file=None: said.append(line))
        with pytest.raises(SystemExit) as end:
            run_app(app, [])
    assert end.value.code in (2, 130) and len(said) == 1
    assert re.fullmatch(r"error: .*[a-z]{3}.*", said[0]) and not said[0].endswith((": ", ":"))


@given(raised(ANY))
@examples(100)
def test_what_an_exception_says_is_never_empty(error):
    for line in (worded(error), failure(error)):
        assert re.search(r"\w", line) and line == " ".join(line.split())


def test_what_led_to_a_silent_exception_is_said():
    error = TimeoutError()
    error.__cause__ = RuntimeError("the port is taken")
    error.__cause__.__cause__ = error  # a circle ends
    assert worded(error) == "TimeoutError, after the port is taken"


def test_memory_that_ends_while_modules_load_is_no_traceback(capsys):
    app = cyclopts.App()

    @app.default
    def command():
        raise ImportError("libx.so: failed to map segment from shared object")

    with pytest.raises(SystemExit):
        run_app(app, [])
    assert capsys.readouterr().err.startswith("error: out of memory while loading modules")
