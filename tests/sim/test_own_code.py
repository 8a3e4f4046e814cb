"""Policies, routers and readers of a user's own: what they do wrong is one line, and the checks of
`sim/setup/audit.py` find it."""

import re
from pathlib import Path

import pytest

from tests.commands import status
from twinserve.own_code import RegistryError, fault
from twinserve.policies.registry import parse_policy
from twinserve.sim.cli import main as cli
from twinserve.sim.fleet.routers.base import PerRequest
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.setup.audit import AuditError, check_reader, check_router
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import caching_differs
from twinserve.sim.sweep.combinations import Run
from twinserve.sim.sweep.output import own_names
from twinserve.traces.load import load_trace
from twinserve.traces.readers.formats import read_measurement
from twinserve.traces.workload import WorkloadError

POLICY = """from twinserve.policies.baselines.vllm import VllmPolicy
class Mine(VllmPolicy):
    name = "mine"
    def plan(self, view, ledger):
        {line}
        return super().plan(view, ledger)
"""
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text("utf-8")
(READER,) = re.findall(r"^```python\n# gateway.py\n(.*?)^```$", PAGE, re.S | re.M)
READER += """
class Careless(Gateway):
    name = "careless"
    def read(self, data, path, options):
        rows = [json.loads(line) for line in data.splitlines()]
        return Workload.build([r["at"] for r in rows], [r["in"] for r in rows], [9] * len(rows))
"""
LOG = "".join(f'{{"at": {i / 4}, "in": {20 + i}, "out": {5 + i}}}\n' for i in range(12))
SMALL = ("-t", "poisson", "--rate", "20", "--requests", "12", "-q")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(READER)
    (tmp_path / "log.jsonl").write_text(LOG)
    return tmp_path


def said(capsys, *words: str) -> tuple[int, str]:
    return status(cli.main, words), "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("view.now_s", "mine.py:5: 'SystemView' has no 'now_s' (did you mean 'now'?)"),
        ("self.limits.max_seqs", "mine.py:5: 'EngineLimits' has no 'max_seqs'"),
        ("leger.usage()", "mine.py:5: there is no 'leger' (did you mean 'ledger'?)"),
        ("{}[3]", "mine.py:5: KeyError: 3"),
        ("open('nowhere')", "mine.py:5: FileNotFoundError: [Errno 2] No such file"),
        ("view.requests.ids.index('no')", "mine.py:5: ValueError: 'no' is not in list"),
    ],
)
def test_a_policy_that_fails_is_one_line(line, says, folder, capsys):
    (folder / "mine.py").write_text(POLICY.format(line=line))
    code, shown = said(capsys, "simulate", "-p", "mine.py:Mine", *SMALL)
    assert code == cli.BAD_INPUT and shown.startswith(f"error: {says}")
    assert shown.endswith(" (--traceback shows how it was called)\n") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "plan = super().plan(view, ledger); plan.tokens = plan.tokens * 0; return plan",
            r"grants request '\w+' no token",  # its steps would never end
        ),
        ("super().plan(view, ledger); return", "plan returned NoneType, not a StepPlan"),
    ],
)
def test_a_policy_whose_plan_is_none_is_stopped(lines, says, folder, capsys):
    (folder / "mine.py").write_text(POLICY.format(line=lines))
    code, shown = said(capsys, "simulate", "-p", "mine.py:Mine", *SMALL)
    assert code == cli.BAD_INPUT and shown.count("\n") == 1
    assert re.match(rf"error: policy 'mine' at 0\.\d+ s: {says}", shown)


def test_a_run_with_a_changed_reader_is_refused(folder, capsys):
    words = ("-t", "log.jsonl", "--format", "own.py:Gateway")
    assert said(capsys, "simulate", *words, "--out", "run", "-q")[0] == 0
    assert said(capsys, "simulate", "--config", "run/run.json", "-q")[0] == 0
    (folder / "own.py").write_text(f"{READER}\n# changed")
    code, shown = said(capsys, "simulate", "--config", "run/run.json")
    assert code == cli.BAD_INPUT and shown.startswith("error: format own.py:Gateway: its file has")
    assert said(capsys, "simulate", "--config", "run/run.json", *words[2:], "-q")[0] == 0


@pytest.mark.slow
def test_so_it_is_in_a_sweep(folder, capsys):
    (folder / "mine.py").write_text(POLICY.format(line="view.now_s"))
    words = ("-p", "mine.py:Mine", *SMALL, "--grid", "seed=0,1", "--workers", "2", "--out", "out")
    code, shown = said(capsys, "sweep", *words)
    assert code and "the first with: mine.py:5: 'SystemView' has no 'now_s'" in shown


def test_an_error_of_ours_is_no_fault_of_theirs():
    try:
        {}["x"]
    except KeyError as error:
        assert fault(error) is None


# -- routers ---------------------------------------------------------------------------------------
class First(PerRequest):
    name = "first"

    def place(self, request, stage, view):
        return self.answer(request, view)

    def answer(self, request, view):
        return view.up[0]


def test_routers_that_keep_their_contract():
    assert check_router(First, seeds=[0]) > 50
    assert check_router("least-requests", seeds=[1], replicas=[3]) > 20
    assert check_router(LeastRequests, seeds=[1], replicas=[3]) > 20


class Elsewhere(First):
    def answer(self, request, view):
        return 7


class Oracle(First):
    def answer(self, request, view):
        return view.up[request.output_tokens % len(view.up)]


class Greedy(First):
    def answer(self, request, view):
        return view.up.pop()


class Forgetful(First):
    calls = 0

    def answer(self, request, view):
        Forgetful.calls += 1
        return view.up[Forgetful.calls % 5 % len(view.up)]


@pytest.mark.parametrize(
    ("router", "says"),
    [
        (
            Elsewhere,
            "router first on 2 replicas, seed 0: r.*: the router answered 7; give one of view.up",
        ),
        (Oracle, "with hidden output lengths the router gave other rows"),
        (Greedy, "the router changed view.up"),
        (Forgetful, "a second run gave other rows"),
    ],
)
def test_what_a_router_does_wrong_is_found(router, says):
    with pytest.raises(AuditError, match=says):
        check_router(router, seeds=[0], replicas=[2])


# -- readers ---------------------------------------------------------------------------------------
def test_a_reader_in_a_file_is_a_format(folder, capsys):
    words = ("-t", "log.jsonl", "--format", "own.py:Gateway", "-q")
    code, shown = said(capsys, "simulate", *words, "--out", "run")
    assert code == 0 and "requests completed" in shown
    assert load_trace("log.jsonl", format="own.py:Gateway").provenance.name == "gateway"
    code, shown = said(capsys, "simulate", "--config", "run/run.json", "-q")
    assert code == 0
    with pytest.raises(WorkloadError, match="own.py:Gateway file has requests"):
        read_measurement("log.jsonl", "own.py:Gateway")


def test_a_reader_that_fails_is_one_line(folder, capsys):
    (folder / "log.jsonl").write_text('{"at": 0, "i": 5}\n')
    code, shown = said(capsys, "simulate", "-t", "log.jsonl", "--format", "own.py:Careless", "-q")
    assert code == cli.BAD_INPUT and shown.startswith("error: own.py:21: KeyError: 'in'")
    with pytest.raises(RegistryError, match="did you mean 'Gateway'"):
        load_trace("log.jsonl", format="own.py:Gatway")
    (folder / "log.jsonl").write_text('{"at": 3, "in": 5}\n{"at": 1, "in": 5}\n')
    with pytest.raises(WorkloadError, match="reader 'careless': arrivals do not rise"):
        load_trace("log.jsonl", format="own.py:Careless")


def test_readers_are_checked_with_damaged_files(folder):
    assert check_reader("own.py:Gateway", "log.jsonl") > 10
    with pytest.raises(AuditError, match="cut in the middle: .*own.py:20: JSONDecodeError"):
        check_reader("own.py:Careless", "log.jsonl")
    with pytest.raises(AuditError, match="own.py:Gateway, own.py as it is: own.py: no gateway's"):
        check_reader("own.py:Gateway", "own.py")


def test_sweeps_say_the_names_of_classes_unless_two_are_alike(folder):
    for name in ("a", "b"):
        (folder / f"{name}.py").write_text(POLICY.format(line="pass"))
    both = [
        Run({}, SimulationConfig(policy=(f"{name}.py:Mine:kv=paged",)), "") for name in ("a", "b")
    ]
    assert own_names(both[:1]) == {"a.py:Mine:kv=paged": "mine:kv=paged"}
    assert own_names(both) == {}
    (folder / "c.py").write_text(POLICY.format(line="pass") + "    prefix_caching = False\n")
    specs = [parse_policy(text) for text in ("vllm", "bros", "c.py:Mine")]
    (line,) = caching_differs(SimulationConfig(), specs)
    assert line.startswith("prefix caching is by default off for mine, on for vllm; --prefix-cac")
    assert not caching_differs(SimulationConfig(prefix_caching=True), specs)
    assert not caching_differs(SimulationConfig(), specs[:2])
