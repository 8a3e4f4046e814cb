"""Every format that is written and read again, for test_formats.py: how a file of it is made, read,
and given another number, and the commands that read it."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cyclopts
import pyarrow.parquet as pq

from tests.experiments.squares import CALLS, square
from tests.sim.test_report_folders import LIMIT, PLAN, put
from twinserve.experiments.campaign.main import main as campaign
from twinserve.experiments.campaign.setup import CAMPAIGN, Store
from twinserve.experiments.study.command import GridOptions
from twinserve.experiments.study.points import Point, run_grid
from twinserve.experiments.study.study import FIGURES, Figure, Scale, Study
from twinserve.experiments.study.verdict import Claim
from twinserve.formats import KEY, Format
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.front_end import FRONT_END, load_front_end, published, save_front_end
from twinserve.profiles.measured.samples import (
    SAMPLES,
    Measurement,
    StepSample,
    read_samples,
    write_samples,
)
from twinserve.profiles.profile import PROFILE, load_profile, save_profile
from twinserve.sim.cli.main import main as twinserve
from twinserve.sim.cli.main import run_app, simulate_main
from twinserve.sim.report.found import Found
from twinserve.sim.report.limit_part import limit_part
from twinserve.sim.report.plan_part import plan_part
from twinserve.sim.results.decisions import LOG, read_log
from twinserve.sim.results.files import RESULTS, read_run
from twinserve.sim.results.routing import ROUTING, RoutingWriter, read_routing
from twinserve.sim.results.versions import LIMITS, PLANS
from twinserve.sim.sweep.points import KEPT, POINTS
from twinserve.traces.load import load_trace
from twinserve.traces.readers.sidecar import SIDECAR, SUFFIX, path_of

NO_NUMBER = object()
A_RUN = "--trace fixed:40,4 --requests 6 --rate 50 --profile llama-3.1-8b@h100 --quiet".split()


@dataclass(frozen=True)
class Place:
    """Where a file has its number. document: of the file; put: the file with another one."""

    document: Callable[[Path], dict]
    put: Callable[[Path, dict], object]
    key: str = KEY

    def number(self, file: Path) -> object:
        return self.document(file)[self.key]

    def renumber(self, file: Path, number: object) -> None:
        rest = {name: value for name, value in self.document(file).items() if name != self.key}
        self.put(file, rest if number is NO_NUMBER else {self.key: number} | rest)


def _log_lines(file: Path) -> list[bytes]:
    return gzip.decompress(file.read_bytes()).splitlines()


def _put_log(file: Path, head: dict) -> None:
    lines = [json.dumps(head).encode(), *_log_lines(file)[1:]]
    file.write_bytes(gzip.compress(b"\n".join(lines)))


def _put_samples(file: Path, document: dict) -> None:
    metadata = {"twinserve": json.dumps(document)}
    pq.write_table(pq.read_table(file).replace_schema_metadata(metadata), file)


IN_JSON = Place(
    lambda file: json.loads(file.read_text()),
    lambda file, document: file.write_text(json.dumps(document)),
)
IN_LOG = Place(lambda file: json.loads(_log_lines(file)[0]), _put_log, "decisions")
IN_SAMPLES = Place(
    lambda file: json.loads(pq.read_schema(file).metadata[b"twinserve"]), _put_samples
)


@dataclass(frozen=True)
class Case:
    """write  into an empty folder; returns the file with the number
    read      what such a file says, to be compared
    commands  that read the file: entry point, and words with {file}, {folder} and {trace} in them
    place     of the number
    always    there never was a file of it without a number
    """

    form: Format
    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    commands: tuple[tuple[Callable, str], ...]
    place: Place = IN_JSON
    always: bool = False


def trace_of(sidecar: Path) -> str:
    return str(sidecar).removesuffix(SUFFIX)


def run_command(main: Callable, words: str, file: Path) -> object:
    """Its exit status, whether it returns that or exits."""
    names = {"file": file, "folder": file.parent, "trace": trace_of(file)}
    try:
        return main([word.format(**names) for word in words.split()])
    except SystemExit as stop:
        return stop.code


def _write_run(folder: Path) -> Path:
    run_command(simulate_main, " ".join([*A_RUN, "--decisions --out {file}"]), folder / "run")
    return folder / "run" / "run.json"


def _run_says(file: Path) -> tuple:
    run = read_run(file.parent)
    rows = [frame.to_csv() for frame in (run.rows.requests, run.rows.steps, run.rows.gaps)]
    return run.config, run.summary, rows, run.rows.kv_total_blocks


def _write_routing(folder: Path) -> Path:
    writer = RoutingWriter(folder / "routing.jsonl.gz", "session", None, ["http://10.0.0.1:8000"])
    load = [0.5, 0, 0, 0, 100]
    writer.note(1.0, "came", 0, 0, 100, 16, load)
    writer.note(2.0, "request", 0, "r", {"prompt_tokens": 9}, 3, 3, {16: []})
    writer.note(2.0, "asked", 0, [], 0, [[0, 0, load]])
    writer.close()
    return folder / "routing.jsonl.gz"


def _write_sidecar(folder: Path) -> Path:
    run_command(twinserve, "trace synth {file} --requests 5", folder / "t.jsonl")
    return path_of(folder / "t.jsonl")


def _write_profile(folder: Path) -> Path:
    save_profile(load_profile("llama-3.1-8b@h100"), folder / "mine.json")
    return folder / "mine.json"


def _write_front_end(folder: Path) -> Path:
    save_front_end(published()["vllm"], folder / "front.json")
    return folder / "front.json"


def _write_samples(folder: Path) -> Path:
    steps = [
        StepSample("decode", n, 0, StepComposition(n, 100 * n, 100), 0.01 + 0.001 * n)
        for n in range(1, 9)
    ]
    write_samples(Measurement(steps, [], {"device": "none"}), folder / "raw.parquet")
    return folder / "raw.parquet"


def _samples_say(file: Path) -> tuple:
    found = read_samples(file)
    return repr(found.steps), found.swaps, found.provenance


def _points(scale: Scale) -> list[Point]:
    return [Point({}, {"x": 3, "seed": seed}) for seed in scale.seeds]


def study(paper: str) -> Study:
    claims = [Claim("Fig. 1", "square", "9", "9", "agrees")] if paper else []
    figures = [
        Figure(name, name, _points, square, lambda frame: frame[:1], None, lambda table: claims)
        for name in ("one", "two")
    ]
    return Study("squares", paper, figures)


PAPER, TABLES = study("a book"), study("")


def command_of(study: Study) -> Callable[[list[str]], None]:
    """As `twinserve study` runs it, which knows the package's own by name."""

    def command(*figure: str, options: GridOptions = GridOptions()) -> None:
        study.command(figure, options)

    app = cyclopts.App(result_action="return_value")
    app.default(command)
    return lambda arguments: run_app(app, arguments)


PAPER_MAIN, TABLES_MAIN = command_of(PAPER), command_of(TABLES)


def _write_point(folder: Path) -> Path:
    run_grid(square, _points(Scale(seeds=(0,))), folder, 1)
    (file,) = (folder / KEPT).iterdir()
    return file


def _point_says(file: Path) -> tuple:
    """The row, and how often it was computed for that."""
    before = len(CALLS)
    rows = run_grid(square, _points(Scale(seeds=(0,))), file.parents[1], 1)
    return rows.y.tolist(), len(CALLS) - before


def _write_figure(folder: Path) -> Path:
    PAPER.run(["one"], Scale(seeds=(0,)), folder, 1)
    return folder / "one" / "claims.json"


def _write_machine(folder: Path) -> Path:
    Store(folder).write({"device": "none"}, "steps", "machine.json")
    return folder / "steps" / "machine.json"


_STUDY = "--seeds 1 --workers 1 --out {folder}/.."
_CAMPAIGN = "report --out {folder}/.."
CASES = (
    Case(
        RESULTS,
        _write_run,
        _run_says,
        (
            (simulate_main, "--config {file}"),
            (simulate_main, "--config {file} --policy bros --seed 3"),
            (twinserve, "report {folder} --out {folder}/page.html"),
            (twinserve, "report {folder}/.. --out {folder}/page.html"),
            (twinserve, "replay {folder} --model tiny --mode free"),
        ),
    ),
    Case(
        PLANS,
        lambda folder: put(folder / "plan", "plan", PLANS.numbered(PLAN)) / "plan.json",
        lambda file: repr(plan_part(Found("plan", file.parent, "plan", file.parent))),
        ((twinserve, "report {folder} --out {folder}/page.html"),),
    ),
    Case(
        LIMITS,
        lambda folder: put(folder / "limit", "limit", LIMITS.numbered(LIMIT)) / "limit.json",
        lambda file: repr(limit_part(Found("limit", file.parent, "limit", file.parent))),
        ((twinserve, "report {folder} --out {folder}/page.html"),),
    ),
    Case(
        LOG,
        lambda folder: _write_run(folder).with_name("decisions.jsonl.gz"),
        lambda file: repr(read_log(file)),
        ((twinserve, "replay {folder} --model tiny"),),
        IN_LOG,
        always=True,
    ),
    Case(
        ROUTING,
        _write_routing,
        lambda file: repr(read_routing(file)),
        ((twinserve, "reroute {file}"),),
        Place(IN_LOG.document, _put_log, "routing"),
        always=True,
    ),
    Case(
        SIDECAR,
        _write_sidecar,
        lambda file: repr(load_trace(trace_of(file))),
        (
            (twinserve, "trace inspect {trace}"),
            (twinserve, "trace convert {trace} {folder}/copy.jsonl"),
            (simulate_main, "--trace {trace}"),
        ),
    ),
    Case(
        PROFILE,
        _write_profile,
        load_profile,
        (
            (twinserve, "profiles show {file}"),
            (twinserve, "profiles scale {file} --decode 2 --out {folder}/other.json"),
            (twinserve, "profiles fit {folder}/steps.csv --profile {file}"),
            (twinserve, "calibrate --from-steps {folder}/steps.csv --profile {file}"),
            (simulate_main, "--profile {file}"),
        ),
    ),
    Case(FRONT_END, _write_front_end, load_front_end, ((simulate_main, "--front-end {file}"),)),
    Case(
        SAMPLES,
        _write_samples,
        _samples_say,
        ((twinserve, "profiles fit {file}"), (twinserve, "calibrate --from-steps {file}")),
        IN_SAMPLES,
    ),
    Case(
        POINTS,
        _write_point,
        _point_says,
        ((PAPER_MAIN, f"one {_STUDY}"), (PAPER_MAIN, f"one {_STUDY} --any-version")),
    ),
    Case(
        FIGURES,
        _write_figure,
        lambda file: PAPER.markdown(file.parents[1]),
        ((PAPER_MAIN, f"two {_STUDY}"), (TABLES_MAIN, f"two {_STUDY}")),
    ),
    Case(
        CAMPAIGN,
        _write_machine,
        lambda file: Store(file.parents[1]).read("steps", file.name),
        ((campaign, _CAMPAIGN),),
    ),
)
