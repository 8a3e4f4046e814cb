"""Which room may know which: the arrows of docs/architecture.md, asked of every import in the code,
those inside functions too; and no module knows itself through others."""

import ast
from functools import cache
from pathlib import Path

import pytest

from docs.reference.rooms import picture

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("backends", "experiments", "native", "policies", "profiles", "sim", "traces")
GROUND = {"errors", "formats", "own_code"}  # src/twinserve/: below all rooms, and know none

# room -> rooms that it may know. A room's own modules may know each other.
POLICIES = {"native", "policies", "policies.kv", "policies.parts", "profiles", "traces"}
RESULTS = {*POLICIES, "backends"}
ENGINE = {*RESULTS, "sim.results"}
FLEET = {*ENGINE, "sim.engine"}
SETUP = {*FLEET, "sim.fleet", "sim.serve_line"}
LIVE = {*SETUP, "sim.setup", "policies.justitia"}  # applications: what their predictors ask of them
TWIN = {*LIVE, "backends.live", "sim.report"}
CLI = {*TWIN, "sim.twin", "sim.plan", "sim.sweep"}
MAY_KNOW: dict[str, set[str]] = {
    **{ground: set() for ground in sorted(GROUND)},
    "traces": set(),
    "profiles": set(),
    "native": set(),
    # the contract names the ledger that a plan is made with, and what is believed of step times
    "policies": {"native", "policies.kv", "policies.parts", "profiles"},
    "policies.kv": {"native", "policies"},
    "policies.parts": POLICIES,
    "policies.baselines": POLICIES,
    "policies.bros": POLICIES,
    "policies.echo": POLICIES,
    "policies.justitia": POLICIES,
    "policies.layerkv": {*POLICIES, "policies.baselines"},  # it is vLLM of then with layers
    "backends": {"native", "policies", "policies.kv", "profiles"},
    "sim": set(),  # nothing is in it but its rooms
    "sim.results": RESULTS,
    "sim.engine": ENGINE,
    "sim.fleet": FLEET,
    "sim.serve_line": {"profiles"},
    "sim.setup": SETUP,
    "sim.report": {"sim.results", "traces"},
    "backends.live": LIVE,
    "sim.twin": TWIN,
    "sim.plan": {*SETUP, "sim.setup"},
    "sim.sweep": {*SETUP, "sim.setup", "sim.report"},
    "sim.cli": CLI,
    "sim.api": CLI,
    "experiments": {*CLI, "sim.cli", "policies.bros", "policies.echo", "policies.justitia"},
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name, without `twinserve.`, of every module in the folders."""
    found = {ground: ROOT / "src" / "twinserve" / f"{ground}.py" for ground in sorted(GROUND)}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    named = ".".join(parts[:2])
    return named if named in MAY_KNOW else parts[0]


def imported(node: ast.AST) -> list[str]:
    """Modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        return [
            name.name.removeprefix("twinserve.")
            for name in node.names
            if name.name.startswith("twinserve.")
        ]
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("twinserve"):
        return []
    parent = node.module.removeprefix("twinserve").removeprefix(".")
    inner = [f"{parent}.{name.name}".removeprefix(".") for name in node.names]
    return [name if name in modules() else parent for name in inner]


@cache
def knows(module: str, at_import: bool = False) -> frozenset[str]:
    """What a module imports; at_import: only what it needs before it can be used."""
    tree = ast.parse(modules()[module].read_bytes())
    nodes = ast.walk(tree) if not at_import else iter(tree.body)
    return frozenset(name for node in nodes for name in imported(node)) - {module}


def test_every_room_is_on_the_list():
    assert {room_of(module) for module in modules()} == set(MAY_KNOW)
    assert len(modules()) > 250


@pytest.mark.slow
@pytest.mark.parametrize("room", MAY_KNOW)
def test_a_room_knows_only_the_rooms_below_it(room):
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        if room_of(module) == room
        for other in sorted(knows(module))
        if room_of(other) not in {room, *GROUND, *MAY_KNOW[room]}
    ]
    assert wrong == []


@pytest.mark.slow
def test_imports_are_absolute():
    relative = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.slow
def test_no_module_needs_itself():
    """A circle of imports works or fails with the order in which modules are first asked for."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for other in sorted(knows(module, at_import=True)):
            visit(other, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.slow
def test_only_the_live_engine_and_what_drives_it_need_vllm():
    """Everything else works where there is neither vLLM nor torch."""
    allowed = {"backends.live", "experiments", "sim.cli"}
    for module, path in modules().items():
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_bytes()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        if names & {"vllm", "torch", "triton"}:
            assert room_of(module) in allowed, module


@pytest.mark.slow
def test_the_picture_is_that_of_the_imports():
    """Made by `python -m docs.reference.rooms`."""
    assert picture() == (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
