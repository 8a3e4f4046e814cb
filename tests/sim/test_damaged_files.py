"""Files that were edited or damaged: one line with the file and what is wrong in it, before anybody
computes with it."""

import json
import re
import shutil

import cyclopts
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import refused, status
from tests.examples import examples
from twinserve.errors import TwinserveError, worded
from twinserve.formats import DEEPEST, parse_json
from twinserve.sim.cli.main import main, run_app
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import ResultsError, read_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.sweep.one import failure
from twinserve.traces.workload import WorkloadError

DEEP = "[" * 100_000
SMALL = "-t fixed:40,4 --requests 6 --rate 50 --profile llama-3.1-8b@h100 -q".split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    status(
        main, ["simulate", *SMALL, "--warmup", "1", "--metrics-every", "0.05", "--out", str(out)]
    )
    return out


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def said(capsys, *words) -> str:
    return refused(capsys, main, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "simulate -q --config FILE", "simulate -q --profile FILE", "simulate -q --front-end FILE",
        "simulate -q -t fixed:5,5 -p justitia:training=FILE", "sweep --params FILE --dry-run",
        "profiles show FILE", "profiles build FILE h100 --out new.json",
        "trace inspect FILE --format sharegpt",
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", [DEEP, '{"a":' * 100_000, "[" * 500 + "]" * 500])
def test_brackets_in_brackets_are_told_with_the_file(capsys, tmp_path, monkeypatch, words, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text(content)
    assert "deep.json" in said(capsys, *words.replace("FILE", "deep.json").split())
    assert [file.name for file in tmp_path.iterdir()] == ["deep.json"]


@pytest.mark.parametrize("name", ["run.json", "summary.json", "timing.json"])
@pytest.mark.parametrize("content", [DEEP, "{", "3", '{"x": ' * 200 + "1" + "}" * 200])
def test_damaged_results_are_told_with_the_file(capsys, run, name, content):
    (run / name).write_text(content)
    assert name in said(capsys, "report", run, "--out", run.parent / "page.html")
    assert [file.name for file in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        ("completed", "many", "completed is 'many', no number"),
        ("completed", 10**400, "completed is int, no number"),
        ("classes", [], "classes is list, no object"),
        ("classes.rt.mean_ttft_ms", "1", "classes.rt.mean_ttft_ms"),
        ("classes.rt.saturation", 3, "classes.rt.saturation"),
        ("classes.rt.saturation.verdict", None, "classes.rt.saturation.verdict"),
        ("kv", 5, "kv is int"),
        ("warmup", {}, "warmup.end_s is missing"),
        ("windows", [{}], "windows[0].start_s is missing"),
        ("duration", float("nan"), "duration is nan"),
    ],
)
def test_an_edited_summary_is_told_by_its_place(run, place, value, what):
    file = run / "summary.json"
    document = json.loads(file.read_text())
    *path, last = place.split(".")
    inner = document
    for name in path:
        inner = inner[name]
    inner[last] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ResultsError) as error:
        read_run(run)
    assert what in str(error.value) and "summary.json" in str(error.value)


def test_settings_of_a_run_that_are_none_are_told(run):
    file = run / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"config": "x"}))
    with pytest.raises(ResultsError, match="run.json: config is 'x', no object"):
        read_run(run)


@pytest.mark.parametrize(
    ("table", "column", "values", "what"),
    [
        ("requests", "arrival_s", float("nan"), "row 0: arrival_s is nan"),
        ("requests", "first_token_s", float("inf"), "row 0: first_token_s is inf"),
        ("requests", "prompt_tokens", "7", "column prompt_tokens is"),
        ("steps", "start_s", "0", "column start_s is"),
        ("steps", "end_s", -1.0, "row 0: end_s is -1"),
        ("gaps", "gap_s", float("nan"), "row 0: gap_s is nan"),
    ],
)
def test_edited_rows_are_told_by_row_and_column(run, table, column, values, what):
    file = run / f"{table}.parquet"
    metadata = pq.read_table(file).schema.metadata
    frame = pd.read_parquet(file).assign(**{column: values})
    changed = pa.Table.from_pandas(frame).replace_schema_metadata(metadata)
    pq.write_table(changed, file)
    with pytest.raises(ResultsError) as error:
        read_run(run)
    assert what in str(error.value) and file.name in str(error.value)


@pytest.mark.slow
def test_a_label_is_no_mathematics(run, tmp_path):
    odd = run.rename(tmp_path / "a$b^{$ _%\\frac")
    assert odd.name.replace("&", "&amp;") in write_report([odd], tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"rate": -1}, "--rate"), ({"policy": [1]}, "--policy"), ({"policy": []}, "--policy")],
)
def test_settings_of_a_file_are_told_with_the_file(capsys, tmp_path, settings, what):
    (tmp_path / "c.json").write_text(json.dumps({"config": settings, "policy": 3}))
    assert f"c.json: {what}: " in said(capsys, "simulate", "-q", "--config", tmp_path / "c.json")


def test_brackets_in_an_option_are_one_line(capsys):
    assert "nested brackets" in said(capsys, "simulate", f"--policy={DEEP[:3000]}")


def test_rows_of_recorded_steps_with_more_cells_than_the_header_are_refused(capsys, tmp_path):
    file = tmp_path / "s.csv"
    file.write_text("seconds,decode_requests,decode_context\n0.1,1,5,6\nx,1,5,6\n")
    assert "more cells than the header" in said(capsys, "profiles", "fit", file)


def test_settings_that_cannot_be_are_one_line_in_python():
    with pytest.raises(SettingsError, match=r"^--rate: [^\n]*\(given: -1\)$"):
        SimulationConfig(rate=-1)


def test_depth_is_what_counts_in_json():
    wide = json.dumps([[1, {"a": [2]}]] * 1000)
    assert len(parse_json(wide)) == 1000
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(ValueError, match="nested brackets"):
        parse_json("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("abc,2,3", "row 2: seconds is 'abc', no number"),
        ("0.1,x,3", "row 2: decode_requests is 'x', no number"),
        ("0.1,2,inf", "row 2: decode_context is 'inf', no number"),
        ("0.1,,3", "row 2: decode_requests is missing"),
        ("0,2,3", "row 2 takes 0 s"),
    ],
)
def test_a_bad_row_of_recorded_steps_is_named(capsys, tmp_path, row, what):
    file = tmp_path / "s.csv"
    file.write_text(f"seconds,decode_requests,decode_context\n0.1,1,5\n{row}\n")
    assert what in said(capsys, "calibrate", "--from-steps", file)


# -- an error is one line with words in it, whatever raised it and however little that said --------
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
