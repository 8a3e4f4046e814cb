"""What README.md and docs/*.md name is there: paths of the repository, names of the package."""

import ast
import re
from pathlib import Path

from tests.identity.engines_table import read_results, table
from tests.parameters import each
from twinserve.backends.live.versions import KNOWN
from twinserve.policies.baselines.vllm import RULES
from twinserve.policies.registry import LEDGERS
from twinserve.sim.fleet.routers.registry import ROUTERS
from twinserve.traces.readers.options import OWN_READERS

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policies", "sim", "backends", "profiles", "traces", "experiments", "tests")
FOLDERS = (*ROOMS, "docs", "notebooks", "src")
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
QUOTED = re.compile(r"`([\w./*-]+)`")
NAMES = re.compile(r"twinserve((?:\.\w+)+)")
IMPORTS = re.compile(r"^from (twinserve[\w.]*) import (.+)$", re.M)
# Not of this repository: files of other people's, and of the package that a page makes.
FOREIGN = ("backends/v3/src/", "v1/core/", "vllm/", "sarathi/", "fastserve/")
INVENTED = {"mine.py", LEDGERS.group, ROUTERS.group, OWN_READERS.group}


# Words at most: of all pages, and of single ones. `wc -w` counts the same.
ALL_WORDS, ALL_PAGES, README_LINES = 80_000, 30, 180
MOST_WORDS = {"bros": 2500, "echo": 2500, "layerkv": 2500, "justitia": 2500, "architecture": 1500}


def paths(text: str) -> list[str]:
    """What stands in backticks, outside of listings, and looks like a path of the repository. Words
    in capitals stand for something else."""
    found = QUOTED.findall(FENCED.sub("", text))
    return [
        path
        for path in found
        if (path.partition("/")[0] in FOLDERS and "/" in path) or path.endswith(".py")
        if not path.startswith(FOREIGN) and path not in INVENTED and not re.search("[A-Z]{2}", path)
    ]


def is_there(path: str) -> bool:
    """A bare file name may be that of a file in any folder."""
    return any(ROOT.glob(path)) or ("/" not in path and any(is_in(path, room) for room in ROOMS))


def is_in(name: str, room: str) -> bool:
    return any((ROOT / room).rglob(name))


def resolves(names: list[str]) -> bool:
    """Whether `twinserve.` and these are a module, or what a module has. Nothing is imported: some
    need vLLM."""
    place = ROOT
    for number, name in enumerate(names):
        if (place / name).is_dir():
            place /= name
            continue
        module = place / f"{name}.py"
        rest = names[number + 1 :]
        return module.is_file() and (not rest or rest[0] in defined(module))
    return True


def defined(module: Path) -> set[str]:
    """Names at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def test_pages_are_no_longer_than_agreed():
    words = {page.stem: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    assert len(words) <= ALL_PAGES and sum(words.values()) <= ALL_WORDS
    assert {name: words[name] for name, most in MOST_WORDS.items() if words[name] > most} == {}
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@each("page", PAGES)
def test_every_path_on_a_page_exists(page):
    assert [path for path in paths(page.read_text()) if not is_there(path)] == []


@each("page", PAGES)
def test_every_dotted_name_on_a_page_can_be_resolved(page):
    text = page.read_text()
    names = {f"twinserve{dotted}" for dotted in NAMES.findall(text)} - INVENTED
    names |= {f"{m}.{n.strip()}" for m, found in IMPORTS.findall(text) for n in found.split(",")}
    assert [name for name in sorted(names) if not resolves(name.split(".")[1:])] == []


def test_pages_do_name_paths_and_modules():
    """So that the tests above do not pass because nothing is found."""
    texts = [page.read_text() for page in PAGES]
    assert sum(len(paths(text)) for text in texts) > 80
    assert sum(len(NAMES.findall(text)) for text in texts) > 60
    assert not is_there("sim/engine.py") and not is_there("sim/cli_*.py") and is_there("slots.py")
    assert not resolves(["sim", "engine", "Engine"]) and not resolves(["sim", "setup", "run", "x"])


# docs/invariants.md: its table is of the results, and its rules are those of policy `vllm`.
ENGINES = (ROOT / "docs" / "invariants.md").read_text()
RESULTS = read_results(ROOT / "docs" / "results" / "engines")


def test_the_table_is_that_of_the_results():
    assert table(RESULTS) in ENGINES


def test_every_release_decides_as_policy_vllm_does_with_its_rules():
    for one in RESULTS:
        assert one["identity"]["parted"] == {}, one["vllm"]
        assert RULES[one["release"]].__dict__ == one["rules"]


def test_no_release_is_said_to_work_for_what_it_lacks():
    missing = {one["vllm"]: one["missing"] for one in RESULTS}
    for release, uses in KNOWN.items():
        assert [use for use in uses if missing[release][use]] == []


def test_the_page_names_every_release_that_an_option_stands_for():
    for release in RULES:
        assert f"`{release}`" in ENGINES
