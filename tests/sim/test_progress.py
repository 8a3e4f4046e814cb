"""How far a command is: nothing said to those who do not wait, whole lines to those who do, and an
estimate only where there is something to judge by."""

import io
import re

import pytest

from tests.commands import status
from twinserve.sim.cli import progress as shown
from twinserve.sim.cli.main import main, simulate_main
from twinserve.sim.cli.progress import RunProgress, left_text, plain_line, time_left
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Progress, run_policy

SECONDS = 3_790
LINE = re.compile(
    r"\w+: [\d,.]+ (of [\d,.]+ s simulated|s simulated \(last arrival at [\d,.]+ s\)), "
    r"[\d,]+ of [\d,]+ requests, [\d,.]+x real time"
    r"(, \d+ (s|min) left)?"
)


class Wall:
    """A wall clock that goes when it is told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(now_s: float, finished: int = 0, submitted: int = 0, **changes) -> Progress:
    known = {"total": 12_031, "total_s": SECONDS, **changes}
    return Progress("bros", now_s, finished, submitted, **known)


def watched(until_s: int, file: io.StringIO, **options) -> Wall:
    """A run at 230 times real time, that reports ten times a wall second until then."""
    wall = Wall()
    with RunProgress(True, file, wall, **options) as progress:
        progress.begin("bros")
        for tenth in range(10 * until_s):
            wall.now = 1_000.0 + tenth / 10
            share = 23 * tenth / SECONDS
            progress.report(state(23 * tenth, int(12_031 * share), int(12_031 * share) + 5))
        progress.end()
    return wall


# -- plain lines ---------------------------------------------------------------------------------
def test_a_command_of_less_than_five_seconds_says_nothing():
    file = io.StringIO()
    watched(5, file)
    assert file.getvalue() == ""


def test_a_long_run_says_a_whole_line_after_five_seconds_and_then_every_ten():
    file = io.StringIO()
    watched(16, file)
    assert file.getvalue().splitlines() == [
        "bros: 1,150 of 3,790 s simulated, 3,650 of 12,031 requests, 230x real time, 11 s left",
        "bros: 3,450 of 3,790 s simulated, 10,951 of 12,031 requests, 230x real time, 1 s left",
    ]


def test_the_seconds_before_the_first_line_are_the_commands():
    """Ten policies of three seconds each are worth a word."""
    file, wall = io.StringIO(), Wall()
    progress = RunProgress(True, file, wall)
    for number in range(10):
        progress.begin(f"p{number}")
        for _ in range(30):
            wall.now += 0.1
            progress.report(state(50.0, 10, 20))
        progress.end()
    assert [line.partition(":")[0] for line in file.getvalue().splitlines()] == ["p1", "p4", "p8"]


def test_who_wants_quiet_gets_it():
    file, wall = io.StringIO(), Wall()
    progress = RunProgress(False, file, wall)
    progress.begin("bros")
    wall.now += 100
    progress.report(state(100.0, 5, 6))
    progress.steps(3, 10)
    progress.download(10**6, None)
    progress.say("a headline")
    assert file.getvalue() == ""


def test_a_terminal_shows_the_same_as_a_bar_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file, wall = Terminal(), Wall()
    with RunProgress(True, file, wall) as progress:
        progress.begin("bros")
        wall.now += 5
        progress.report(state(1_150, 3_650, 3_700))
        task = progress.bar.tasks[-1]
        assert [task.fields["left"], task.fields["state"]] == [
            "11 s left",
            "1,150 of 3,790 s simulated, 3,650 of 12,031 requests, 230x real time",
        ]
        assert task.completed == pytest.approx(1_150 / SECONDS, abs=1e-3)
    assert "bros: " not in file.getvalue()


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (lambda p: p.steps(300, 1_200), "x: 300 of 1,200 steps, 30 s left"),
        (lambda p: p.count(3, 4, "points"), "x: 3 of 4 points, 3 s left"),
        (lambda p: p.part(0.5, "prefill, 12 steps measured"), "x: prefill, 12 steps measured, "),
        (lambda p: p.report(state(9_000, 5, 6, total_s=0.0)), "x: 9,000 s simulated, 5 of 12,031"),
        (lambda p: p.report(state(9.53, 5, 6, total_s=12.4)), "x: 9.5 of 12.4 s simulated, 5 of"),
        (lambda p: p.report(state(4_000, 5, 6)), "x: 4,000 s simulated (last arrival at 3,790 s)"),
        (
            lambda p: p.report(state(5, 5, 6)),
            "x: 5 of 3,790 s simulated, 5 of 12,031 requests, 0.5x",
        ),
    ],
)
def test_every_kind_of_work_says_how_far_it_is(tell, said):
    file, wall = io.StringIO(), Wall()
    progress = RunProgress(True, file, wall)
    progress.begin("x")
    wall.now += 10
    tell(progress)
    assert said in file.getvalue() and file.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("size", "said"), [(50_000_000, "download: 20.0 of 50.0 MB, 15 s left\n"), (None, " 20.0 MB\n")]
)
def test_a_download_knows_its_end_only_where_the_server_tells(size, said):
    file, wall = io.StringIO(), Wall()
    progress = RunProgress(True, file, wall)
    progress.download(1_000, size)
    wall.now += 10
    progress.download(20_000_000, size)
    assert file.getvalue().endswith(said)


# -- estimates -----------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_time_left_is_exact_where_the_pace_is_even(share):
    assert time_left(share, 100 * share) == (
        pytest.approx(100 * (1 - share)) if 100 * share >= 2 else None
    )


@pytest.mark.parametrize(("share", "elapsed_s"), [(0.0, 60), (0.4, 0.5), (1.0, 60), (0.0, 0.0)])
def test_nothing_is_estimated_from_nothing_nor_at_the_end(share, elapsed_s):
    assert time_left(share, elapsed_s) is None and left_text(None) == ""
    assert plain_line("x", "1 of 2", left_text(None)) == "x: 1 of 2"


@pytest.mark.parametrize(
    ("left_s", "said"),
    [(11.4, "11 s"), (119, "119 s"), (120, "2 min"), (3_700, "1 h 2 min"), (86_400, "24 h 0 min")],
)
def test_time_left_is_told_as_people_would(left_s, said):
    assert left_text(left_s) == f"{said} left"


# -- what a simulation reports -------------------------------------------------------------------
def reported(**settings) -> tuple[list[Progress], object]:
    inputs, states = resolve(SimulationConfig(**settings)), []
    return states, run_policy(inputs, inputs.policies[0], states.append)


def test_a_run_in_which_nothing_ends_reports_all_the_same():
    states, _ = reported(trace="fixed:100,1000", rate=100.0, requests=4, exact=True)
    assert len(states) > 30 and {s.finished for s in states[:-2]} == {0}
    times = [s.now_s for s in states]
    assert times == sorted(set(times))


@pytest.mark.slow
@pytest.mark.parametrize("pool", [0, 8])
def test_a_runs_share_grows_with_it_and_counts_no_pool_for_the_list(pool):
    states, result = reported(trace="fixed:400,50", rate=8.0, requests=300, pool=pool)
    last = result.rows.requests.query("service_class == 'rt'")["arrival_s"].max()
    shares = [s.share for s in states]
    assert {s.total_s for s in states} == {last} and {s.total for s in states} == {300}
    assert all(0 <= s.share <= s.now_s / last and s.finished <= 300 for s in states)
    assert shares[-1] > 0.9 and all(b > a - 0.02 for a, b in zip(shares, shares[1:], strict=False))


@pytest.mark.slow
def test_who_watches_a_run_changes_nothing():
    settings = {"trace": "fixed:400,50", "rate": 8.0, "requests": 60, "pool": 4, "replicas": 2}
    inputs = resolve(SimulationConfig(**settings))
    alone, (_, seen) = run_policy(inputs, inputs.policies[0]), reported(**settings)
    assert seen.rows.requests.equals(alone.rows.requests) and seen.rows.steps.equals(
        alone.rows.steps
    )


# -- commands ------------------------------------------------------------------------------------
@pytest.fixture
def wall(monkeypatch) -> Wall:
    """The clock of the commands, which stands still: how long they take here says nothing."""
    clock = Wall()
    monkeypatch.setattr(shown, "_WALL", clock)
    return clock


class Ticking(Wall):
    """Each look at it takes a tenth of a second."""

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def run(capsys, command, words: str) -> tuple[str, str]:
    assert not status(command, words.split())
    return capsys.readouterr()


@pytest.mark.slow
def test_a_command_without_a_terminal_says_lines_that_can_be_searched(capsys, monkeypatch, wall):
    words = "--trace fixed:400,50 --rate 8 --requests 200 -p vllm -p bros"
    _, before = run(capsys, simulate_main, words)
    monkeypatch.setattr(shown, "_WALL", Ticking())
    monkeypatch.setattr(shown, "_FIRST_S", 0.0)
    monkeypatch.setattr(shown, "_EVERY_S", 0.0)
    out, err = run(capsys, simulate_main, words)
    lines = err.removeprefix(before).splitlines()
    assert len(lines) > 4 and [line for line in lines if not LINE.fullmatch(line)] == []
    assert any(line.endswith(" left") for line in lines)
    assert {line.partition(":")[0] for line in lines} == {"vllm", "bros"}
    for silent in ("--quiet", "--json"):
        assert run(capsys, simulate_main, f"{words} {silent}")[1] == ""


@pytest.mark.slow
def test_a_report_of_several_runs_says_how_far_it_is(capsys, monkeypatch, tmp_path, wall):
    words = f"--trace fixed:400,50 --rate 8 --requests 20 -p vllm -p mlfq -q --out {tmp_path}/runs"
    run(capsys, simulate_main, words)
    monkeypatch.setattr(shown, "_FIRST_S", 0.0)
    monkeypatch.setattr(shown, "_EVERY_S", 0.0)
    out, err = run(capsys, main, f"report {tmp_path}/runs --out {tmp_path}/page.html")
    assert out == f"{tmp_path}/page.html\n"
    assert err == "report: 1 of 2 folders read\nreport: 2 of 2 folders read\n"
