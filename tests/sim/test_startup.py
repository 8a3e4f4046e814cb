"""What a version or a page of help may load: never what simulations are made with; and what a run
may load. Time is not asked here; experiments/benchmark measures it."""

import importlib
import os
import subprocess
import sys

import pytest

from tests.commands import refused, status
from tests.parameters import mostly_nightly
from twinserve.sim.cli.main import VERBS, main

HEAVY = ("numpy", "pandas", "pyarrow", "scipy", "matplotlib", "simpy", "sklearn", "torch", "vllm")
# runs one command of the given module's, and says what of the names in argv[1] it has loaded
LOADED = """
import sys
names, (command, *arguments) = sys.argv[1].split(), sys.argv[2:]
from twinserve.sim.cli import main
try:
    {"simulate": main.simulate_main, "twinserve": main.main}[command](arguments)
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *[name for name in names if name in sys.modules])
"""
PAGES = [
    "simulate --version",
    "twinserve --version",
    "simulate --help",
    "twinserve --help",
    *(f"twinserve {verb} --help" for verb in VERBS),
    *(
        f"twinserve trace {verb} --help"
        for verb in ("list", "fetch", "inspect", "convert", "anonymise", "synth")
    ),
    *(f"twinserve profiles {verb} --help" for verb in ("list", "show", "build", "scale", "fit")),
]


def page(command: str, *names: str) -> tuple[str, list[str]]:
    """What a command prints in a process of its own, and which modules of `names` it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, " ".join(names), *command.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    shown, _, loaded = done.stdout.rpartition("loaded:")
    return shown, loaded.split()


@pytest.mark.slow
def test_a_run_loads_nothing_of_what_it_does_not_use():
    """Of one that writes no files, pandas too."""
    ours = "error_bars speculation failures yaml_text fleet_file demand".split()
    others = "fleet.scaling fleet.connector fleet.faults results.decisions engine.drafting".split()
    unused = [f"twinserve.sim.{name}" for name in [*(f"setup.{n}" for n in ours), *others]]
    run = "simulate -t fixed:64,4 --rate 5 --requests 9 -q --replicas 2"
    shown, loaded = page(run, *HEAVY, "yaml", *unused)
    assert "vllm" in shown and loaded == ["numpy", "simpy"]


@pytest.mark.slow
@pytest.mark.parametrize("command", mostly_nightly(PAGES, *PAGES[:4], "twinserve validate --help"))
def test_pages_of_help_load_nothing_heavy(command):
    shown, loaded = page(command, *HEAVY)
    assert shown.strip() and loaded == []


def test_a_version_loads_no_command_line_either():
    shown, loaded = page("simulate --version", "cyclopts", "pydantic", "rich")
    assert loaded == [] and shown == page("twinserve --version")[0]


def test_the_list_of_verbs_loads_no_verb():
    shown, loaded = page(
        "twinserve --help", *(where.partition(":")[0] for where, _ in VERBS.values())
    )
    assert loaded == [] and all(f" {verb} " in shown for verb in VERBS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_own_help_begins_with_its_line_in_the_list(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    status(main, [verb, "--help"])
    assert VERBS[verb][1] in capsys.readouterr().out


# one of each room that has its own
ERRORS = (
    "twinserve.traces.workload:WorkloadError",
    "twinserve.profiles.specs:ProfileError",
    "twinserve.policies.errors:PolicyError",
    "twinserve.policies.names:RegistryError",
    "twinserve.sim.setup.config:SettingsError",
    "twinserve.sim.results.metrics_objectives:GoodputError",
    "twinserve.sim.results.files:ResultsError",
    "twinserve.sim.engine.loop:NoProgressError",
    "twinserve.backends.live.versions:LiveEngineError",
)


@pytest.mark.parametrize("name", ERRORS)
def test_an_expected_error_is_one_line(name, capsys, monkeypatch):
    module, _, kind = name.partition(":")
    error = getattr(importlib.import_module(module), kind)

    def wrong(*_):
        raise error("what is wrong; what to do")

    monkeypatch.setattr("twinserve.traces.verbs.list_traces", wrong)
    assert refused(capsys, main, ["trace", "list"]) == "error: what is wrong; what to do\n"


def test_a_defect_is_no_bad_input(monkeypatch):
    monkeypatch.setattr("twinserve.traces.verbs.list_traces", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["trace", "list"])


@pytest.mark.slow
def test_help_breaks_lines_where_the_terminal_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for words, sentence in (
        ("simulate", "Several give one table over the same requests."),
        (
            "simulate",
            "and k=5 for max(ttft, k x isolated prefill); or with units, classes, percentiles,",
        ),
        (
            "replay",
            "In a free replay the requests arrive again, the policy decides on the live state, and",
        ),
    ):
        status(main, [words, "--help"])
        assert sentence in capsys.readouterr().out
