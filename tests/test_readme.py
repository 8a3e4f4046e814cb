"""Every command of the README and of pages in docs/ runs, and prints what the page shows."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import test_guide
from twinserve.experiments.study.command import GridOptions, study

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
TUTORIAL, SWEEP = DOCS / "tutorial.md", DOCS / "sweep.md"
# tests/test_users.py: other pages take commands from these
PAGES = (README, DOCS / "terminal.md", DOCS / "plan.md", TUTORIAL, SWEEP)
# These share one folder, and all the table of traces.md.
TOGETHER = tuple(
    DOCS / f"{name}.md"
    for name in (
        *("fleet", "from_vllm", "metrics", "policies", "profiles", "traces", "invariants"),
        *("optimality", "validation", "bros", "layerkv", "justitia"),
    )
)
ELSEWHERE_RUN = {"your_own_policy", "routers"}  # test_guide.py, test_router_guide.py
FILES = re.compile(r"^```(?:json|python) (\S+)\n(.*?)^```$", re.S | re.M)  # of docs/sweep.md
BLOCK = re.compile(r"```console\n(.*?)```", re.S)
# Shown on the pages, but either run by .ci/run itself or by this very test.
ELSEWHERE = ("pip install", "python -m pytest")
# What depends on the machine: seconds of wall time, speed, paths of local copies.
VARIES = re.compile(r"wall time|simulated steps/s|local copy|/.*\.jsonl")


# Commands that need a live engine, or what one has written. Their figures are the machine's, so
# only words are compared.
LIVE = re.compile(r"--model tiny|cpu\.json|replay run")


def commands(page: Path = README) -> list[tuple[str, str]]:
    text = page.read_text(encoding="utf-8")
    # tests/test_users.py has the tutorial's sections for each kind of user
    return commands_of(text.partition("\n## For a")[0] if page == TUTORIAL else text)


def commands_of(markdown: str) -> list[tuple[str, str]]:
    """(command, output shown) in order of appearance. Commands joined by `&&` are commands of their
    own; the output is that of the last one."""
    found = []
    for block in BLOCK.findall(markdown):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = command[:-1] + more.strip()
            *first, last = command.strip().split(" && ")
            found += [(part, "") for part in first]
            found.append((last, output.strip()))
    return found


def comparable(text: str) -> list[str]:
    """Lines without those that vary, and without the run of blanks that a longer number pushes
    aside."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not VARIES.search(line)]


def lacking(shown: str, said: str, live: bool = False) -> list[str]:
    """Lines of a page that a command does not print; live: their numbers are the machine's."""
    got, expected = comparable(said), comparable(shown)
    if live:
        got, expected = words(got), words(expected)
    return [line for line in expected if line not in got]


def provide(page: Path, folder: Path) -> None:
    """Files that a reader of the page has: those of docs/sweep.md; the table of docs/traces.md; or
    the policy of the guide, and Azure's recording under a name of its own (where it is not at hand,
    a few requests in its format)."""
    if page == SWEEP:
        for name, text in FILES.findall(page.read_text("utf-8")):
            folder.joinpath(name).write_text(text)
        return
    if page in TOGETHER:
        (table,) = re.findall(r"```csv\n(.*?)```", (DOCS / "traces.md").read_text("utf-8"), re.S)
        folder.joinpath("requests.csv").write_text(table)
        return
    folder.joinpath("mine.py").write_text(test_guide.blocks("python")[0].text)
    for place in os.environ.get("TWINSERVE_TRACES", "").split(os.pathsep):
        recording = Path(place, "azure_llm_2023_conv.csv")
        if place and recording.is_file():
            folder.joinpath("requests.csv").symlink_to(recording.resolve())
            return
    times = (f"2023-11-16 18:{second // 60:02}:{second % 60:02}" for second in range(0, 900, 15))
    rows = [f"{time}.0000000,{400 + 7 * i},{40 + i}" for i, time in enumerate(times)]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]
    folder.joinpath("requests.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[Path, Path]:
    """The commands of a page share one folder: later ones read what earlier ones wrote."""
    found = {page: tmp_path_factory.mktemp(page.stem) for page in (*PAGES, TOGETHER[0])}
    for page, folder in found.items():
        provide(page, folder)
    return found | dict.fromkeys(TOGETHER, found[TOGETHER[0]])


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.stem)
def test_a_page_has_commands(page):
    names = {command.split()[0] for command, _ in commands(page)}
    assert {"simulate", "twinserve"} <= names
    assert ("pip" in names) == (page is README)


def test_every_page_with_a_command_is_run():
    assert all(map(commands, TOGETHER)) and len(commands(SWEEP)) > 6
    assert len(FILES.findall(SWEEP.read_text("utf-8"))) == 2
    shown = {page for page in DOCS.glob("*.md") if commands(page)}
    assert {page.stem for page in shown - {*PAGES, *TOGETHER}} == ELSEWHERE_RUN


def test_the_tutorial_goes_all_the_way():
    verbs = [" ".join(command.split()[:2]) for command, _ in commands(TUTORIAL)]
    wanted = ("simulate", "twinserve sweep", "twinserve plan", "twinserve report")
    assert all(any(verb.startswith(one) for verb in verbs) for one in wanted)
    assert verbs[-1] == "twinserve replay"


def test_the_readme_installs_and_runs_as_one_line_and_ci_finds_its_test_command():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("$ pip install . && simulate ") for line in lines)
    (suite,) = [line for line in lines if line.startswith("$ python -m pytest")]
    assert suite == '$ python -m pytest -q -n auto -m "not slow"'


def cases() -> list:
    return [
        pytest.param(
            *(page, command, shown),
            id=f"{page.stem}: {command[:60]}",
            marks=[pytest.mark.live] * bool(LIVE.search(command))
            + [pytest.mark.traces] * (page == TUTORIAL),
        )
        for page in (*PAGES, *TOGETHER)
        for command, shown in commands(page)
    ]


def words(lines: list[str]) -> list[str]:
    """Lines without their numbers."""
    return [re.sub(r"[-+]?[\d][\d.,]*|outside", "#", line) for line in lines]


def environment(folder: Path) -> dict[str, str]:
    """Of a command that is run as a user would: scripts beside this interpreter, no colours."""
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "TWINSERVE_CACHE": str(folder / "cache"),
    }


def carried_out(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in that folder, as a user would run it."""
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "command", "shown"), cases())
def test_command(page: Path, command: str, shown: str, folders: dict[Path, Path]):
    if command.startswith(ELSEWHERE):
        pytest.skip("run by .ci/run")
    if page.stem == "validation":
        pytest.importorskip("aiconfigurator_core")
        if not os.environ.get("TWINSERVE_TRUTH"):
            pytest.skip("TWINSERVE_TRUTH names no folder of measured runs")
    live = LIVE.search(command) is not None
    if live and not os.environ.get("TWINSERVE_REQUIRE_LIVE"):
        pytest.importorskip("vllm")
    if (
        "replay run" in command
        and not (folders[page] / "run").exists()
        or page == TUTORIAL
        and live
    ):
        # where live tests run alone, without the simulation that the page has before
        order = [one for one, _ in commands(page)]
        carried_out(order[order.index(command) - 1], folders[page])
    done = carried_out(command, folders[page])
    said = done.stdout + done.stderr
    expected_to_fail = shown.startswith("error:") or "num-blocks=50" in command
    assert (done.returncode != 0) == expected_to_fail, said
    assert "Traceback" not in said
    if shown and (expected_to_fail or page == SWEEP or os.environ.get("TWINSERVE_TRACES")):
        # Figures are those of the original trace; its replica gives others.
        missing = lacking(shown, said, live and page != TUTORIAL)
        assert not missing, f"{page.name} shows {missing}; the command prints\n{said}"


@pytest.mark.slow
def test_a_study_of_sixty_lines_runs(folders, capsys, monkeypatch):
    folder = folders[SWEEP]
    assert len((folder / "mine.py").read_text().splitlines()) < 60
    monkeypatch.chdir(folder)
    options = GridOptions(quick=True, workers=1, out=Path("small"))
    study("./mine.py", options=options)
    assert capsys.readouterr().out == "small/paper_vs_ours.md\n"
    report, table = (folder / "small" / name for name in ("paper_vs_ours.md", "fig1/table.csv"))
    assert "| Fig. 1 | TTFT of vLLM over that of BROS, 5 requests/s | 3x |" in report.read_text()
    files = {path: path.read_bytes() for path in (report, table)}
    table.unlink()
    study("./mine.py", options=replace(options, redraw=True))
    assert {path: path.read_bytes() for path in files} == files
