"""docs/your_own_policy.md from top to bottom: its Python runs, its package is found by every
command and by a live engine, and what the page shows is what comes out."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinserve.policies import registry
from twinserve.sim.cli import main as cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "your_own_policy.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
FILE = re.compile(r"# (deadline/\S+)\n")
LIVE = re.compile(r"--model tiny|-p deadline:chunk=64,kv=headroom .*--out run$")


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is, where its first line names one."""
        named = FILE.match(self.text)
        return named and named[1]


def blocks(language: str | None = None) -> list[Block]:
    found = [Block(*match) for match in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    return [block for block in found if language in (None, block.language)]


def commands() -> list[tuple[str, str]]:
    """(command, what it prints), in order."""
    parts = [
        part
        for block in blocks("console")
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]
    ]
    return [
        (command.strip(), shown.strip())
        for command, _, shown in (part.partition("\n") for part in parts)
    ]


def write_package(folder: Path) -> Path:
    """The guide's files; returns the package's folder."""
    for block in blocks():
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    return folder / "deadline"


def install(package: Path, target: Path) -> Path:
    """What `pip install --target` leaves there: the modules, and metadata with the entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text())
    for name in project["tool"]["setuptools"]["packages"]:
        shutil.copytree(package / name, target / name)
    about = project["project"]
    info = target / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    (info / "entry_points.txt").write_text(entry_points_text(about["entry-points"]))
    return target


def entry_points_text(groups: dict[str, dict[str, str]]) -> str:
    lines = []
    for group, points in sorted(groups.items()):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return write_package(tmp_path_factory.mktemp("guide"))


@pytest.fixture(scope="module")
def site(package, tmp_path_factory) -> Path:
    return install(package, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def installed(site):
    """The package on the path of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "deadline_policy"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The commands share one folder: later ones read what earlier ones wrote, and all the ten
    lines."""
    path = tmp_path_factory.mktemp("commands")
    path.joinpath("mine.py").write_text(blocks("python")[0].text)
    return path


def run(command: str, folder: Path) -> tuple[int, str]:
    """A command of ours in this process; (exit code, what it prints)."""
    name, *arguments = shlex.split(command)
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            (cli.simulate_main if name == "simulate" else cli.main)(arguments)
        except SystemExit as stopped:
            return int(stopped.code or 0), said.getvalue()
    return 0, said.getvalue()


@pytest.mark.nightly
def test_the_python_of_the_page_runs_and_prints_what_it_shows():
    names: dict = {"__name__": "guide"}
    printed, shown = "", 0
    for block in blocks():
        if block.language == "python" and not block.file:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block.text, "your_own_policy.md", "exec"), names)  # noqa: S102
            printed = said.getvalue()
        elif block.language == "text" and printed:
            assert block.text.strip() in printed
            shown += 1
            printed = ""
        else:
            printed = ""
    assert shown == 1
    ours, vllm = names["results"]["earliest-deadline"].summary, names["results"]["vllm"].summary
    assert ours["classes"]["rt"]["completed"] == vllm["classes"]["rt"]["completed"] == 400
    assert ours["classes"]["rt"]["ttft_attainment"] > vllm["classes"]["rt"]["ttft_attainment"]
    assert names["plans"] > 500


def test_the_three_methods_are_ten_lines():
    options, shown = (
        node for node in ast.parse(blocks("python")[0].text).body if isinstance(node, ast.ClassDef)
    )
    assert ast.unparse(options.body[0]) == "chunk: int = 512"
    name, *methods = shown.body
    assert ast.unparse(name) == "name, Options = ('earliest-deadline', Chunked)"
    assert [method.name for method in methods] == ["on_arrival", "on_finish", "plan"]
    assert methods[-1].end_lineno - methods[0].lineno + 1 == 10


def test_the_packages_names_are_there(installed):
    assert "deadline" in registry.policy_names() and "headroom" in registry.ledger_names()
    assert registry.policy_class("deadline").__module__ == "deadline_policy.policy"


@pytest.fixture
def own_tests(installed, package) -> dict:
    names: dict = {"__name__": "test_deadline"}
    text = (package / "tests" / "test_deadline.py").read_text()
    exec(compile(text, "test_deadline.py", "exec"), names)  # noqa: S102
    return names


def test_its_own_tests_pass(own_tests):
    own_tests["test_a_chunk_beyond_the_step_is_refused"]()
    own_tests["test_the_urgent_request_goes_first"]()
    assert sum(name.startswith("test_") for name in own_tests) == 3


@pytest.mark.nightly
def test_its_own_test_of_the_rules_passes(own_tests):
    for policy in own_tests["test_rules"].pytestmark[0].args[1]:
        own_tests["test_rules"](policy)


def plain_commands() -> list:
    return [pytest.param(*pair, id=pair[0][:60]) for pair in commands() if not LIVE.search(pair[0])]


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "shown"), plain_commands())
def test_command(command, shown, installed, folder):
    if command.startswith("pip "):
        pytest.skip("the package is installed by a fixture; pip does it in a slow test")
    code, said = run(command, folder)
    assert (code != 0) == shown.startswith("error:"), said
    assert shown in said and "Traceback" not in said
    if "runs" in command and "--out" in command and "report" not in command:
        described = json.loads(
            (folder / "runs" / "deadline_kv_headroom_swap_true" / "run.json").read_text()
        )
        assert described["policy"] == {"name": "deadline", "options": {"chunk": None, "swap": True}}
        assert described["kv"]["ledger"] == "headroom"


@pytest.mark.slow
def test_a_config_of_a_run_gives_the_same_run(installed, tmp_path):
    first = (
        "simulate -p deadline:chunk=100,kv=headroom -t sharegpt --requests 40 --load 0.8 "
        "--quiet --out first"
    )
    assert run(first, tmp_path)[0] == 0
    assert run("simulate --config first/run.json --quiet --out second", tmp_path)[0] == 0
    one, other = (tmp_path / name / "requests.parquet" for name in ("first", "second"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.nightly
def test_a_process_of_its_own_finds_it(site, tmp_path):
    """Nothing but the path is told to it."""
    command = [
        sys.executable, "-m", "twinserve.sim.cli.main", "simulate", "-p", "deadline:kv=headroom",
        "-t", "poisson",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, "--requests", "20", "--rate", "5", "--json"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["completed"] == 20


@pytest.mark.nightly
def test_pip_leaves_what_the_fixture_does(package, site, tmp_path):
    target = tmp_path / "site"
    command = [
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
        "--no-index",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, "--target", str(target), str(package)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode and "bdist_wheel" in done.stdout + done.stderr:
        pytest.skip("this environment cannot build wheels")
    assert done.returncode == 0, done.stderr

    def points(root: Path) -> set[str]:
        (file,) = root.glob("*.dist-info/entry_points.txt")
        return {line for line in file.read_text().splitlines() if line}

    assert points(target) == points(site)
    assert {p.name for p in (target / "deadline_policy").glob("*.py")} == {
        p.name for p in (site / "deadline_policy").glob("*.py")
    }


# -- a live engine ---------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.live
@pytest.mark.parametrize(
    "command", [c for c, _ in commands() if LIVE.search(c)], ids=lambda c: " ".join(c.split()[:5])
)
def test_live_command(command, site, folder):
    pytest.importorskip("vllm")
    name, *arguments = shlex.split(command)
    verb = ["simulate"] if name == "simulate" else []
    done = subprocess.run(
        [sys.executable, "-m", "twinserve.sim.cli.main", *verb, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    if "--mode free" in command:
        assert re.search(r"drift 0 of \d+ steps", said), said
    elif "replay" in command:
        assert re.search(r"steps that drifted\s+0\b", said), said


@pytest.mark.nightly
@pytest.mark.live
def test_a_server_runs_the_policy(site, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from tests.live.serve_http import Server, write_served_model

    (serve,) = [block.text for block in blocks("bash")]
    options = json.loads(re.search(r"--additional-config '(.*?)'", serve)[1])
    stats = tmp_path / "stats.json"
    monkeypatch.setenv("PYTHONPATH", str(site))
    model = write_served_model(tmp_path / "model")
    arguments = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    server = Server(
        tmp_path,
        model,
        {**options, "stats_path": str(stats)},
        [*arguments, "--num-gpu-blocks-override", "60"],
    )
    try:
        server.wait()
        assert "policy deadline:chunk=64 on the headroom ledger" in server.said()
        for service_class in ("rt", "be", "rt"):
            status, answer = server.complete(
                [5] * 90, max_tokens=12, vllm_xargs={"class": service_class}
            )
            assert status == 200 and answer["usage"]["completion_tokens"] == 12
    finally:
        server.stop()
    assert "deadline" in json.loads(stats.read_text())["policy"]
    assert json.loads(stats.read_text())["drift"] == 0
