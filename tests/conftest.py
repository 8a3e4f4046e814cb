"""What all tests share: how many examples property tests draw, which files begin, and less work
beside the tests."""

import asyncio
import contextlib
import copy
import gc
import importlib
import inspect
import os
import sys
from pathlib import Path

# Before numpy is imported: threads of BLAS wait for each other where all cores are busy with tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import cyclopts
import pytest
from cyclopts.argument import ArgumentCollection
from hypothesis import is_hypothesis_test

from tests.examples import load_profile

load_profile()
gc.disable()  # until all tests are collected: what is imported stays

TESTS = Path(__file__).parent
# Files of what .ci/nightly has, and whether these tests are live: test_nightly.py looks for them.
NIGHTLY = pytest.StashKey[set[tuple[Path, bool]]]()
# Marks that no test which is to run has.
LEFT_OUT = pytest.StashKey[set[str]]()
# A worker has a file to itself (--dist loadfile): what takes over a minute begins first, longest
# first, so that no worker has one of these alone at the end.
LONGEST = (
    "golden/test_golden.py", "notebooks/test_notebooks.py", "test_users.py",
    "live/test_serving_http.py", "live/test_route_live.py", "live/test_twin_layers.py",
    "live/test_disturbed_live.py", "test_readme.py", "sim/test_physics.py",
    "experiments/test_campaign_engine.py", "live/test_route_events_live.py",
    "live/test_serving_clients_http.py", "sim/test_fleet_conservation.py", "fuzz/test_fuzz.py",
    "sim/test_sweep_killed.py", "test_guide.py", "identity/test_identity.py",
    "experiments/test_systems.py", "sim/test_saturation.py", "live/test_drafts_live.py",
    "live/test_front_end_live.py", "policies/test_policies_on_ledgers.py",
    "sim/test_serving_fit.py", "experiments/test_matrices.py", "sim/test_report_browser.py",
    "sim/test_api.py",
)  # fmt: skip


def _look_at_each_command_once() -> None:
    """Cyclopts looks at each setting of a command for each call: half of the time of a command that
    does little. Here it does so for the first call in a process, and later ones get copies."""
    looked_at = cyclopts.App.assemble_argument_collection
    kept: dict[object, ArgumentCollection] = {}

    def arguments(app: cyclopts.App, **options) -> ArgumentCollection:
        command = app.default_command
        if options.get("parse_docstring") or options.get("default_parameter") or command is None:
            return looked_at(app, **options)
        if command not in kept:
            kept[command] = looked_at(app, **options)
        copies = {id(one): copy.copy(one) for one in kept[command]}
        for one in copies.values():
            one.tokens = []
            one.children = ArgumentCollection([copies[id(child)] for child in one.children])
        return ArgumentCollection(copies.values())

    cyclopts.App.assemble_argument_collection = arguments


_look_at_each_command_once()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NIGHTLY] = set()
    config.stash[LEFT_OUT] = left_out = set()
    if " or " not in (said := config.option.markexpr) and "(" not in said:
        left_out |= {word[4:] for word in said.split(" and ") if word.startswith("not ")}
    if "slow" in left_out:
        left_out.add("nightly")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker imports all test files, and in a fresh checkout compiles those that no other one
    has compiled. So every second worker begins with the last file."""
    if sys.dont_write_bytecode or os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "02468":
        return
    files: list[Path] = []
    for path in map(Path, session.config.args):
        files += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    for file in reversed([file.resolve() for file in files if file.suffix == ".py"]):
        if file.is_relative_to(TESTS):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collection says it
                importlib.import_module(".".join(file.relative_to(TESTS.parent).parts)[:-3])


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list | None:
    """Each worker collects all. Of tests that -m leaves out, near half of them, parameters and
    fixtures are not looked at."""
    left_out = collector.config.stash[LEFT_OUT]
    if not left_out or not name.startswith("test") or not callable(obj):
        return None
    marks = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
    if not marks & left_out:
        return None
    if "nightly" in marks or is_hypothesis_test(obj):
        collector.config.stash[NIGHTLY].add((collector.path, "live" in marks))
    return []


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only --no-loadscope-reorder keeps this order with -n: else xdist begins with files of many
    tests. What is nightly is slow too."""
    large = config.stash[NIGHTLY]
    for item in items:
        nightly = item.get_closest_marker("nightly") is not None
        if nightly:
            item.add_marker("slow")
        if nightly or is_hypothesis_test(getattr(item, "obj", None)):
            large.add((item.path, item.get_closest_marker("live") is not None))
    turn = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own; one that hangs fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def limited() -> None:
        async with asyncio.timeout(120):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    asyncio.run(limited())
    return True


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: each full collection would look at all of them again. And
    Hypothesis times each collection, of which there are many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _few_to_look_at():
    """Sweeps and studies collect between runs. What earlier modules left would be looked at each
    time: a second, at the end of the suite."""
    gc.collect()
    gc.freeze()
