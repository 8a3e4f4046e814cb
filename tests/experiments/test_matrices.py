"""docs/results/matrices.md is what its command writes, and each "no" on it is the line that the
command says."""

import contextlib
import io
import re
from functools import cache

import pytest

from tests import matrices
from tests.matrices import BACKENDS, PAGE, Cell, general, page, tried
from tests.parameters import mostly_nightly
from twinserve.policies.registry import ledger_names, policy_names
from twinserve.sim.cli import main as cli
from twinserve.sim.setup.audit import AuditError
from twinserve.sim.setup.config import SettingsError

TABLES = ("ledger", "prefixes", "backend")


@cache
def shown() -> dict[str, dict[str, dict[str, Cell]]]:
    """The committed page: table -> policy -> column -> cell, with the reason of each "no" in place
    of its number."""
    text = PAGE.read_text(encoding="utf-8")
    notes = dict(re.findall(r"^(\d+)\. (.+)$", text, re.M))
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [
            [part.strip() for part in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        cells = {
            row[0].strip("`"): dict(zip(head[1:], map(_cell(notes), row[1:]), strict=True))
            for row in rows
        }
        tables.append(cells)
    return dict(zip(TABLES, tables, strict=True))


def _cell(notes: dict[str, str]):
    def read(text: str) -> Cell:
        number = re.search(r"no \((\d+)\)", text)
        return Cell("no", notes[number[1]]) if number else Cell(text.strip("*"))

    return read


def refusals(table: str, in_ci: int = 1) -> list:
    """(policy, column, reason) of each "no" there. in_ci: of so many one runs in .ci/run"""
    found = [
        (policy, column, cell.refusal)
        for policy, cells in shown()[table].items()
        for column, cell in cells.items()
        if cell.refusal
    ]
    return [
        pytest.param(*one, id="-".join(one[:2]), marks=[pytest.mark.nightly] * (i % in_ci > 0))
        for i, one in enumerate(found)
    ]


def command(*arguments: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(list(arguments))
        except SystemExit as stopped:
            return int(stopped.code or 0), said.getvalue()
    return 0, said.getvalue()


SMALL = (
    "-t poisson --requests 3 --rate 1 --cap-length 64 --num-blocks 40 --block-tokens 8 --quiet"
).split()
SMALL += "--max-num-seqs 8 --max-num-batched-tokens 304".split()


def test_the_page_has_every_policy_ledger_and_backend():
    for table in TABLES:
        assert list(shown()[table]) == policy_names()
        columns = list(BACKENDS) if table == "backend" else ledger_names()
        assert all(list(cells) == columns for cells in shown()[table].values())


@pytest.mark.nightly
@pytest.mark.parametrize("policy", mostly_nightly(["bros", "vllm"], "vllm"))
def test_rows_are_what_is_found(policy):
    for table, cells in zip(TABLES, matrices.rows(policy), strict=True):
        got = {
            column: Cell(cell.text, general(policy, cell.refusal)) for column, cell in cells.items()
        }
        assert got == shown()[table][policy]


@pytest.mark.nightly
def test_the_page_is_what_the_command_writes():
    assert page(policy_names()) == PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger", "reason"), refusals("prefixes", in_ci=6))
def test_prefix_caching_is_refused_in_these_words(policy, ledger, reason):
    code, said = command("simulate", "-p", f"{policy}:kv={ledger}", "--prefix-caching", *SMALL)
    assert code == cli.BAD_INPUT
    assert general(policy, said.removeprefix("error: ").strip()) == reason


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "backend", "reason"), refusals("backend", in_ci=4))
def test_a_backend_refuses_in_these_words(policy, backend, reason, tmp_path):
    if backend == "`replay --physical`":
        code, said = command(
            "simulate",
            "-p",
            policy,
            *SMALL,
            "--no-async-scheduling",
            "--out",
            str(tmp_path / "run"),
        )
        assert code == 0, said
        code, said = command(
            "replay",
            str(tmp_path / "run"),
            "--model",
            "tiny",
            "--mode",
            "free",
            "--physical",
            "--quiet",
        )
        said = said.removeprefix("error: ").strip()
        assert code == cli.BAD_INPUT
    elif backend == "`simulate`":
        code, said = command("simulate", "-p", policy, *SMALL)
        said = said.removeprefix("error: ").strip()
        assert code == cli.BAD_INPUT
    else:
        said = tried(lambda: BACKENDS[backend](policy)).refusal
    assert general(policy, said) == reason


def test_a_defect_is_no_refusal():
    def broken() -> str:
        raise AuditError("a grant without memory")

    with pytest.raises(AuditError):
        tried(broken)

    def refused() -> str:
        raise SettingsError("not  so\nmany")

    assert tried(refused) == Cell("no", "not so many")


def test_reasons_name_nobody():
    line = (
        "--physical lays KV out as ledger bidirectional or layerwise does, and policy vtc runs on "
        "paged: drop it"
    )
    assert general("vtc", line) == line.replace("vtc", "NAME").replace("paged", "KV")
