"""The site's pages that are made from the code (docs/reference): nothing public is left out, and
what they show is what commands, files and classes have."""

import re

import pyarrow.parquet as pq
import pytest

import twinserve as ts
from docs.reference import files
from docs.reference.hook import ROOT, pages
from docs.reference.markdown import cell, docstring, text
from tests.commands import status
from tests.format_cases import CASES
from twinserve.policies.base import Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.sim.api.settings import Settings
from twinserve.sim.cli.main import VERBS, main, twinserve_app
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.setup.config import SimulationConfig

pytestmark = pytest.mark.slow

GROUPS = ("trace", "profiles")  # verbs with verbs of their own
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def section(page: str, title: str) -> str:
    """From a heading to the next one of its level."""
    level, _, _ = title.partition(" ")
    _, _, rest = page.partition(f"\n{title}\n")
    assert rest, title
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.M)[0]


def commands() -> list[str]:
    """Every command, with its verb of a verb."""
    found = []
    for verb in VERBS:
        app = twinserve_app([verb])[verb]
        below = [name for name in app if not name.startswith("-")]
        found += [f"{verb} {name}" for name in below] or [verb]
    return found


def test_every_kept_table_of_a_study_is_on_its_page(made):
    found = [page for page in made if page.startswith("results/")]
    assert len(found) > 8
    for page in found:
        kept = list((ROOT / "docs" / page).parent.glob("*/table.csv"))
        shown = r"/table\.csv\)" if page.endswith("paper_vs_ours.md") else "^## "
        assert len(re.findall(shown, made[page], re.M)) == len(kept) > 0, page


def test_verbs_of_verbs_are_found():
    assert {name.split()[0] for name in commands() if " " in name} == set(GROUPS)


def test_a_command_has_the_options_of_its_help(made, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    page = made["reference/commands.md"]
    for command in commands():
        status(main, [*command.split(), "--help"])
        boxes = re.findall(r"^│ [* ]*(.*?)(?: {2,}.*)?│$", capsys.readouterr().out, re.M)
        wanted = {option for box in boxes for option in OPTION.findall(box)}
        wanted -= {"--help", "--version"}
        shown = section(page, f"{'###' if ' ' in command else '##'} twinserve {command}")
        if "(#settings-of-a-run)" in shown:
            shown += section(page, "## Settings of a run")
        there = set(OPTION.findall(" ".join(re.findall(r"^\| (`.*?) \| ", shown, re.M))))
        positional = {name for name in wanted - there if f"| `{name[2:].upper()}`" in shown}
        assert wanted - there == positional and there <= wanted, command


def test_settings_are_those_of_runs_and_of_python(made):
    shown = section(made["reference/commands.md"], "## Settings of a run")
    names = {name[2:].replace("-", "_") for name in re.findall(r"^\| `(--[\w-]+)`", shown, re.M)}
    assert names == set(SimulationConfig.model_fields)
    settings = section(made["reference/python.md"], "### Settings")
    assert all(f"    {name}: " in settings for name in Settings.__annotations__)


def test_python_has_every_public_name(made):
    headings = set(re.findall(r"^### (\w+)$", made["reference/python.md"], re.M))
    assert set(ts.__all__) <= headings
    assert "#### Run.requests" in made["reference/python.md"]
    assert section(made["reference/python.md"], "#### Run.save").startswith("\n```python\nsave(out")


@pytest.mark.parametrize("contract", [Policy, KvLedger, Router])
def test_contracts_have_what_must_be_written(contract, made):
    assert contract.__abstractmethods__
    for name in contract.__abstractmethods__:
        title = f"#### {contract.__name__}.{name}"
        assert "To be written." in section(made["reference/contracts.md"], title)


def test_every_format_has_its_version(made):
    forms = files.formats()
    assert {form.name for form in forms} == {case.form.name for case in CASES}
    for form in forms:
        assert f"| {form.name} | {form.version} | {form.oldest} | " in made["reference/files.md"]


def test_columns_are_those_of_a_run(made, tmp_path):
    ts.simulate("vllm", trace="fixed:64,4", rate=5, requests=4).save(tmp_path / "run")
    tables = sorted((tmp_path / "run").glob("*.parquet"))
    assert len(tables) == 5
    for table in tables:
        shown = section(made["reference/files.md"], f"### {table.name}")
        schema = pq.read_schema(table)
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", shown, re.M)
        assert rows == [(one.name, str(one.type)) for one in schema]
    shown = section(made["reference/files.md"], "### requests.parquet")
    assert "| `swapped_tokens` | int64 |" in shown
    assert "| `late_tokens` | int64 | after the first, with a gap over slo\\_tpot\\_s |" in shown


def test_links_lead_somewhere(made):
    for path, page in made.items():
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"`[^`]*`", "", page)):
            assert ((ROOT / "docs" / path).parent / target).resolve().is_file(), target


def test_each_page_is_in_the_navigation(made):
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    made = [path for path in made if not path.startswith("results/")]  # a page links to these
    assert all(f": {path}\n" in site for path in made) and "\n  /results/\n" in site


def test_text_of_the_code_is_no_markup():
    assert text("a_b of [x], `c_d` *") == "a\\_b of \\[x\\], `c_d` \\*"
    assert text("see docs/fleet.md.") == "see [fleet.md](../fleet.md)."
    assert text("see docs/no_such.md") == "see docs/no\\_such.md"
    assert cell("a | `b | c`\n  d") == "a \\| `b \\| c` d"


def test_aligned_names_become_a_table():
    said = "First.\n\nlong_name one\n          more\nb, c      two\nd         three\n    on\nEnd."
    rows = "| `long_name` | one more |\n| `b, c` | two |\n| `d` | three on |"
    assert docstring(said) == f"First.\n\n| name | what |\n| --- | --- |\n{rows}\n\nEnd."
    assert docstring("No names\nin this one.\n\n    x = 1") == (
        "No names in this one.\n\n```python\nx = 1\n```"
    )
