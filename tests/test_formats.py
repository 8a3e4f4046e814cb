"""Files that are written and read again have a version: what this program and earlier ones wrote is
read, what a later one wrote is refused in one line that says what to do."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.format_cases import A_RUN, CASES, NO_NUMBER, Case, run_command
from twinserve.formats import Format, same
from twinserve.profiles.names import EVIDENCE_FILE
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.cli.main import simulate_main
from twinserve.sim.results import files
from twinserve.sim.results.files import ResultsError, read_run, write_run
from twinserve.sim.setup.presets import from_file

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("backends", "experiments", "policies", "profiles", "sim", "traces")
BY_NAME = {case.form.name: case for case in CASES}
NAMES = list(BY_NAME)
COMMANDS = [
    pytest.param(case, *command, id=f"{case.form.name}-{number}")
    for case in CASES
    for number, command in enumerate(case.commands)
]
NO_VERSIONS = (0, -1, 1.0, 2.5, "1", "newest\nof all", True, None, [1], {})

# Modules that read files or documents, and what: a format with a version, or why it has none.
VALUE, HTTP = "one value of a command line", "the body of a request"
TOLD = "what a server that was started here answers"
OTHERS = "files of other people and programs: what they are is told by their content"
CHECKED = "other files of commands, for a page: every value that it shows is checked"
READERS = {
    "backends/live/apart/shelf.py": "shared memory of engines that were started here",
    "backends/live/emulate/model.py": "a tokenizer that was written here",
    "backends/live/emulate/serve.py": VALUE, "backends/live/engine/engine.py": OTHERS,
    "backends/live/measure/front_end.py": TOLD, "backends/live/measure/replayed.py": TOLD,
    "backends/live/route/messages.py": HTTP, "backends/live/route/front.py": HTTP,
    "backends/live/route/tokens.py": "what a server answers", "backends/live/serving/gate.py": HTTP,
    "backends/live/serving/process.py": "what a server answers",
    "backends/live/serving/prometheus.py": "counts of the same server",
    "experiments/benchmark/main.py": "what a command that it has just run printed",
    "experiments/campaign/beside.py": OTHERS,
    "experiments/campaign/runs.py": "files of campaigns",
    "experiments/campaign/setup.py": "files of campaigns", "experiments/route/main.py": TOLD,
    "experiments/study/claims.py": "a part of the program",
    "experiments/study/study.py": "figures of studies",
    "experiments/validation/runs.py": OTHERS,
    "experiments/validation/step_times.py": "a part of the program",
    "policies/parts/predictors.py": OTHERS, "profiles/front_end.py": "front ends",
    "profiles/measured/samples.py": "calibration samples",
    "profiles/measured/step_files.py": OTHERS, "profiles/models/config.py": OTHERS,
    "profiles/operators/layers.py": OTHERS, "profiles/profile.py": "profiles",
    "profiles/specs.py": "profiles", "sim/cli/live.py": VALUE,
    "sim/report/found.py": "limits, plans", "sim/report/html.py": CHECKED,
    "sim/report/twin_parts.py": CHECKED, "sim/results/decisions.py": "decision logs",
    "sim/results/files.py": "result folders", "sim/results/routing.py": "routing records",
    "sim/serve_line/argv.py": VALUE, "sim/serve_line/units.py": OTHERS,
    "sim/setup/presets.py": "result folders", "sim/setup/yaml_text.py": OTHERS,
    "sim/sweep/combinations.py": OTHERS, "sim/sweep/points.py": "kept points",
    "sim/twin/emulated_server.py": TOLD,
    "traces/generators/replica.py": "a part of the program: no other one reads it",
    "traces/readers/csvfile.py": OTHERS, "traces/readers/formats.py": OTHERS,
    "traces/readers/measured/document.py": OTHERS,
    "traces/readers/measured/inference_perf.py": OTHERS,
    "traces/readers/sidecar.py": "traces' sidecars", "traces/readers/text.py": OTHERS,
}  # fmt: skip
READS = re.compile(
    r"\b(?:parse_json|(?:json|pickle|tomllib|yaml|np|numpy)\.loads?"
    r"|read_(?:table|parquet|csv|json|pickle)|ParquetFile"
    r"|(?:gzip|bz2|lzma|tarfile|zipfile|shelve)\.(?:open|decompress|ZipFile))\("
)
DEFINED = re.compile(r"= Format\((?:\s*#.*)?\s*\"([^\"]+)\"")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file of each format, written once; folder and file."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(case: Case) -> tuple[Path, Path]:
        if case.form.name not in known:
            folder = tmp_path_factory.mktemp("made")
            known[case.form.name] = folder, case.write(folder)
        return known[case.form.name]

    return make


@pytest.fixture
def file_of(made, tmp_path):
    """A copy of such a file, with all that belongs to it."""

    def copy(case: Case) -> Path:
        folder, file = made(case)
        shutil.copytree(folder, tmp_path / "copy")
        return tmp_path / "copy" / file.relative_to(folder)

    return copy


@pytest.fixture(autouse=True)
def _no_recorded_traces(monkeypatch):
    """Kept points are of the traces at hand; no need to read all of those here."""
    monkeypatch.setenv("TWINSERVE_TRACES", "/nowhere")
    monkeypatch.setenv("TWINSERVE_CACHE", "/nowhere")


def refusal(capsys, main, words: str, file: Path) -> str:
    """The one line in which a command refuses a file: of bad input on stderr with status 2, of a
    campaign, whose other stages go on, on stdout with status 1."""
    capsys.readouterr()
    status = run_command(main, words, file)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if "campaign" in main.__module__:
        (line,) = [line for line in out.splitlines() if " failed: " in line]
        assert status == 1
        return line
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and not out
    return err


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_has_the_present_version(name, made):
    case = BY_NAME[name]
    _, file = made(case)
    assert case.place.number(file) == case.form.version


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_version_is_read_as_before(name, file_of):
    case = BY_NAME[name]
    file = file_of(case)
    expected = case.read(file)
    case.place.renumber(file, NO_NUMBER)
    if case.always:
        with pytest.raises(ResultsError, match=f"{file.name}: torn, or not a "):
            case.read(file)
    else:
        assert case.read(file) == expected


@pytest.mark.parametrize(("case", "main", "words"), COMMANDS)
def test_a_later_version_is_refused_in_a_line(case, main, words, file_of, capsys):
    file = file_of(case)
    newer = case.form.version + 1
    case.place.renumber(file, newer)
    (file.parent / "steps.csv").write_text("seconds,decode_requests,decode_context\n0.1,2,200\n")
    before = file.read_bytes()
    line = refusal(capsys, main, words, file)
    assert f"{file.name}: is of version {newer}," in line
    assert f"reads {case.form.name} up to version {case.form.version}:" in line
    assert "upgrade twinserve, or write it again with this one" in line and case.form.by in line
    assert file.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_version_that_is_none_is_refused_in_a_line(name, file_of, capsys):
    case = BY_NAME[name]
    file = file_of(case)
    (file.parent / "steps.csv").write_text("seconds,decode_requests,decode_context\n0.1,2,200\n")
    for number in NO_VERSIONS:
        case.place.renumber(file, number)
        line = refusal(capsys, *case.commands[0], file)
        assert file.name in line and "no positive whole number" in line, number
        assert f"up to version {case.form.version}:" in line and "upgrade twinserve" in line


def test_settings_of_a_run_can_be_given_back_with_and_without_its_version(file_of, tmp_path):
    case = BY_NAME["result folders"]
    file = file_of(case)
    expected = read_run(file.parent).summary
    for number in (case.form.version, NO_NUMBER):
        case.place.renumber(file, number)
        out = tmp_path / f"again-{number == 1}"
        run_command(simulate_main, f"--config {file} --quiet --out {out}", file)
        assert read_run(out).summary == expected
        assert json.loads((out / "run.json").read_text())["version"] == case.form.version


# -- every format ----------------------------------------------------------------------------------
@cache
def sources() -> dict[str, str]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_every_format_is_tested_here_and_stands_in_the_docs():
    defined = {name for text in sources().values() for name in DEFINED.findall(text)}
    assert defined == set(BY_NAME)
    page = (ROOT / "docs" / "invariants.md").read_text().partition("\n## Formats of files")[2]
    page = page.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \|.*?\| (\d+) \|", page, re.M))
    assert rows == {name: str(case.form.version) for name, case in BY_NAME.items()}


def test_whoever_reads_files_says_of_which_format():
    """A new reader goes on the list above, and into docs/invariants.md."""
    found = {module for module, text in sources().items() if READS.search(text)}
    assert found == set(READERS)
    assert {
        what for said in READERS.values() for what in said.split(", ") if what in BY_NAME
    } == set(BY_NAME)


@pytest.mark.parametrize(
    "line",
    ["x = json.loads(text)", "pq.read_table(path)", "pd.read_csv(f)", "gzip.open(f)", "np.load(f)"],
)
def test_reading_would_be_seen(line):
    assert READS.search(line) and not READS.search("json.dumps(x); pq.write_table(t, f)")


def test_shipped_profiles_are_what_the_program_would_write(tmp_path):
    files = (ROOT / "profiles" / "data").glob("*.json")
    shipped = sorted(file for file in files if file.name != EVIDENCE_FILE)
    assert len(shipped) > 60
    for file in shipped:
        save_profile(load_profile(file), tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == file.read_bytes(), file.name
        assert json.loads(file.read_bytes())["version"] == BY_NAME["profiles"].form.version


# -- raising a version -----------------------------------------------------------------------------
def test_content_is_upgraded_one_version_after_another():
    steps = (same, lambda told: [*told, 2], lambda told: [*told, 3])
    form = Format("lists", version=3, by="this test", upgrades=steps)
    assert [form.upgraded([], version) for version in (0, 1, 2, 3)] == [[2, 3], [2, 3], [3], []]


@pytest.mark.parametrize(("oldest", "upgrades"), [(0, ()), (1, (same,)), (0, (same, same))])
def test_a_version_without_its_upgrade_is_no_format(oldest, upgrades):
    with pytest.raises(ValueError, match="each version needs one"):
        Format("lists", version=1, by="this test", oldest=oldest, upgrades=upgrades)


def test_a_raised_result_folder_reads_all_before_it(file_of, monkeypatch, tmp_path):
    """One constant and one function: version 5 counts requests in a table of its own."""
    case = BY_NAME["result folders"]
    file = file_of(case)

    def count(stored: files.Stored) -> files.Stored:
        run = stored.run | {"requests": len(stored.tables.get("requests", ()))}
        return replace(stored, run=run)

    raised = replace(files.RESULTS, version=5, upgrades=(*files.RESULTS.upgrades, count))
    monkeypatch.setattr(files, "RESULTS", raised)
    for number in (NO_NUMBER, 1, 2, 3, 4):
        case.place.renumber(file, number)
        found = read_run(file.parent)
        assert found.config["requests"] == len(found.rows.requests) == int(A_RUN[3])
        assert from_file(file)["trace"] == "fixed:40,4"
    written = write_run(tmp_path / "now", found) / "run.json"
    assert case.place.number(written) == 5
    assert read_run(written.parent).config == found.config
